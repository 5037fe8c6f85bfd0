"""Environments of the peers: made once by `pip`, remade when the pins change. Standard library only."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ops.bench.peers.interface import CannotSetUp, Place, Say

PINS = Path(__file__).parent / "requirements"


def pins(name: str) -> Path:
    """The requirements file of a peer."""
    return PINS / f"{name}.txt"


def run(command: Sequence[str], place: Place) -> None:
    """Runs a step of a set-up; its output goes into `setup.log`. CannotSetUp with the last line when it fails."""
    log = place.root / "setup.log"
    with log.open("ab") as said:
        done = subprocess.run(list(command), stdout=said, stderr=said, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        raise CannotSetUp(f"{Path(command[0]).name} ended with code {done.returncode}: {' '.join(last)} ({log})")


def settled(place: Place, name: str) -> bool:
    """Whether the set-up has been finished with the very pins of now."""
    mark = place.root / "set-up"
    return mark.exists() and mark.read_text() == _digest(name)


def settle(place: Place, name: str) -> None:
    """Notes that the set-up is finished."""
    (place.root / "set-up").write_text(_digest(name))


def make(place: Place, say: Say) -> None:
    """A fresh, empty environment with `pip`."""
    place.root.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(place.root / "env", ignore_errors=True)
    say(f"{place.root.name}: making its environment")
    run([sys.executable, "-m", "venv", str(place.root / "env")], place)


def install(place: Place, *arguments: str) -> None:
    """`pip install` into it."""
    run([str(place.python), "-m", "pip", "install", "--disable-pip-version-check", *arguments], place)


def _digest(name: str) -> str:
    return hashlib.sha256(pins(name).read_bytes()).hexdigest()
