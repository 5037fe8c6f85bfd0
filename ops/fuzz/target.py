"""What a target of the fuzzer is, and the helpers that several of them share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from ops.fuzz.mutate import bent


def same(holds: bool, what: str) -> None:
    """A promise of the decoder, kept for this input; AssertionError when not."""
    if not holds:
        raise AssertionError(what)


@dataclass(frozen=True)
class Target:
    """One decoder.

    `seeds`: inputs that it takes, made by our own encoders. `check`: feeds it one input (the path is an empty
    directory of its own); True when it was taken and holds what it promises, False when it was refused with an error
    that is documented. Whatever else it raises is a finding.
    """

    name: str
    seeds: Callable[[Random], list[bytes]]
    check: Callable[[bytes, Path], bool]
    bend: Callable[[bytes, Random, Sequence[bytes]], bytes] = bent
    cpu_s: float = 3.0
    """Seconds of processor time that one input may take."""
    memory: int = 256 << 20
    """Bytes of address space that one input may take."""


def joined(parts: Sequence[bytes]) -> bytes:
    """Several inputs in one: each behind its length."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def parted(data: bytes, count: int) -> list[bytes]:
    """Inverse of `joined` for any bytes: `count` parts, short or empty where the data ends."""
    parts = []
    for _ in range(count):
        length = int.from_bytes(data[:4], "little")
        parts.append(data[4 : 4 + length])
        data = data[4 + length :]
    return parts
