"""A store's files as the disk gives them: the rate of plain direct reads, with nothing looked at, and cold pages."""

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services.store.stager import READERS

PIECE = 1 << 21
MOST = 256 << 20
"""Bytes that are read at most."""


def direct_rate(folder: Path) -> float:
    """Bytes a second over the files' beginnings, as many reads at a time as the store has readers."""
    files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in sorted(folder.iterdir())]
    try:
        pieces = [(fd, at) for fd in files for at in _data(fd)][: MOST // PIECE]
        if not pieces:
            raise RuntimeError(f"{folder} has nothing to read")
        memory = [memoryview(mmap.mmap(-1, PIECE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) for _ in range(len(pieces))]
        for view in memory:
            view[:: mmap.PAGESIZE] = bytes(PIECE // mmap.PAGESIZE)  # first touch is not the disk's time
        with ThreadPoolExecutor(READERS) as readers:
            begun = time.perf_counter()
            got = list(
                readers.map(lambda work: os.preadv(work[0][0], [work[1]], work[0][1]), zip(pieces, memory, strict=True))
            )
            took = time.perf_counter() - begun
    finally:
        for fd in files:
            os.close(fd)
    return sum(got) / took


def _data(fd: int) -> list[int]:
    """Offsets of whole pieces that are written: holes cost no read."""
    end, at, found = os.fstat(fd).st_size, 0, list[int]()
    while at < end:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # only a hole is left
            break
        at = os.lseek(fd, begin, os.SEEK_HOLE)
        first = -(-begin // PIECE) * PIECE
        found += range(first, at - PIECE + 1, PIECE)
    return found


def forget_pages(store: Path) -> None:
    """The file system keeps nothing of index and segments that is on disk already."""
    for path in (store / "index" / "data.mdb", *(store / "segments").iterdir()):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
