"""The index's directory and the notes beside it that say whether the index may be trusted.

`opening`: there while it is opened; found at a start, the last start died of it. `scanning`: how many starts in a
row began to read all of it and never ended. `boot`: the boot in which it is open; commits are not synced one by
one, which survives a killed process but not a stopped machine. `clean` in its place after an orderly close.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.store.disk.lmdb_file import damage
from shared.fileio import FileIO, replace_file
from shared.machine import boot_id

CLEAN = "clean"
_SCANS = 3
"""A kill during the first scan is nothing unusual; this many in a row are."""


class IndexPlace:
    """OSError of the kernel from everything here."""

    def __init__(self, directory: Path, io: FileIO) -> None:
        self.directory = directory
        self.data = directory / "data.mdb"
        self.aside = directory.with_name(directory.name + ".damaged")
        self._opened = (0, 0)
        self._io = io

    def distrust(self) -> str | None:
        """Why what lies here must not be opened; None when it may, or when nothing lies here."""
        if not self.data.exists():
            return None
        if (self.directory / "opening").exists():
            return "the last start died while it opened the index"
        scans = self._scans()
        if scans >= _SCANS:
            return f"the last {scans} starts died while they read the index"
        boot = self._note("boot")
        if boot not in (CLEAN, boot_id()):
            return "the machine stopped while the index was in use"
        reason = damage(self.data)
        return f"the index file is damaged: {reason}" if reason else None

    def move_aside(self) -> None:
        """The directory to `<name>.damaged`, in place of an older one, for people to look at."""
        self._io.mark("remove what was moved aside before")
        shutil.rmtree(self.aside, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # somebody has removed it under us
            self._io.rename(self.directory, self.aside)

    def moved(self) -> str | None:
        """Why what is open is no longer what lies here, None when it is: removed, or replaced, under us."""
        try:
            found = os.stat(self.data)
        except OSError as error:
            return f"{self.data} is gone: {error.strerror}"
        return None if (found.st_dev, found.st_ino) == self._opened else f"{self.data} was replaced by another file"

    def file_bytes(self) -> int:
        """What the index takes of the file system, and what was moved aside."""
        total = 0
        for path in (self.data, self.aside / "data.mdb"):
            with contextlib.suppress(OSError):
                total += os.stat(path).st_blocks * 512
        return total

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Around opening: leaves its note behind when we die, not when an error comes out."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self.write_note("opening", str(os.getpid()))
        try:
            yield
        finally:
            self._io.unlink(self.directory / "opening")

    def has_opened(self) -> None:
        """The file that lies here now is the one that is open."""
        found = os.stat(self.data)
        self._opened = found.st_dev, found.st_ino

    def in_use(self) -> None:
        """From now on commits may be lost with the machine; durable."""
        self.write_note("boot", boot_id(), durable=True)

    def clean(self) -> None:
        """All is on the device; durable."""
        self.write_note("boot", CLEAN, durable=True)

    def scan_begins(self) -> None:
        """One more start reads the whole index."""
        self.write_note("scanning", str(self._scans() + 1))

    def scan_ends(self) -> None:
        """It was read to its end."""
        self._io.unlink(self.directory / "scanning")

    def distrust_next_time(self) -> None:
        """The index gave an error: whatever happens now, the next start does not open it."""
        self.write_note("opening", "damaged")

    def reach(self, size: int) -> None:
        """The data file has at least `size` bytes, those of its map; new ones are a hole and take no room.

        LMDB writes no page that was freed in its own transaction. Its file may so end before the last page that its
        header names; a kill could leave that at any commit, and it looks like a truncated file. No page lies behind
        the map, so a file of the map's size never ends too early. (To extend the file after each commit left that
        moment open.)
        """
        if os.stat(self.data).st_size >= size:
            return
        fd = self._io.open(self.data, os.O_RDWR)
        try:
            self._io.truncate(fd, size)
        finally:
            self._io.close(fd)

    def _scans(self) -> int:
        """What the note says; of a damaged one the most."""
        note = self._note("scanning")
        if len(note) < 4 and note.isascii() and note.isdigit():
            return int(note)
        return _SCANS if note else 0

    def _note(self, name: str) -> str:
        try:
            return (self.directory / name).read_text(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def write_note(self, name: str, text: str, *, durable: bool = False) -> None:
        """Replaces a note in one step."""
        part = self.directory / f"{name}.part"
        replace_file(self._io, self.directory / name, text.encode(), part=part, durable=durable)
