"""Targets of the fuzzer with a fault of each kind planted, so that a test sees the fuzzer find it."""

import os
import signal
from pathlib import Path
from random import Random

from ops.fuzz.target import Target


def seeds(rng: Random) -> list[bytes]:
    return [b"fine", b"fault", b"fine too"]


def raises(data: bytes, _: Path) -> bool:
    if data == b"fault":
        raise KeyError("undocumented")
    return True


def stands(data: bytes, _: Path) -> bool:
    while data == b"fault":
        pass
    return True


def swells(data: bytes, _: Path) -> bool:
    return len(bytearray(1 << 30 if data == b"fault" else 1)) > 0


def dies(data: bytes, _: Path) -> bool:
    if data == b"fault":
        os.kill(os.getpid(), signal.SIGSEGV)
    return True


def refuses(data: bytes, _: Path) -> bool:
    return False


TARGETS = [
    Target("raises", seeds, raises),
    Target("stands", seeds, stands, cpu_s=0.2),
    Target("swells", seeds, swells),
    Target("dies", seeds, dies),
    Target("refuses", seeds, refuses),
]
