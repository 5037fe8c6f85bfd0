"""The one seam through which everything durable does its IO, so that a test can die, tear or fail at each step.

`FileIO` calls the kernel and nothing else. The crash-point tests replace it by one that counts the calls, stops
at the n-th, and keeps un-synced writes apart. Every error is the OSError of the kernel.
"""

import contextlib
import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that freeing space cures."""

_libc = ctypes.CDLL(None, use_errno=True)
_PUNCH_HOLE_KEEP_SIZE = 0x01 | 0x02


class FileIO:
    """Positioned IO on file descriptors; short reads and writes are the caller's to handle."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """A descriptor; close-on-exec and not through a symlink."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def close(self, fd: int) -> None:
        """Closes the descriptor."""
        os.close(fd)

    def write(self, fd: int, data: Any) -> int:
        """One write at the file's end or position; returns the bytes taken."""
        return os.write(fd, data)

    def pwritev(self, fd: int, parts: Sequence[Any], offset: int) -> int:
        """One vectored write; returns the bytes taken."""
        return os.pwritev(fd, parts, offset)

    def preadv(self, fd: int, parts: Sequence[Any], offset: int) -> int:
        """One vectored read; returns the bytes read."""
        return os.preadv(fd, parts, offset)

    def allocate(self, fd: int, size: int) -> None:
        """Room for `size` bytes, all of it really there."""
        os.posix_fallocate(fd, 0, size)

    def fdatasync(self, fd: int) -> None:
        """Data and the size are on the device when this returns."""
        os.fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        """Cuts or extends (sparse) the file."""
        os.ftruncate(fd, size)

    def punch(self, fd: int, offset: int, length: int) -> None:
        """Gives [offset, offset + length) back to the file system; it reads as zeros from now on."""
        args = (ctypes.c_int(fd), ctypes.c_int(_PUNCH_HOLE_KEEP_SIZE), ctypes.c_int64(offset), ctypes.c_int64(length))
        while _libc.fallocate(*args) != 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def unlink(self, path: Path) -> None:
        """Removes a file."""
        path.unlink()

    def link(self, old: Path, new: Path) -> None:
        """A second name; FileExistsError when it is taken."""
        os.link(old, new)

    def rename(self, old: Path, new: Path) -> None:
        """Renames atomically."""
        old.rename(new)

    def sync_dir(self, path: Path) -> None:
        """Makes creations, renames and removals in a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def mark(self, what: str) -> None:
        """Comes right before a step whose IO a library does by itself: a transaction, its sync."""

    def free_bytes(self, path: Path) -> tuple[int, int]:
        """(bytes that we may still use, bytes in all) of the file system."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize


def write_all(io: FileIO, fd: int, data: bytes) -> None:
    """Normally one write; goes on after a short one. OSError of the kernel, with part of it written perhaps."""
    view = memoryview(data)
    while view:
        taken = io.write(fd, view)
        if taken <= 0:
            raise OSError(errno.ENOSPC, "the write made no progress")
        view = view[taken:]


def replace_file(io: FileIO, path: Path, data: bytes, *, part: Path, durable: bool = True) -> None:
    """`path` has this content from now on, or what it had before: an OSError leaves no `part` behind.

    `durable`: it survives a power loss once this returns.
    """
    fd = io.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        try:
            write_all(io, fd, data)
            if durable:
                io.fdatasync(fd)
        finally:
            io.close(fd)
        io.rename(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            io.unlink(part)
        raise
    if durable:
        io.sync_dir(path.parent)
