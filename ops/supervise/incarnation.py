"""The incarnation counter of a service: raised on disk before each start, so that no two lives share a number."""

import os
from pathlib import Path

from shared.fileio import NO_ROOM, FileIO, replace_file

MOST = 1 << 48
"""Starts that a service may have had; a number above it is damage."""


def next_incarnation(directory: Path, service: str, io: FileIO | None = None) -> int:
    """Raises and returns the counter; durable before it is used. A damaged file starts above any plausible value.

    The caller holds the supervisor's lock of this service, so there is one writer.
    """
    path = directory / service
    try:
        last = int(path.read_text())
        if not 0 <= last < MOST:
            raise ValueError(f"{last} starts")
    except FileNotFoundError:
        last = 0
    except ValueError:
        last = int(path.stat().st_mtime)
    io, text = io or FileIO(), f"{last + 1}\n".encode()
    try:
        replace_file(io, path, text, part=path.with_suffix(".part"))
    except OSError as error:
        if error.errno not in NO_ROOM or not path.exists():
            raise
        _overwrite(io, path, text)
    return last + 1


def _overwrite(io: FileIO, path: Path, text: bytes) -> None:
    """On a full disk, where no second file fits: a service that died must come back all the same.

    These few bytes lie in one sector, and a number never gets shorter.
    """
    fd = io.open(path, os.O_WRONLY)
    try:
        io.pwritev(fd, [text], 0)
        io.fdatasync(fd)
    finally:
        io.close(fd)
