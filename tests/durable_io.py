"""The seams of durable IO, replaced: they count steps, die at the n-th, fail or tear one, lose what was not synced.

A step is a call that changes what a later process finds: of a file, of a directory, or (`SteppedHeaders`) of the
arena. `Died` is no Exception, so that no handler lives on after it; once dead, every further step is refused, as if
the process were gone.

    killed       everything done before the step is there; the step itself not at all, or in part (`torn`, `cut`)
    power lost   also: pages, file ends, names and removals that no sync covered, each in any state since its last sync;
                 names in the order in which they were made, as a file system with a journal keeps them
"""

import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from services.store.arena.headers import Headers
from services.store.arena.records import RECORD, STATE_AT
from shared.fileio import FileIO

PAGE = 4096
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""For many small tiers: LMDB's own syncs are real, and on a disk they would be most of a test's time."""


class Died(BaseException):
    """The process was killed here."""


class _Inode:
    """A file's states since its last sync, kept through a descriptor of our own so that its name does not matter.

    `pages`: former contents of pages that were overwritten. `states`: whole former contents of a file that is
    appended to or cut.
    """

    def __init__(self, fd: int) -> None:
        self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self.pages: dict[int, list[bytes]] = {}
        self.states: list[bytes] = []

    def content(self) -> bytes:
        return os.pread(self.fd, os.fstat(self.fd).st_size, 0)

    def lose(self, rng: random.Random) -> None:
        """To any state between the last sync and now."""
        if self.states:
            kept = rng.randrange(len(self.states) + 1)
            states = [*self.states, self.content()]
            now = states[kept]
            if kept + 1 < len(states) and states[kept + 1].startswith(now):  # part of the next append, too
                grown = states[kept + 1][: rng.randint(len(now), len(states[kept + 1]))]
                solid = rng.randint(len(now), len(grown)) if rng.random() < 0.3 else len(grown)
                now = grown[:solid] + bytes(len(grown) - solid)  # the size was written, the bytes were not
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, now, 0)
        for page, versions in self.pages.items():
            chosen = rng.randrange(len(versions) + 1)
            if chosen < len(versions):
                os.pwrite(self.fd, versions[chosen], page * PAGE)


class DurableIO(FileIO):
    """`die_at`: number of the step (from 1) at which the process dies. `torn`: that step is half done first; of a
    store into the arena `cut` bytes.

    `fail`: name of a step -> OSError to raise. Syncs are not carried out, only noted: a killed process loses
    nothing, `lose_power` loses what no sync covered.
    """

    def __init__(self, *, die_at: int = 0, torn: bool = False, cut: int = 0) -> None:
        self.die_at = die_at
        self.torn = torn
        self.cut = cut
        self.dead = False
        self.steps: list[str] = []
        self.fail: dict[str, OSError] = {}
        self.free: tuple[int, int] | None = None
        self.short_writes = False
        self._inodes: dict[tuple[int, int], _Inode] = {}
        self._names: list[tuple[Path, Callable[[], None]]] = []
        """Changes of directories that no sync covered: the directory, and how to undo it."""

    def step(self, name: str) -> bool:
        """True: do part of it, then die."""
        if self.dead:
            raise Died
        self.steps.append(name)
        if len(self.steps) == self.die_at:
            self.dead = True
            if not self.torn and not self.cut:
                raise Died
            return True
        if name in self.fail:
            raise self.fail[name]
        return False

    # --- steps

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        if not flags & os.O_CREAT:
            return super().open(path, flags, mode)
        there = path.exists()
        self.step("create")
        if there and flags & os.O_TRUNC:
            before = os.open(path, os.O_RDWR)
            self._keep_state(before)
            os.close(before)
        fd = super().open(path, flags, mode)
        if not there:
            self._names.append((path.parent, lambda: path.unlink(missing_ok=True)))
        return fd

    def write(self, fd: int, data: Any) -> int:
        torn = self.step("write")
        self._keep_state(fd)
        if torn:
            super().write(fd, data[: len(data) // 2])
            raise Died
        if self.short_writes and len(data) > 1:
            data = data[: (len(data) + 1) // 2]
        return super().write(fd, data)

    def pwritev(self, fd: int, parts: Sequence[Any], offset: int) -> int:
        torn = self.step("pwritev")
        whole = b"".join(bytes(part) for part in parts)
        self._keep_pages(fd, offset, len(whole))
        if torn:
            parts = _cut(parts, len(whole) // 2 // PAGE * PAGE)
            if parts:
                super().pwritev(fd, parts, offset)
            raise Died
        if self.short_writes and len(whole) > PAGE:
            parts = _cut(parts, PAGE)
        return super().pwritev(fd, parts, offset)

    def allocate(self, fd: int, size: int) -> None:
        if self.step("allocate"):
            super().allocate(fd, size // 2)
            raise Died
        super().allocate(fd, size)

    def fdatasync(self, fd: int) -> None:
        if self.step("fdatasync"):
            raise Died
        inode = self._inodes.get(_key(fd))
        if inode is not None:
            inode.pages.clear()
            inode.states.clear()

    def truncate(self, fd: int, size: int) -> None:
        if self.step("truncate"):
            raise Died
        if size < os.fstat(fd).st_size and os.fstat(fd).st_size < 1 << 20:
            self._keep_state(fd)
        super().truncate(fd, size)

    def punch(self, fd: int, offset: int, length: int) -> None:
        torn = self.step("punch")
        self._keep_pages(fd, offset, length)
        if torn:
            super().punch(fd, offset, max(PAGE, length // 2 // PAGE * PAGE))
            raise Died
        super().punch(fd, offset, length)

    def unlink(self, path: Path) -> None:
        if self.step("unlink"):
            raise Died
        again = self._restorer(path)
        super().unlink(path)
        self._names.append((path.parent, again))

    def link(self, old: Path, new: Path) -> None:
        if self.step("link"):
            raise Died
        super().link(old, new)
        self._names.append((new.parent, lambda: new.unlink(missing_ok=True)))

    def rename(self, old: Path, new: Path) -> None:
        if self.step("rename"):
            raise Died
        again = self._restorer(new) if new.is_file() else None
        super().rename(old, new)

        def undo() -> None:
            if old.is_dir():  # made anew since
                shutil.rmtree(old)
            os.rename(new, old)
            if again is not None:
                again()

        self._names.append((new.parent, undo))

    def sync_dir(self, path: Path) -> None:
        if self.step("sync_dir"):
            raise Died
        self._names = [change for change in self._names if change[0] != path]

    def mark(self, what: str) -> None:
        if self.step(what):
            raise Died

    def free_bytes(self, path: Path) -> tuple[int, int]:
        return self.free or super().free_bytes(path)

    # --- power

    def _inode(self, fd: int) -> _Inode:
        key = _key(fd)
        if key not in self._inodes:
            self._inodes[key] = _Inode(fd)
        return self._inodes[key]

    def _keep_pages(self, fd: int, offset: int, length: int) -> None:
        inode = self._inode(fd)
        for page in range(offset // PAGE, -(-(offset + length) // PAGE)):
            before = os.pread(inode.fd, PAGE, page * PAGE).ljust(PAGE, b"\0")
            inode.pages.setdefault(page, []).append(before)

    def _keep_state(self, fd: int) -> None:
        inode = self._inode(fd)
        inode.states.append(inode.content())

    def _restorer(self, path: Path) -> Callable[[], None]:
        """Brings a name back that is about to go, with what its file then holds."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        kept = self._inode(fd)
        os.close(fd)

        def again() -> None:
            path.write_bytes(kept.content())

        return again

    def lose_power(self, rng: random.Random) -> None:
        """What no sync covered is on the device in its last state, or in any one before it back to its last sync."""
        for inode in self._inodes.values():
            inode.lose(rng)
        for _, undo in reversed(self._names[rng.randint(0, len(self._names)) :]):
            undo()
        self.let_go()

    def let_go(self) -> None:
        """Forgets all; the kernel has closed the dead process's files."""
        for inode in self._inodes.values():
            os.close(inode.fd)
        self._inodes.clear()
        self._names.clear()


class SteppedHeaders(Headers):
    """An arena whose every store is a step of `io`, named `put N` for N bytes; a store of more than 8 bytes may be cut
    anywhere, `io.cut` bytes in.
    """

    def __init__(self, buffer: Any, geometry: Any, io: DurableIO) -> None:
        self.io = io
        super().__init__(buffer, geometry)

    def _put(self, at: int, data: bytes) -> None:
        if self.io.step(f"put {len(data)}"):
            super()._put(at, data[: min(self.io.cut or len(data) // 2, len(data) - 1)])
            raise Died
        super()._put(at, data)

    def _put_word(self, at: int, value: int) -> None:
        if self.io.step("put 8"):
            raise Died
        super()._put_word(at, value)

    def _free_rows(self, start: int, count: int, chosen: Any) -> None:
        for row in chosen.tolist():
            self._put(start + row * RECORD.itemsize + STATE_AT, b"\0")
        for row in chosen.tolist():
            self._put(start + row * RECORD.itemsize, bytes(RECORD.itemsize))


def _key(fd: int) -> tuple[int, int]:
    facts = os.fstat(fd)
    return facts.st_dev, facts.st_ino


def _cut(parts: Sequence[Any], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of a vector."""
    kept: list[memoryview] = []
    for part in parts:
        view = memoryview(part).cast("B")[:nbytes]
        if view:
            kept.append(view)
        nbytes -= len(view)
    return kept
