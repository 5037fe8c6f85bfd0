"""The seam of durable IO, replaced: it counts steps, dies at the n-th, fails or tears a write, loses un-synced pages.

A step is a call that changes what a later process finds. `Died` is no Exception, so that no handler lives on after it;
once dead, every further step is refused, as if the process were gone.
"""

import os
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.fileio import FileIO

PAGE = 4096


class Died(BaseException):
    """The process was killed here."""


class DurableIO(FileIO):
    """`die_at`: number of the step (from 1) at which the process dies. `torn`: that step is half done first.

    `fail`: name of a step -> OSError to raise; `fail_at`: only at this step number. Syncs are not carried out, only
    noted: a killed process loses nothing, `lose_power` loses what no sync covered.
    """

    def __init__(self, *, die_at: int = 0, torn: bool = False) -> None:
        self.die_at = die_at
        self.torn = torn
        self.dead = False
        self.steps: list[str] = []
        self.fail: dict[str, OSError] = {}
        self.free: tuple[int, int] | None = None
        self.short_writes = False
        self._versions: dict[Path, dict[int, list[bytes]]] = defaultdict(dict)

    def _step(self, name: str) -> bool:
        """True: do half of it, then die."""
        if self.dead:
            raise Died
        self.steps.append(name)
        if len(self.steps) == self.die_at:
            self.dead = True
            if not self.torn:
                raise Died
            return True
        if name in self.fail:
            raise self.fail[name]
        return False

    # --- steps

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        if flags & os.O_CREAT:
            self._step("create")
        return super().open(path, flags, mode)

    def write(self, fd: int, data: Any) -> int:
        if self._step("write"):
            super().write(fd, data[: len(data) // 2])
            raise Died
        if self.short_writes and len(data) > 1:
            data = data[: (len(data) + 1) // 2]
        return super().write(fd, data)

    def pwritev(self, fd: int, parts: Sequence[Any], offset: int) -> int:
        torn = self._step("pwritev")
        whole = b"".join(bytes(part) for part in parts)
        self._remember(fd, offset, len(whole))
        if torn:
            parts = _cut(parts, len(whole) // 2 // PAGE * PAGE)
            if parts:
                super().pwritev(fd, parts, offset)
            raise Died
        if self.short_writes and len(whole) > PAGE:
            parts = _cut(parts, PAGE)
        return super().pwritev(fd, parts, offset)

    def fdatasync(self, fd: int) -> None:
        if self._step("fdatasync"):
            raise Died
        self._versions.pop(_path_of(fd), None)

    def truncate(self, fd: int, size: int) -> None:
        if self._step("truncate"):
            raise Died
        super().truncate(fd, size)

    def punch(self, fd: int, offset: int, length: int) -> None:
        torn = self._step("punch")
        self._remember(fd, offset, length)
        if torn:
            super().punch(fd, offset, max(PAGE, length // 2 // PAGE * PAGE))
            raise Died
        super().punch(fd, offset, length)

    def unlink(self, path: Path) -> None:
        if self._step("unlink"):
            raise Died
        super().unlink(path)

    def rename(self, old: Path, new: Path) -> None:
        if self._step("rename"):
            raise Died
        super().rename(old, new)

    def sync_dir(self, path: Path) -> None:
        if self._step("sync_dir"):
            raise Died

    def mark(self, what: str) -> None:
        if self._step(what):
            raise Died

    def free_bytes(self, path: Path) -> tuple[int, int]:
        return self.free or super().free_bytes(path)

    # --- power

    def _remember(self, fd: int, offset: int, length: int) -> None:
        path = _path_of(fd)
        with path.open("rb") as file:
            for page in range(offset // PAGE, -(-(offset + length) // PAGE)):
                file.seek(page * PAGE)
                self._versions[path].setdefault(page, []).append(file.read(PAGE).ljust(PAGE, b"\0"))

    def lose_power(self, rng: random.Random) -> None:
        """Each page that no sync covered is on the device in its last version or in any one before it."""
        for path, pages in self._versions.items():
            if not path.exists():
                continue
            with path.open("r+b") as file:
                for page, versions in pages.items():
                    chosen = rng.randrange(len(versions) + 1)
                    if chosen < len(versions):
                        file.seek(page * PAGE)
                        file.write(versions[chosen])
        self._versions.clear()


def _path_of(fd: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{fd}"))


def _cut(parts: Sequence[Any], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of a vector."""
    kept: list[memoryview] = []
    for part in parts:
        view = memoryview(part).cast("B")[:nbytes]
        if view:
            kept.append(view)
        nbytes -= len(view)
    return kept
