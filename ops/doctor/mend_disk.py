"""Mending the disk tier, each by the store's own code; the caller holds the home, and no store runs.

What can't be trusted goes: an entry, a slot, an index. Never a block that holds.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from services.store.disk.index import DiskIndex
from services.store.disk.index_place import IndexPlace
from services.store.disk.index_record import Entry
from services.store.disk.scratch import ScratchPool
from services.store.disk.segment_file import SegmentFile
from services.store.disk.segments import SegmentFiles
from shared.fileio import FileIO

if TYPE_CHECKING:
    from ops.doctor.patient import Patient

Mend = Callable[[], str]


def superblock(path: Path) -> Mend:
    """Opening a segment writes a damaged first page anew and extends a file that was cut."""

    def do() -> str:
        io = FileIO()
        segment = SegmentFile.open(io, path, ScratchPool(4096))
        if segment is None:
            return f"removed {path}, in which nothing was left"
        io.close(segment.fd)
        return f"gave {path} its first page and size back"

    return do


def index_aside(directory: Path) -> Mend:
    """The next start rebuilds it."""

    def do() -> str:
        IndexPlace(directory, FileIO()).move_aside()
        return f"moved the index aside to {directory}.damaged; the store rebuilds it from the footers"

    return do


def drop_entries(patient: "Patient", entries: Sequence[Entry]) -> Mend:
    """Out of the index; what lies in their slots becomes an orphan, if anything does, and is swept."""

    def do() -> str:
        with _index(patient) as index:
            index.apply(deletes=[entry.identity for entry in entries])
        _free(patient, [entry.slot for entry in entries if entry.slot not in patient.segments.footers])
        return f"dropped entries of the index: {len(entries):,}"

    return do


def drop_slots(patient: "Patient", slots: Sequence[int]) -> Mend:
    """Blocks whose bytes are wrong: out of the index first, then a hole."""

    def do() -> str:
        identities = [patient.segments.footers[slot].identity for slot in slots if slot in patient.segments.footers]
        with _index(patient) as index:
            held = [entry for entry in map(index.get, identities) if entry is not None and entry.slot in set(slots)]
            index.apply(deletes=[entry.identity for entry in held])
        _free(patient, slots)
        return f"dropped damaged blocks of the disk tier: {len(slots):,}"

    return do


def sweep(patient: "Patient", slots: Sequence[int]) -> Mend:
    """Holes where orphans lay."""

    def do() -> str:
        _free(patient, slots)
        return f"swept orphan slots: {len(slots):,}"

    return do


def _free(patient: "Patient", slots: Sequence[int]) -> None:
    config = patient.config.store
    io = FileIO()
    files = SegmentFiles(patient.places.store / "segments", capacity=config.disk_bytes, floor=0.0, io=io)
    try:
        files.free(slots)
        files.flush()
    finally:
        files.close()


@contextmanager
def _index(patient: "Patient") -> Iterator[DiskIndex]:
    """Open as the store opens it; one that it would not trust is begun anew by that, which mends the rest."""
    index = DiskIndex(patient.places.store / "index", io=FileIO())
    try:
        yield index
    finally:
        index.close()


def remove_tree(path: Path) -> Mend:
    """A directory that only people may want."""

    def do() -> str:
        nbytes = size_of(path)
        shutil.rmtree(path)
        return f"removed {path} ({nbytes:,} bytes)"

    return do


def rename(path: Path) -> Mend:
    """Out of the way, in place of an older one."""

    def do() -> str:
        aside = path.with_name(path.name + ".damaged")
        path.replace(aside)
        return f"moved {path} aside to {aside.name}"

    return do


def size_of(path: Path) -> int:
    """Bytes of the files in a directory."""
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
