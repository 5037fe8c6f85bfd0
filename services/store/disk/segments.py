"""All segment files of the disk tier: allocation within the limits, coalesced verified IO, footers, holes.

Who owns a slot: `allocate` gives it to the caller; a `write` that fails takes it back (punched, free); one that
succeeds leaves it with the caller until `free`. Slots that hold bytes at open are nobody's (UNKNOWN) until
`adopt` or `free`; none of them is ever handed out meanwhile.

Thread-safe; IO runs outside the lock. Two calls must not work on one slot at the same time, except reads.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from services.store.disk.errors import DiskFault, DiskFull, DiskTierError, DiskUnusable
from services.store.disk.footer import FORMAT, MAX_SLOTS, PAGE, SLOT_BITS, Footer, Superblock, padded, unpack_footer
from services.store.disk.segment_file import SegmentFile, parse_name, typed
from services.store.disk.slot_io import SlotIO, cut_runs
from services.store.disk.slot_space import HOLE, SPENT, UNKNOWN, USED, SlotSpace
from shared.fileio import FileIO

SEGMENT_BYTES = 256 << 20


class SegmentFiles:
    """See the module. `floor`: share of the file system left free. `overhead`: other bytes that count as ours."""

    def __init__(
        self,
        directory: Path,
        *,
        capacity: int,
        floor: float,
        io: FileIO,
        overhead: Callable[[], int] = lambda: 0,
        max_slots: int = 0,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Opens all files; DiskUnusable when the directory or a format is not ours to use."""
        self.directory = directory
        self.capacity = capacity
        self.floor = floor
        self.max_slots = max_slots
        self.counters: Counter[str] = Counter()
        self._io = io
        self._overhead = overhead
        self._segment_bytes = max(segment_bytes, min(capacity // 256, MAX_SLOTS * PAGE))
        self._slots = SlotIO(self.counters)
        self._files: dict[int, SegmentFile] = {}
        self._lost: list[SegmentFile] = []
        self._space = SlotSpace()
        self._lock = threading.Lock()
        self._punches = True
        self.sync_failures = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = sorted(os.listdir(directory))
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise DiskUnusable(f"disk tier: {directory} can't be used: {error.strerror}") from error
        try:
            for name in names:
                self._open(name)
        except DiskTierError:
            self.close()
            raise

    def _open(self, name: str) -> None:
        if parse_name(name) is None:
            self.counters["foreign_files"] += 1
            return
        try:
            segment = SegmentFile.open(self._io, self.directory / name, self._slots.scratch)
        except (DiskFault, DiskFull):
            self.counters["segments_unreadable"] += 1
            return
        if segment is not None:
            self._files[segment.number] = segment
            self._space.add(segment.number, segment.slot_bytes, segment.extents())

    # --- room

    def room(self, length: int) -> int:
        """How many more slots for payloads of `length` bytes the limits allow."""
        with self._lock:
            return self._room(padded(length) + PAGE)

    def _room(self, slot_bytes: int) -> int:
        fresh = self._fresh_bytes() // slot_bytes + self._space.spent(slot_bytes)
        if self.max_slots:
            fresh = min(fresh, self.max_slots - self._space.count(USED, UNKNOWN))
        return max(0, fresh)

    def _fresh_bytes(self) -> int:
        """Bytes that may be taken from the file system: within capacity, and above the floor."""
        taken = self._taken_bytes() + self._overhead()
        try:
            free, total = self._io.free_bytes(self.directory)
        except OSError:
            return 0
        return max(0, min(self.capacity - taken, free - int(self.floor * total)))

    def _taken_bytes(self) -> int:
        return self._space.bytes(USED, UNKNOWN, SPENT) + PAGE * len(self._files)

    # --- ownership

    def allocate(self, length: int, count: int, after: int | None = None) -> list[int]:
        """Up to `count` slots, neighbours where possible, behind slot `after` where possible.

        Fewer than asked for when there is no more room, perhaps none. DiskFull, DiskFault when a segment was
        needed and could not be made.
        """
        slot_bytes = padded(length) + PAGE
        if slot_bytes > self._segment_bytes:
            raise DiskFull(f"a block of {length} bytes is larger than a segment of {self._segment_bytes}")
        with self._lock:
            count = min(count, self._room(slot_bytes))
            taken = self._space.allocate(slot_bytes, count, after)
            while len(taken) < count:
                try:
                    self._add_segment(slot_bytes)
                except DiskTierError:
                    if not taken:
                        raise
                    break
                taken += self._space.allocate(slot_bytes, min(count - len(taken), self._room(slot_bytes)))
                if not self._room(slot_bytes):
                    break
            return taken

    def _add_segment(self, slot_bytes: int) -> None:
        taken = {*self._files, *(segment.number for segment in self._lost)}
        number = next(n for n in range(1 << (32 - SLOT_BITS)) if n not in taken and not self._named(n))
        slots = max(1, min(MAX_SLOTS, (self._segment_bytes - PAGE) // slot_bytes))
        facts = Superblock(FORMAT, number, slot_bytes - PAGE, slots)
        self._files[number] = SegmentFile.create(self._io, self.directory, facts)
        self._space.add(number, slot_bytes, bytearray((HOLE,)) * slots)

    def _named(self, number: int) -> bool:
        return any(True for _ in self.directory.glob(f"{number:05d}-*.seg"))

    def adopt(self, slots: Sequence[int]) -> list[int]:
        """Claims slots that held bytes at open; returns the positions of those that are not there to be claimed."""
        refused = []
        with self._lock:
            for position, slot in enumerate(slots):
                if self._space.state(slot) == UNKNOWN:
                    self._space.set(slot, USED)
                else:
                    refused.append(position)
        return refused

    def in_use(self, slot: int) -> bool:
        """Whether somebody owns the slot."""
        with self._lock:
            return self._space.state(slot) == USED

    def free(self, slots: Sequence[int]) -> None:
        """Makes holes of slots, footers first gone; of a hole or a slot that is not there, nothing.

        Call it only when no index names them any more.
        """
        with self._lock:
            live = {slot for slot in slots if self._space.state(slot) in (USED, UNKNOWN)}
        for segment, run in self._runs(live):
            state = self._make_holes(segment, [slot & (MAX_SLOTS - 1) for slot in run])
            with self._lock:
                for slot in run:
                    if self._space.state(slot) is not None:
                        self._space.set(slot, state)

    def _make_holes(self, segment: SegmentFile, indices: list[int]) -> int:
        """Punches neighbouring slots; where the file system can't, overwrites their footers. The new state."""
        start = segment.offset(indices[0])
        if self._punches:
            try:
                self._io.punch(segment.fd, start, len(indices) * segment.slot_bytes)
                segment.dirty = True
                return HOLE
            except OSError as error:
                self.counters["punch_errors"] += 1
                self._punches = error.errno not in (95, 38, 22)  # EOPNOTSUPP, ENOSYS, EINVAL: it never will
        try:
            with self._slots.scratch.borrow() as page:
                page[:PAGE] = bytes(PAGE)
                for index in indices:
                    segment.write([page[:PAGE]], segment.offset(index) + segment.payload_bytes)
            segment.dirty = True
        except OSError:
            self.counters["slots_lost"] += len(indices)  # a footer may have stayed: never hand these out
            return UNKNOWN
        return SPENT

    def unknown(self, after: int = -1, limit: int = 1 << 30) -> list[int]:
        """Slots above `after` that hold bytes and are nobody's, ascending."""
        found: list[int] = []
        with self._lock:
            for number, segment in sorted(self._space.segments.items()):
                at = segment.state.find(UNKNOWN, max(0, after + 1 - (number << SLOT_BITS)))
                while at >= 0 and len(found) < limit:
                    found.append(number << SLOT_BITS | at)
                    at = segment.state.find(UNKNOWN, at + 1)
        return found

    def disown_all(self) -> None:
        """Every slot in use is nobody's from now on, as at open: the index is being rebuilt."""
        with self._lock:
            for segment in self._space.segments.values():
                segment.disown()

    # --- bytes

    def _runs(self, slots: Iterable[int]) -> Iterator[tuple[SegmentFile, list[int]]]:
        """Slots that exist, in runs of neighbours that one call can take."""
        by_segment: dict[int, list[int]] = {}
        for slot in sorted(slots):
            by_segment.setdefault(slot >> SLOT_BITS, []).append(slot)
        for number, members in by_segment.items():
            segment = self._files.get(number)
            if segment is not None:
                there = [slot for slot in members if slot & (MAX_SLOTS - 1) < segment.slots]
                for run in cut_runs(there, segment.slot_bytes):
                    yield segment, run

    def write(self, blocks: Sequence[tuple[Footer, memoryview]]) -> tuple[list[bool], DiskTierError | None]:
        """Payload and footer of each block into its allocated slot, neighbours in one call.

        Payloads are `length` bytes or padded. Returns which are written (not yet flushed) and the first error;
        slots of blocks that are not written are free again, and nothing of them is left.
        """
        order = {footer.slot: position for position, (footer, _) in enumerate(blocks)}
        done = [False] * len(blocks)
        first_error: DiskTierError | None = None
        for segment, run in self._runs(order):
            if first_error is None:
                try:
                    self._slots.write_run(segment, run, [blocks[order[slot]] for slot in run])
                    segment.dirty = True
                    for slot in run:
                        done[order[slot]] = True
                    self.counters["written_bytes"] += len(run) * segment.slot_bytes
                    continue
                except OSError as error:
                    self.counters["write_errors"] += 1
                    first_error = typed(error, f"writing {segment.path.name}")
            self.free(run)
        return done, first_error

    def flush(self) -> None:
        """Everything written so far is on the device; DiskFault when that can't be said.

        After a failed flush the kernel forgets what it could not write: `sync_failures` tells a caller whether
        one happened since its own write, whoever called flush.
        """
        for segment in list(self._files.values()):
            with segment.sync_lock:
                if not segment.dirty:
                    continue
                segment.dirty = False
                try:
                    self._io.fdatasync(segment.fd)
                    if not os.fstat(segment.fd).st_nlink:
                        self._lose(segment)
                        raise OSError(2, "the file was removed under us")
                except OSError as error:
                    self.sync_failures += 1
                    self.counters["sync_errors"] += 1
                    raise typed(error, f"flushing {segment.path.name}") from error

    def _lose(self, segment: SegmentFile) -> None:
        """The file has no name any more: what is in it would be gone at the next start, so it is gone now."""
        with self._lock:
            self._files.pop(segment.number, None)
            self._space.remove(segment.number)
            self._lost.append(segment)
            self.counters["segments_lost"] += 1

    def read(self, wanted: Sequence[Footer], buffers: Sequence[memoryview]) -> list[bool]:
        """Payloads into `buffers` (`length` bytes or padded), checked against the footers that they must have.

        False: not there, damaged, or of another block; the buffer's content is undefined then.
        """
        held = [False] * len(wanted)
        rest = list(range(len(wanted)))
        while rest:  # more than one round only where a slot is asked for twice
            order = {wanted[position].slot: position for position in reversed(rest)}
            for segment, run in self._runs(order):
                pairs = [(wanted[order[slot]], buffers[order[slot]]) for slot in run]
                for slot, good in zip(run, self._slots.read_run(segment, run, pairs), strict=True):
                    held[order[slot]] = good
            done = set(order.values())
            rest = [position for position in rest if position not in done]
        return held

    def footer(self, slot: int) -> Footer | None:
        """The footer on disk; None when it is none or can't be read."""
        segment = self._files.get(slot >> SLOT_BITS)
        index = slot & (MAX_SLOTS - 1)
        if segment is None or index >= segment.slots:
            return None
        with self._slots.scratch.borrow() as page:
            try:
                got = segment.read([page[:PAGE]], segment.offset(index) + segment.payload_bytes)
            except OSError:
                self.counters["read_errors"] += 1
                return None
            footer = unpack_footer(bytes(page[:PAGE]), slot) if got == PAGE else None
        return footer if footer is not None and padded(footer.length) == segment.payload_bytes else None

    # --- upkeep

    def used(self) -> tuple[int, int]:
        """(slots, bytes) in use, those that nobody has claimed yet included."""
        with self._lock:
            return self._space.count(USED, UNKNOWN), self._space.bytes(USED, UNKNOWN)

    def taken_bytes(self) -> int:
        """Bytes of the file system that we hold."""
        with self._lock:
            return self._taken_bytes()

    def check_integrity(self) -> None:
        """AssertionError with the numbers when the accounting disagrees with itself."""
        with self._lock:
            self._space.check_integrity()
            if set(self._space.segments) != set(self._files):
                raise AssertionError(f"segments {sorted(self._space.segments)} against files {sorted(self._files)}")

    def close(self) -> None:
        """Closes the files; no other call may run."""
        for segment in [*self._files.values(), *self._lost]:
            self._io.close(segment.fd)
        self._files.clear()
        self._lost.clear()
        self._space = SlotSpace()
