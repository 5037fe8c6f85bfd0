"""Which segment files there are: found at open, made, lost under us, or empty and removed.

Owns the files; what lies in their slots is `segments`' business. The owner of this object locks around whatever
changes `files`.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from services.store.disk.errors import DiskFault, DiskFull, DiskUnusable
from services.store.disk.footer import FORMAT, MAX_SLOTS, PAGE, SLOT_BITS, Superblock
from services.store.disk.scratch import ScratchPool
from services.store.disk.segment_file import SegmentFile, parse_name, typed
from shared.fileio import FileIO

MAX_SEGMENTS = 1 << (32 - SLOT_BITS)


class SegmentSet:
    """`files`: by number, all open. `counters` belong to the owner."""

    def __init__(self, directory: Path, io: FileIO, scratch: ScratchPool, counters: Counter[str]) -> None:
        self.directory = directory
        self.files: dict[int, SegmentFile] = {}
        self._io = io
        self._scratch = scratch
        self._counters = counters
        self._lost: set[int] = set()

    def open_all(self) -> Iterator[SegmentFile]:
        """Opens what lies here, one by one; DiskUnusable when the directory or a file is not ours to use."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = sorted(os.listdir(self.directory))
            if not os.access(self.directory, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise DiskUnusable(f"disk tier: {self.directory} can't be used: {error.strerror}") from error
        for name in names:
            named = parse_name(name)
            if named is None or named[0] >= MAX_SEGMENTS or named[0] in self.files:
                self._counters["foreign_files"] += 1
                continue
            try:
                segment = SegmentFile.open(self._io, self.directory / name, self._scratch)
            except (DiskFault, DiskFull):
                self._counters["segments_unreadable"] += 1
                continue
            if segment is not None:
                self.files[segment.number] = segment
                yield segment

    def create(self, slot_bytes: int, segment_bytes: int) -> SegmentFile:
        """A new file with a number that no other has or had; not in `files` yet. DiskFull, DiskFault."""
        try:
            self.directory.mkdir(mode=0o700, exist_ok=True)  # somebody may have removed it
            there = {named[0] for name in os.listdir(self.directory) if (named := parse_name(name)) is not None}
        except OSError as error:
            raise typed(error, f"{self.directory} can't be used") from error
        taken = {*self.files, *self._lost, *there}
        number = next((n for n in range(MAX_SEGMENTS) if n not in taken), None)
        if number is None:
            raise DiskFull(f"there are {MAX_SEGMENTS} segment files, and no more numbers")
        slots = max(1, min(MAX_SLOTS, (segment_bytes - PAGE) // slot_bytes))
        return SegmentFile.create(self._io, self.directory, Superblock(FORMAT, number, slot_bytes - PAGE, slots))

    def lose(self, segment: SegmentFile) -> None:
        """The file has no name any more: what is in it would be gone at the next start, so it is gone now."""
        if self.files.pop(segment.number, None) is not None:
            self._lost.add(segment.number)
            self._counters["segments_lost"] += 1
            segment.retire()

    def remove(self, segment: SegmentFile) -> None:
        """Removes a file that holds nothing and that the owner has taken out of `files`. OSError of the kernel."""
        self._io.unlink(segment.path)
        self._counters["segments_removed"] += 1
        segment.retire()

    def sync(self) -> None:
        """The directory's names are on the device. OSError of the kernel."""
        self._io.sync_dir(self.directory)

    def close(self) -> None:
        """Closes all files; idempotent."""
        for segment in self.files.values():
            segment.retire()
        self.files.clear()
