"""Mending arenas; the caller holds the home, and no store runs. A file is only touched under its own lock."""

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from services.store.arena.headers import Headers
from services.store.arena.records import EXTENT_BYTES, PAGE, unpack_superblock
from shared.paths import Taken

Mend = Callable[[], str]


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """A descriptor of an arena that nobody uses; Taken when somebody does."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Taken(f"arena {path} is in use by a store; stop it first") from None
        yield fd
        fcntl.flock(fd, fcntl.LOCK_UN)  # a mapping holds a duplicate, so closing alone might not
    finally:
        os.close(fd)


def remove(path: Path) -> Mend:
    """The file, unless a store has it."""

    def do() -> str:
        with locked(path) as fd:
            nbytes = os.fstat(fd).st_blocks * 512
            path.unlink()
        return f"removed {path} ({nbytes:,} bytes)"

    return do


def free_slots(path: Path, slots: Sequence[int]) -> Mend:
    """FREE headers for blocks that can't be used."""

    def do() -> str:
        with locked(path) as fd:
            geometry, _ = unpack_superblock(os.pread(fd, PAGE, 0))
            headers = Headers(memoryview(mmap.mmap(fd, geometry.total)), geometry)
            for slot in slots:
                headers.free(slot)
        return f"freed slots of the arena: {len(slots):,}"

    return do


def free_extents(path: Path, extents: Sequence[int]) -> Mend:
    """Extents that serve nothing, until the store gives them to a slot size again."""

    def do() -> str:
        with locked(path) as fd:
            for extent in extents:
                os.pwrite(fd, bytes(EXTENT_BYTES), PAGE + extent * EXTENT_BYTES)
        return f"freed extents of the arena: {len(extents):,}"

    return do
