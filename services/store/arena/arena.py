"""The arena file: host tier bytes and their header tables, in shared memory, outliving every process.

    attach: ours, 0600, whole, same layout, same size asked for ──► mapped as it is; headers say what is in it
    anything else, or a file on a disk since whose last use the machine has stopped
                  ──► one clear line and a new file under the same name (a foreign owner's file is refused)

The file is allocated in full before it is mapped and we never shrink it. Somebody else may: touching what was cut off
is SIGBUS, so its size is asked for before memory is touched, and who finds it cut ends in words (`on_cut`), to begin a
new one. It is never unmapped while the process lives: threads may be inside. Its key names this very file.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from services.store.arena.headers import Headers
from services.store.arena.records import PAGE, Geometry, aligned, pack_superblock, unpack_superblock
from services.store.arena.size import SMALLEST, clamped, geometry_for, is_memory
from shared.arena_key import arena_key
from shared.fileio import FileIO
from shared.machine import boot_id


class ArenaRefused(OSError):
    """No arena can be had at this path; the text says why and what to do."""


class ArenaCut(OSError):
    """The file is shorter than what is mapped; the text has both sizes."""


def _raise(error: ArenaCut) -> None:
    raise error


@dataclass
class Arena:
    """An open arena. `notes`: lines for the log; `recovered`: the file is that of an earlier store.

    `on_cut`: what to do when the file has been cut; it must not return.
    """

    path: Path
    key: str
    geometry: Geometry
    buffer: memoryview
    fd: int
    recovered: bool
    notes: list[str]
    on_cut: Callable[[ArenaCut], None] = _raise

    def __post_init__(self) -> None:
        self.headers = Headers(self.buffer, self.geometry, self.check_whole)

    def check_whole(self) -> None:
        """`on_cut` when the file is shorter than what is mapped. A microsecond."""
        mapped: Any = self.buffer.obj
        now = mapped.size()
        if now < self.geometry.total:
            whole = self.geometry.total
            self.on_cut(ArenaCut(f"{self.path} was cut by somebody, to {now:,} of {whole:,} bytes"))

    def payload(self, offset: int, length: int) -> memoryview:
        """Writable view of a slot's payload, padded to whole pages."""
        self.check_whole()
        return self.buffer[offset : offset + aligned(length)]

    def trouble(self) -> str:
        """One line when the file is no longer under its name, else nothing; `on_cut` when it is not whole."""
        self.check_whole()
        try:
            named = os.stat(self.path, follow_symlinks=False)
        except OSError:
            named = None
        mine = os.fstat(self.fd)
        if named is None or (named.st_dev, named.st_ino) != (mine.st_dev, mine.st_ino):
            return (
                f"{self.path} was removed by somebody (logind's RemoveIPC, a cleaner): the next store makes a new one; "
                "this one ends when its blocks are on disk, or a worker needs them that can't find the file"
            )
        return ""

    def close(self) -> None:
        """Gives the file to the next store; the mapping goes with its last view. Idempotent."""
        if self.fd >= 0:
            fcntl.flock(self.fd, fcntl.LOCK_UN)  # the mapping holds a duplicate, so closing alone would not
            os.close(self.fd)
            self.fd = -1


class _Discard(Exception):
    """What lies there is ours to replace; the text says what is wrong with it."""


def open_arena(path: Path, wanted: int, io: FileIO | None = None) -> Arena:
    """Attaches to the arena at `path`, or makes one of `wanted` bytes (clamped). ArenaRefused, with the way out."""
    notes: list[str] = []
    io = io or FileIO()
    try:
        return _attach(path, wanted, io)
    except FileNotFoundError:
        pass
    except _Discard as error:
        notes.append(f"arena {path} is discarded: {error}")
        _remove(path, io)
    except ArenaRefused:
        raise
    except OSError as error:
        raise ArenaRefused(f"arena {path} can't be opened: {error.strerror}; remove it") from error
    try:
        return _create(path, wanted, notes, io)
    except ArenaRefused:
        raise
    except OSError as error:
        raise ArenaRefused(f"arena {path} can't be made: {error.strerror}") from error


def _remove(path: Path, io: FileIO) -> None:
    with contextlib.suppress(FileNotFoundError):
        io.unlink(path)


def _attach(path: Path, wanted: int, io: FileIO) -> Arena:
    fd = io.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise ArenaRefused(f"arena {path} is no regular file; remove it")
        if facts.st_uid != os.getuid():
            raise ArenaRefused(f"arena {path} belongs to uid {facts.st_uid}, we are {os.getuid()}; set store.arena_dir")
        _lock(fd, path)
        if facts.st_mode & 0o077:
            os.fchmod(fd, 0o600)
        try:
            geometry, key = unpack_superblock(os.pread(fd, PAGE, 0))
        except ValueError as error:
            raise _Discard(str(error)) from error
        if facts.st_size != geometry.total:
            raise _Discard(f"it has {facts.st_size:,} bytes, its superblock says {geometry.total:,}")
        if geometry.wanted != aligned(wanted):
            raise _Discard(f"it was made for {geometry.wanted:,} bytes, the configuration asks for {wanted:,}")
        if facts.st_blocks * 512 < facts.st_size:
            try:
                io.allocate(fd, geometry.total)
            except OSError as error:
                raise _Discard(f"it has holes, and there is no room to fill them: {error.strerror}") from error
        arena = _map(path, fd, geometry, key, recovered=True, notes=[])
        if arena.headers.boot != _boot_number() and not is_memory(path.parent):
            raise _Discard("the machine has stopped since, and nothing had synced it")  # a cleared block might be back
        return arena
    except BaseException:
        os.close(fd)
        raise


def _lock(fd: int, path: Path) -> None:
    """One store a file, whatever run dir it uses; held as long as the descriptor."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ArenaRefused(f"arena {path} is in use by another store; stop it") from None


def _create(path: Path, wanted: int, notes: list[str], io: FileIO) -> Arena:
    """Sized by what is free now; somebody may take that before it is allocated, and then by what is free then."""
    most, full = wanted, ""
    while True:
        nbytes, note = clamped(most, path.parent)
        if nbytes < SMALLEST:
            least = f"a host tier of {wanted:,} bytes is too small; at least {SMALLEST:,}, or 0"
            raise ArenaRefused(full or note or least)
        try:
            return _allocate(path, nbytes, wanted, [*notes, *filter(None, (full, note))], io)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            full = f"{path.parent} had no room for an arena of {nbytes:,} bytes: {error.strerror}"
            most = nbytes // 2


def _allocate(path: Path, nbytes: int, wanted: int, notes: list[str], io: FileIO) -> Arena:
    size = geometry_for(nbytes)
    geometry = Geometry(size.extents, size.extent_bytes, aligned(wanted))
    key = secrets.token_bytes(16)
    fd = io.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        _lock(fd, path)
        io.allocate(fd, geometry.total)
        io.pwritev(fd, [pack_superblock(geometry, key)], 0)  # last: what is cut short before is no arena
        return _map(path, fd, geometry, key, recovered=False, notes=notes)
    except BaseException:
        os.close(fd)
        _remove(path, io)
        raise


def _map(path: Path, fd: int, geometry: Geometry, key: bytes, *, recovered: bool, notes: list[str]) -> Arena:
    buffer = memoryview(mmap.mmap(fd, geometry.total))
    arena = Arena(path, arena_key(fd), geometry, buffer, fd, recovered, notes)
    if not recovered:
        arena.headers.boot = _boot_number()
    return arena


def _boot_number() -> int:
    return int.from_bytes(blake2b(boot_id().encode(), digest_size=8).digest(), "little")
