"""The seam of durable IO with a disk behind it that fails, hangs or fills up on demand. Syncs are not carried out."""

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shared.fileio import FileIO


class FailingIO(FileIO):
    """`fails`: name of a call -> errno; it fails until taken out. `holds`: names of calls that wait for `go_on`.

    Names: create, open, write, pwritev, preadv, fdatasync, truncate, punch, unlink, rename, sync_dir, and the marks
    (index transaction, index sync). `calls` counts them; `after` is called after each.
    """

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.holds: set[str] = set()
        self.go_on = threading.Event()
        self.held = threading.Event()
        self.calls: Counter[str] = Counter()
        self.free: tuple[int, int] | None = None
        self.only: str = ""
        self.after: Callable[[], None] = lambda: None

    def _call(self, name: str, path: object = "") -> None:
        self.calls[name] += 1
        if name in self.holds:
            self.held.set()
            self.go_on.wait()
        if name in self.fails and self.only in str(path):
            code = self.fails[name]
            raise OSError(code, os.strerror(code))

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self._call("create" if flags & os.O_CREAT else "open", path)
        return super().open(path, flags, mode)

    def write(self, fd: int, data: Any) -> int:
        self._call("write")
        return super().write(fd, data)

    def pwritev(self, fd: int, parts: Sequence[Any], offset: int) -> int:
        self._call("pwritev")
        done = super().pwritev(fd, parts, offset)
        self.after()
        return done

    def preadv(self, fd: int, parts: Sequence[Any], offset: int) -> int:
        self._call("preadv")
        return super().preadv(fd, parts, offset)

    def fdatasync(self, fd: int) -> None:
        self._call("fdatasync")

    def truncate(self, fd: int, size: int) -> None:
        self._call("truncate")
        super().truncate(fd, size)

    def punch(self, fd: int, offset: int, length: int) -> None:
        self._call("punch")
        super().punch(fd, offset, length)

    def unlink(self, path: Path) -> None:
        self._call("unlink", path)
        super().unlink(path)

    def rename(self, old: Path, new: Path) -> None:
        self._call("rename", new)
        super().rename(old, new)

    def sync_dir(self, path: Path) -> None:
        self._call("sync_dir", path)

    def mark(self, what: str) -> None:
        self._call(what)
        self.after()

    def free_bytes(self, path: Path) -> tuple[int, int]:
        return self.free or super().free_bytes(path)


class CrowdedIO(FailingIO):
    """A file system of `total` bytes of which `others` take some: what is over it is ENOSPC."""

    def __init__(self, directory: Path, total: int) -> None:
        super().__init__()
        self.directory = directory
        self.total = total
        self.others = 0

    def used(self) -> int:
        """Bytes that our files take."""
        return disk_usage(self.directory)

    def free_bytes(self, path: Path) -> tuple[int, int]:
        return max(0, self.total - self.others - self.used()), self.total

    def pwritev(self, fd: int, parts: Sequence[Any], offset: int) -> int:
        if self.used() + self.others + sum(len(memoryview(part).cast("B")) for part in parts) > self.total:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwritev(fd, parts, offset)


def disk_usage(directory: Path) -> int:
    """As du counts: blocks, not lengths. A file that goes away meanwhile counts as nothing."""
    total = 0
    for file in directory.rglob("*"):
        try:
            total += file.stat().st_blocks * 512 * file.is_file()
        except FileNotFoundError:
            continue
    return total
