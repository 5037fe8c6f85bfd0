"""The disk tier's slots as a stranger sees them: every footer, and whether the bytes before it are those it names."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from services.store.disk.footer import (
    FORMAT,
    PAGE,
    SLOT_BITS,
    Footer,
    Superblock,
    padded,
    unpack_footer,
    unpack_superblock,
)
from services.store.disk.segment_file import SegmentFile, parse_name
from services.store.disk.slot_space import HOLE
from shared.fileio import FileIO


@dataclass
class SegmentFacts:
    """One file. `needs`: bytes that its slots take, `size`: that it has; `allocated`: that the file system gives it;
    `counted`: of slots that hold data. `trouble`: "", "superblock", "unfinished" (none was written yet), "format N",
    or an error's text.
    """

    path: Path
    number: int
    trouble: str = ""
    version: int = FORMAT
    size: int = 0
    needs: int = 0
    allocated: int = 0
    counted: int = 0


@dataclass
class Segments:
    """`footers` by slot; `torn`: slots that hold data and no footer; `bad`: slots whose payload is not what their
    footer says; `foreign`: files that are no segments.
    """

    files: list[SegmentFacts] = field(default_factory=list)
    footers: dict[int, Footer] = field(default_factory=dict)
    torn: list[int] = field(default_factory=list)
    bad: list[int] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)

    @property
    def numbers(self) -> frozenset[int]:
        """Segments that are there."""
        return frozenset(facts.number for facts in self.files)

    @property
    def unreadable(self) -> frozenset[int]:
        """Segments that are there, and nothing can be said of their slots."""
        known = ("", "superblock", "unfinished")
        return frozenset(facts.number for facts in self.files if facts.trouble not in known)


def read_segments(directory: Path, *, payloads: bool) -> Segments:
    """All of it, in time linear in the slots that hold data. Never raises for what lies there."""
    found = Segments()
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return found
    for name in names:
        if parse_name(name) is None:
            found.foreign.append(directory / name)
            continue
        try:
            fd = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        except OSError as error:
            found.files.append(SegmentFacts(directory / name, number_of(name), trouble=str(error.strerror)))
            continue
        try:
            _read_file(found, directory / name, fd, payloads=payloads)
        finally:
            os.close(fd)
    return found


def number_of(name: str) -> int:
    """Segment number of a file's name that is one."""
    named = parse_name(name)
    return named[0] if named else -1


def _read_file(found: Segments, path: Path, fd: int, *, payloads: bool) -> None:
    number, payload_bytes = parse_name(path.name) or (-1, 0)
    facts = os.fstat(fd)
    entry = SegmentFacts(path, number, size=facts.st_size, allocated=facts.st_blocks * 512)
    found.files.append(entry)
    page = os.pread(fd, PAGE, 0)
    block = unpack_superblock(page)
    if block is not None and block.version != FORMAT:
        entry.trouble, entry.version = f"format {block.version}", block.version
        return
    if block is None or (block.number, block.payload_bytes) != (number, payload_bytes):
        entry.trouble = "superblock" if any(page) else "unfinished"
        slots = (facts.st_size - PAGE) // (payload_bytes + PAGE)  # as the store would write it anew
        if slots < 1 or payload_bytes % PAGE or not payload_bytes:
            return
        block = Superblock(FORMAT, number, payload_bytes, slots)
    segment = SegmentFile(FileIO(), path, fd, block, direct=False)
    entry.needs = segment.offset(segment.slots)
    states = segment.extents()
    for index, state in enumerate(states):
        if state != HOLE:
            entry.counted += segment.slot_bytes
            _read_slot(found, segment, index, payloads=payloads)


def _read_slot(found: Segments, segment: SegmentFile, index: int, *, payloads: bool) -> None:
    slot = segment.number << SLOT_BITS | index
    at = segment.offset(index)
    try:
        page = os.pread(segment.fd, PAGE, at + segment.payload_bytes)
        footer = unpack_footer(page, slot)
        if footer is None or padded(footer.length) != segment.payload_bytes:
            found.torn.append(slot)
            return
        found.footers[slot] = footer
        if payloads:
            data = os.pread(segment.fd, footer.length, at)
            if len(data) != footer.length or xxhash.xxh3_64_intdigest(data) != footer.checksum:
                found.bad.append(slot)
    except OSError:
        found.bad.append(slot)


def still_bad(path: Path, footer: Footer) -> bool:
    """Looks at one slot again: whether footer and payload still contradict each other."""
    again = Segments()
    named = parse_name(path.name)
    if named is None:
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        block = Superblock(FORMAT, named[0], named[1], 1 << SLOT_BITS)
        segment = SegmentFile(FileIO(), path, fd, block, direct=False)
        _read_slot(again, segment, footer.slot & ((1 << SLOT_BITS) - 1), payloads=True)
    finally:
        os.close(fd)
    return bool(again.bad) and again.footers.get(footer.slot) == footer
