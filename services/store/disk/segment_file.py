"""One segment file: opened or created with its superblock, its extents read, IO in whole pages.

Nothing of it is cached beside the file descriptor; what a slot means is in its footer.
"""

import errno
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from services.store.disk.errors import DiskFault, DiskFull, DiskTierError, DiskUnusable
from services.store.disk.footer import FORMAT, MAX_SLOTS, PAGE, Superblock, pack_superblock, unpack_superblock
from services.store.disk.scratch import ScratchPool
from services.store.disk.slot_space import HOLE, UNKNOWN
from shared.fileio import FileIO

_NAME = re.compile(r"(\d{5})-(\d+)\.seg")
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def typed(error: OSError, what: str) -> DiskTierError:
    """The kernel's error as one of ours."""
    reason = f"{what}: {error.strerror or error}"
    return DiskFull(reason) if error.errno in _NO_ROOM else DiskFault(reason)


def parse_name(name: str) -> tuple[int, int] | None:
    """(segment number, payload bytes) of a segment's file name."""
    match = _NAME.fullmatch(name)
    return (int(match.group(1)), int(match.group(2))) if match else None


class SegmentFile:
    """`fd` stays open as long as anybody is `inside`, so that no reader ever meets a closed or reused one."""

    def __init__(self, io: FileIO, path: Path, fd: int, facts: Superblock, *, direct: bool) -> None:
        self.io = io
        self.path = path
        self.fd = fd
        self.number = facts.number
        self.payload_bytes = facts.payload_bytes
        self.slots = facts.slots
        self.direct = direct
        self.dirty = False
        self.sync_lock = threading.Lock()
        self._users = 1  # its owner, until `retire`
        self._counting = threading.Lock()

    @contextmanager
    def inside(self) -> Iterator[bool]:
        """Around any use of `fd`; False: the file is retired and closed, there is nothing in it."""
        with self._counting:
            alive = self._users > 0
            self._users += alive
        try:
            yield alive
        finally:
            if alive:
                self._leave()

    def retire(self) -> None:
        """Its owner needs it no more; whoever is the last inside closes it. Once."""
        self._leave()

    def _leave(self) -> None:
        with self._counting:
            self._users -= 1
            last = not self._users
        if last:
            self.io.close(self.fd)

    def is_named(self) -> bool:
        """Whether the file still lies under its name; if not, what is in it is gone at the next start."""
        try:
            named, mine = os.stat(self.path, follow_symlinks=False), os.fstat(self.fd)
        except OSError:
            return False
        return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)

    @property
    def slot_bytes(self) -> int:
        """Payload and footer."""
        return self.payload_bytes + PAGE

    def offset(self, index: int) -> int:
        """Where slot `index` begins."""
        return PAGE + index * self.slot_bytes

    @classmethod
    def create(cls, io: FileIO, directory: Path, facts: Superblock) -> "SegmentFile":
        """A new file, sparse, durable by name; DiskFull, DiskFault."""
        path = directory / f"{facts.number:05d}-{facts.payload_bytes}.seg"
        try:
            fd, direct = _open(io, path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            segment = cls(io, path, fd, facts, direct=direct)
            try:
                segment.write_superblock()
                io.sync_dir(directory)
            except BaseException:
                io.close(fd)
                with suppress(OSError):  # then it is removed when it is found empty
                    io.unlink(path)
                raise
        except OSError as error:
            raise typed(error, f"segment {path.name} can't be created") from error
        return segment

    @classmethod
    def open(cls, io: FileIO, path: Path, scratch: ScratchPool) -> "SegmentFile | None":
        """An existing file; None for an empty one, which is removed. DiskUnusable for a format that isn't ours.

        A damaged superblock is written anew from the file's name and size: footers name their own slots, so a
        wrong guess here could only cost hits.
        """
        named = parse_name(path.name)
        if named is None:
            raise DiskUnusable(f"{path.name} is no segment of ours")
        try:
            fd, direct = _open(io, path, os.O_RDWR)
        except OSError as error:
            if error.errno == errno.EIO:
                raise typed(error, f"segment {path.name} can't be opened") from error
            # Not damage but a matter of rights or limits: going on without it would have its blocks forgotten.
            raise DiskUnusable(f"disk tier: {path} can't be opened: {error.strerror}") from error
        try:
            segment = cls._opened(io, path, fd, named, scratch, direct=direct)
        except OSError as error:
            io.close(fd)
            raise typed(error, f"segment {path.name} can't be opened") from error
        except BaseException:
            io.close(fd)
            raise
        if segment is None:
            io.close(fd)
            io.unlink(path)
        return segment

    @classmethod
    def _opened(
        cls, io: FileIO, path: Path, fd: int, named: tuple[int, int], scratch: ScratchPool, *, direct: bool
    ) -> "SegmentFile | None":
        number, payload_bytes = named
        size = os.fstat(fd).st_size
        with scratch.borrow(PAGE) as page:
            got = io.preadv(fd, [page[:PAGE]], 0)
            found = unpack_superblock(bytes(page[:got]))
        if found is None or (found.number, found.payload_bytes) != named:
            slots = min(MAX_SLOTS, (size - PAGE) // (payload_bytes + PAGE))
            if slots < 1 or payload_bytes % PAGE or not payload_bytes:
                return None
            segment = cls(io, path, fd, Superblock(FORMAT, number, payload_bytes, slots), direct=direct)
            segment.write_superblock()
            return segment
        if found.version != FORMAT:
            raise DiskUnusable(
                f"{path} is of segment format {found.version}, this version writes {FORMAT}; "
                "start the version that wrote it, or remove the cache with `perdure cache purge`"
            )
        segment = cls(io, path, fd, found, direct=direct)
        if size < segment.offset(segment.slots):  # truncated: what is cut off reads as holes from now on
            io.truncate(fd, segment.offset(segment.slots))
        return segment

    def write_superblock(self) -> None:
        """Size and first page, durable."""
        self.io.truncate(self.fd, self.offset(self.slots))
        with ScratchPool(PAGE).borrow() as page:
            page[:PAGE] = pack_superblock(Superblock(FORMAT, self.number, self.payload_bytes, self.slots))
            self.io.pwritev(self.fd, [page[:PAGE]], 0)
        self.io.fdatasync(self.fd)

    def extents(self) -> bytearray:
        """One byte a slot: UNKNOWN where the file holds data, HOLE where it holds none."""
        state = bytearray((HOLE,)) * self.slots
        at = PAGE
        end = self.offset(self.slots)
        while at < end:
            try:
                start = os.lseek(self.fd, at, os.SEEK_DATA)
                stop = os.lseek(self.fd, start, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:  # no data behind `at`
                    break
                start, stop = at, end  # no such question on this file system: anything may be there
            first = max(0, (start - PAGE) // self.slot_bytes)
            last = min(self.slots, -(-(min(stop, end) - PAGE) // self.slot_bytes))
            state[first:last] = bytes((UNKNOWN,)) * max(0, last - first)
            at = stop
        return state

    def write(self, parts: Sequence[Any], offset: int) -> None:
        """All of `parts` (whole pages) at `offset`; OSError of the kernel, ENOSPC when nothing more goes in."""
        views = [memoryview(part).cast("B") for part in parts]
        while views:
            taken = self.io.pwritev(self.fd, views, offset)
            taken -= taken % PAGE
            if taken <= 0:
                raise OSError(errno.ENOSPC, "the write made no progress")
            offset += taken
            while views and taken >= len(views[0]):
                taken -= len(views.pop(0))
            if views and taken:
                views[0] = views[0][taken:]

    def read(self, parts: Sequence[Any], offset: int) -> int:
        """Fills `parts` from `offset`; the bytes read, fewer only at the file's end."""
        views = [memoryview(part).cast("B") for part in parts]
        total = 0
        while views:
            got = self.io.preadv(self.fd, views, offset)
            got -= got % PAGE
            if got <= 0:
                break
            total += got
            offset += got
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if views and got:
                views[0] = views[0][got:]
        return total


def _open(io: FileIO, path: Path, flags: int) -> tuple[int, bool]:
    """Direct where the file system takes it: the cache is large, read once, and must not push out the page cache."""
    try:
        return io.open(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return io.open(path, flags & ~os.O_EXCL), False
