"""The incarnation counter of a service: raised on disk before each start, so that no two lives share a number."""

import os
from pathlib import Path

from shared.fileio import FileIO

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
    io, part = io or FileIO(), path.with_suffix(".part")
    fd = io.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        io.write(fd, f"{last + 1}\n".encode())
        io.fdatasync(fd)
    finally:
        io.close(fd)
    io.rename(part, path)
    io.sync_dir(directory)
    return last + 1
