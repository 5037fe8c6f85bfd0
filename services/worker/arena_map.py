"""The store's arena file, as this process sees it: mapped once per file, checked before every use.

    store    creates the file, fixes its size (never shrinks it), writes the header table, grants and leases slots
    worker   maps it, reads leased payloads, writes granted ones; never a header, never a slot it was not told
    a new file (another key) is mapped anew; the old mapping goes when its last view does, never under one

A reader of a mapping beyond the end of its file dies of SIGBUS, so the size is asked for again before each payload. A
file that is not the one that the store means is never written: a slot's number means nothing in it.
"""

import mmap
import os
import stat
import threading

import numpy as np
from numpy.typing import NDArray

from shared.arena_key import arena_key

MADV_POPULATE_READ = 22
"""Since Linux 5.14; `mmap` has no name for it. Pages of a shared mapping come writable."""


class ArenaUnusable(OSError):
    """The arena can't be mapped, or an offset is not inside it; the text says which file and why."""


class ArenaMap:
    """One mapped arena file. `key` is the store's name for this very file."""

    def __init__(self, path: str, key: str) -> None:
        self.path = path
        self.key = key
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise ArenaUnusable(f"arena {path!r} can't be opened: {error}") from error
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise ArenaUnusable(f"arena {path!r} is no regular file")
            if facts.st_uid != os.geteuid():
                raise ArenaUnusable(f"arena {path!r} belongs to uid {facts.st_uid}, we are {os.geteuid()}")
            if facts.st_mode & 0o022:
                raise ArenaUnusable(f"arena {path!r} is writable by others (mode {stat.S_IMODE(facts.st_mode):o})")
            if facts.st_size == 0:
                raise ArenaUnusable(f"arena {path!r} is empty")
            if (found := arena_key(fd)) != key:
                raise ArenaUnusable(f"arena {path!r} is another file ({found}) than the store's ({key})")
            self.nbytes = facts.st_size
            try:
                self._map = mmap.mmap(fd, facts.st_size, flags=mmap.MAP_SHARED)
            except (OSError, ValueError) as error:  # no address space left, or it shrank since
                raise ArenaUnusable(f"arena {path!r} can't be mapped: {error}") from error
        finally:
            os.close(fd)  # the mapping keeps a descriptor of its own, which `size` asks
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._populated = 0

    def populate(self, nbytes: int) -> bool:
        """Fills the page tables of the next bytes; True when all are filled, or the kernel can't.

        All at once takes 70 ms a GiB, for which the first hit would wait.
        """
        self.check_size()
        nbytes = min(nbytes, self.nbytes - self._populated)
        if nbytes:
            try:
                self._map.madvise(MADV_POPULATE_READ, self._populated, nbytes)
            except OSError:
                self._populated = self.nbytes  # they are filled as they are used
            else:
                self._populated += nbytes
        return self._populated == self.nbytes

    def check_size(self) -> None:
        """ArenaUnusable when the file is now shorter than what is mapped (touching the rest would be SIGBUS)."""
        now = self._map.size()
        if now < self.nbytes:
            raise ArenaUnusable(f"arena {self.path!r} shrank from {self.nbytes} to {now} bytes")

    def payload(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Writable view, uint8 [nbytes], at a byte offset of the file; ArenaUnusable when it is not all inside."""
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ArenaUnusable(f"payload [{offset}, {offset + nbytes}) is outside the arena of {self.nbytes} bytes")
        self.check_size()
        return self._bytes[offset : offset + nbytes]


class Arenas:
    """The mapping in use; maps anew when path or key change. Thread-safe: loads and saves share it."""

    def __init__(self) -> None:
        self._current: ArenaMap | None = None
        self._lock = threading.Lock()

    def open(self, path: str, key: str) -> ArenaMap:
        """The mapping of this very file, its size checked now; ArenaUnusable when there is none to be had."""
        with self._lock:
            current = self._current
            if current is None or (current.path, current.key) != (path, key):
                self._current = None  # also when mapping fails: a name that moved on is not served by the old file
                self._current = current = ArenaMap(path, key)
            try:
                current.check_size()
            except ArenaUnusable:
                self._current = None
                raise
            return current

    def populate(self, nbytes: int) -> bool:
        """See `ArenaMap.populate`; True also when there is none."""
        with self._lock:
            try:
                return self._current is None or self._current.populate(nbytes)
            except ArenaUnusable:
                return True  # whoever opens it next says so
