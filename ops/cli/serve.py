"""`perdure serve`: checks what must be right, fetches the model, then becomes honcho with the Procfile."""

import os
import platform
import sys
from pathlib import Path
from typing import NoReturn

import click

from ops.cli.exits import USAGE, fail, plain_errors
from shared.config import Config, ConfigError, load_config
from shared.curve.door import check_front
from shared.identity import load_or_create_key
from shared.paths import Lock, Places, default_home

ROOT = Path(__file__).resolve().parents[2]


@click.command()
def serve() -> None:
    """Start all services in the foreground; Ctrl-C stops them. Cached KV stays."""
    with plain_errors():
        check_platform()
        config = load_config()
        if not config.bench.durable:
            raise ConfigError("bench.durable = false keeps no promise and saves nothing; only the benchmark may set it")
        become_stack(config)


def become_stack(config: Config) -> NoReturn:
    """Takes the home and turns this process into honcho. PlaceError or ModelError when something stands against it."""
    places = prepare(config)
    given = os.environ.get("PERDURE_CONFIG", "perdure.toml")
    if Path(given).exists():
        os.environ["PERDURE_CONFIG"] = str(Path(given).absolute())
    os.environ["PERDURE_HOME"] = str(places.home)
    os.environ.update(anchored(config))
    os.environ.setdefault("PERDURE_PYTHON", sys.executable)
    os.environ["PERDURE_STACK_PID"] = str(os.getpid())  # stays ours when we become honcho
    sys.stdout.flush()
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "honcho", "-f", str(ROOT / "Procfile"), "start"])


def check_platform() -> None:
    """Linux on x86-64 or arm64 with Python 3.11 or newer, or one line and exit code 2."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64") or sys.version_info < (3, 11):
        version = platform.python_version()
        fail(
            USAGE, f"Perdure runs on Linux, x86-64 or arm64, Python >= 3.11; this is {sys.platform} {machine} {version}"
        )


def anchored(config: Config) -> dict[str, str]:
    """Settings for relative paths, which the services, started in another folder, would look for there."""
    found = {}
    source, folder = Path(config.model.source).expanduser(), Path(config.model.dir).expanduser()
    if not source.is_absolute() and source.exists():
        found["PERDURE_MODEL__SOURCE"] = str(source.absolute())
    if config.model.dir and not folder.is_absolute():
        found["PERDURE_MODEL__DIR"] = str(folder.absolute())
    return found


def prepare(config: Config) -> Places:
    """Takes the home for this process and its successors, makes its key, and fetches the model if it is not there."""
    places = Places(default_home())
    check_front(config, places)
    places.make()
    Lock(places.lock, f"the stack on {places.home}").keep_across_exec()
    load_or_create_key(places.identity_key)
    fetch_model(config, places)
    return places


def fetch_model(config: Config, places: Places) -> None:
    """Pulls the configured model when it is one that we know and is not here yet."""
    from ops.models.download import pull
    from ops.models.progress import shown
    from ops.models.registry import MODELS

    if config.model.source in MODELS:
        with shown() as progress:
            pull(config.model.source, places.models(config.model.dir), progress)
