"""All segment files of the disk tier: allocation within the limits, coalesced verified IO, footers, holes.

Who owns a slot: `allocate` gives it to the caller; a `write` that fails takes it back (punched, free); one that
succeeds leaves it with the caller until `free`. Slots that hold bytes at open are nobody's (UNKNOWN) until
`adopt` or `free`; none of them is ever handed out meanwhile.

Thread-safe; IO runs outside the lock. Two calls must not work on one slot at the same time, except reads.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.store.disk.errors import DiskFull, DiskTierError
from services.store.disk.footer import MAX_SLOTS, PAGE, SLOT_BITS, Footer, padded, unpack_footer
from services.store.disk.room import Room
from services.store.disk.segment_file import SegmentFile, typed
from services.store.disk.segment_set import SegmentSet
from services.store.disk.slot_io import SlotIO, cut_runs
from services.store.disk.slot_space import HOLE, SPENT, UNKNOWN, USED, SlotSpace
from shared.fileio import FileIO
from shared.niceness import lower_thread

SEGMENT_BYTES = 256 << 20

IN_FLIGHT = 4
"""Runs of one save that are written at the same time; footers that a rebuild reads."""


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
        nice: int = 0,
    ) -> None:
        """Opens all files; DiskUnusable when the directory, a file or a format is not ours to use."""
        self.counters: Counter[str] = Counter()
        self.sync_failures = 0
        self._io = io
        self._segment_bytes = max(segment_bytes, min(capacity // 256, MAX_SLOTS * PAGE))
        self._slots = SlotIO(self.counters)
        self._set = SegmentSet(directory, io, self._slots.scratch, self.counters)
        self._space = SlotSpace()
        self._room = Room(
            capacity=capacity,
            floor=floor,
            max_slots=max_slots,
            free_bytes=lambda: io.free_bytes(directory.parent),  # which outlives `directory`
            overhead=overhead,
        )
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._pool = ThreadPoolExecutor(IN_FLIGHT, "perdure-disk", lower_thread, (nice,))
        self._punches = True
        self._stuck: set[int] = set()
        self._lost: list[int] = []
        try:
            for segment in self._set.open_all():
                self._space.add(segment.number, segment.slot_bytes, segment.extents())
        except DiskTierError:
            self.close()
            raise

    # --- room

    @property
    def capacity(self) -> int:
        """Bytes of the file system that we may hold."""
        return self._room.capacity

    def room(self, length: int) -> int:
        """How many more slots for payloads of `length` bytes the limits allow; 0 when that can't be asked."""
        try:
            limits = self._room.limits()
        except OSError:
            return 0
        with self._lock:
            return self._room.slots(self._space, padded(length) + PAGE, limits)

    def shortage(self, length: int, count: int) -> int | None:
        """See `Room.shortage`, for payloads of `length` bytes. OSError of the kernel."""
        limits = self._room.limits()
        with self._lock:
            return self._room.shortage(self._space, padded(length) + PAGE, count, limits)

    def excess(self) -> int:
        """See `Room.excess`."""
        with self._lock:
            return self._room.excess(self._space)

    # --- ownership

    def allocate(self, length: int, count: int, after: int | None = None) -> list[int]:
        """Up to `count` slots, neighbours where possible, behind slot `after` where possible.

        Fewer than asked for when there is no more room, perhaps none. DiskFull, DiskFault when a segment was
        needed and could not be made.
        """
        slot_bytes = padded(length) + PAGE
        if slot_bytes > self._segment_bytes:
            raise DiskFull(f"a block of {length} bytes is larger than a segment of {self._segment_bytes}")
        limits, taken = self._room.limits(), list[int]()
        while True:
            with self._lock:
                free = self._room.slots(self._space, slot_bytes, limits)
                wanted = min(count - len(taken), free)
                found = self._space.allocate(slot_bytes, wanted, after)
                limits = limits._replace(above_floor=limits.above_floor - len(found) * slot_bytes)
                taken += found
            if len(found) == wanted:
                return taken
            try:
                self._add_segment(slot_bytes)
            except DiskTierError:
                if not taken:
                    raise
                return taken

    def _add_segment(self, slot_bytes: int) -> None:
        with self._making:
            segment = self._set.create(slot_bytes, self._segment_bytes)
            with self._lock:
                self._set.files[segment.number] = segment
                self._space.add(segment.number, slot_bytes, bytearray((HOLE,)) * segment.slots)

    def adopt(self, slots: "Sequence[int] | NDArray[np.uint32]") -> list[int]:
        """Claims slots that held bytes at open; returns the positions of those that are not there to be claimed."""
        with self._lock:
            claimed = self._space.claim(np.asarray(slots, np.uint32))
            if self._stuck:
                self._stuck.difference_update(np.asarray(slots)[claimed].tolist())
        refused: list[int] = np.flatnonzero(~claimed).tolist()
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
            with segment.inside() as alive:
                state = self._make_holes(segment, [slot & (MAX_SLOTS - 1) for slot in run]) if alive else HOLE
            with self._lock:
                (self._stuck.update if state == UNKNOWN else self._stuck.difference_update)(run)
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
            self.counters["slots_stuck"] += len(indices)  # a footer may have stayed: not to be handed out
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
            segment = self._set.files.get(number)
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
        runs = list(self._runs(order))
        failed = threading.Event()
        errors: list[DiskTierError] = []

        def write_one(segment: SegmentFile, run: list[int]) -> bool:
            if failed.is_set():
                return False
            try:
                with segment.inside() as alive:
                    if not alive:
                        raise OSError(2, "the file was removed under us")
                    self._slots.write_run(segment, run, [blocks[order[slot]] for slot in run])
            except OSError as error:
                failed.set()
                errors.append(typed(error, f"writing {segment.path.name}"))
                return False
            segment.dirty = True
            return True

        if len(runs) == 1:
            written = [write_one(*runs[0])]
        else:
            futures = [self._pool.submit(write_one, *run) for run in runs]
            wait(futures)
            written = [future.result() for future in futures]
        done = [False] * len(blocks)
        for (segment, run), good in zip(runs, written, strict=True):
            for slot in run:
                done[order[slot]] = good
            self.counters["written_bytes"] += good * len(run) * segment.slot_bytes
        self.counters["write_errors"] += len(errors)
        self.free([footer.slot for (footer, _), good in zip(blocks, done, strict=True) if not good])
        return done, errors[0] if errors else None

    def flush(self) -> None:
        """Everything written so far is on the device; DiskFault when that can't be said.

        After a failed flush the kernel forgets what it could not write: `sync_failures` tells a caller whether
        one happened since its own write, whoever called flush.
        """
        for segment in list(self._set.files.values()):
            with segment.sync_lock, segment.inside() as alive:
                if not segment.dirty or not alive:
                    continue
                segment.dirty = False
                try:
                    self._io.fdatasync(segment.fd)
                    if not segment.is_named():
                        self._lose(segment)
                        raise OSError(2, "the file was removed under us")
                except OSError as error:
                    self.sync_failures += 1
                    self.counters["sync_errors"] += 1
                    raise typed(error, f"flushing {segment.path.name}") from error

    def _lose(self, segment: SegmentFile) -> None:
        with self._lock:
            self._set.lose(segment)
            self._space.remove(segment.number)
            self.sync_failures += 1
            self._lost.append(segment.number)
            self._stuck = {slot for slot in self._stuck if slot >> SLOT_BITS != segment.number}

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
                with segment.inside() as alive:
                    goods = self._slots.read_run(segment, run, pairs) if alive else [False] * len(run)
                for slot, good in zip(run, goods, strict=True):
                    held[order[slot]] = good
            done = set(order.values())
            rest = [position for position in rest if position not in done]
        return held

    def footer(self, slot: int) -> Footer | None:
        """The footer on disk; None when it is none or can't be read."""
        segment = self._set.files.get(slot >> SLOT_BITS)
        index = slot & (MAX_SLOTS - 1)
        if segment is None or index >= segment.slots:
            return None
        with segment.inside() as alive, self._slots.scratch.borrow() as page:
            if not alive:
                return None
            try:
                got = segment.read([page[:PAGE]], segment.offset(index) + segment.payload_bytes)
            except OSError:
                self.counters["read_errors"] += 1
                return None
            footer = unpack_footer(bytes(page[:PAGE]), slot) if got == PAGE else None
        return footer if footer is not None and padded(footer.length) == segment.payload_bytes else None

    def footers(self, slots: Sequence[int]) -> list[Footer | None]:
        """`footer` of many, several at a time."""
        return list(self._pool.map(self.footer, slots, chunksize=64))

    # --- upkeep

    def tidy(self) -> list[int]:
        """Upkeep, each second or so: returns the numbers of segments that are lost, until `lost_told`.

        Slots that could not be emptied are tried again; files in which nothing lies are removed. OSError of the kernel.
        """
        for segment in list(self._set.files.values()):
            if not segment.is_named():
                self._lose(segment)
        with self._lock:
            stuck = sorted(self._stuck)
        self.free(stuck)
        self.remove_empty()
        return list(self._lost)

    def lost_told(self, segments: list[int]) -> None:
        """No index names a slot of these any more."""
        self._lost = [number for number in self._lost if number not in segments]

    def remove_empty(self) -> None:
        """Removes files in which nothing lies: a new one costs a few ms, an old one would be there for ever."""
        with self._lock:
            spaces = self._space.segments
            empty = [n for n, space in spaces.items() if not space.counts[USED] and not space.counts[UNKNOWN]]
            removed = [(self._set.files.pop(number), spaces.pop(number)) for number in empty]
        for segment, space in removed:
            try:
                self._set.remove(segment)
            except OSError:
                self.counters["unlink_errors"] += 1
                with self._lock:
                    self._set.files[segment.number], spaces[segment.number] = segment, space
        if removed:
            self._set.sync()

    def used(self) -> tuple[int, int]:
        """(slots, bytes) in use, those that nobody has claimed yet included."""
        with self._lock:
            return self._space.count(USED, UNKNOWN), self._space.bytes(USED, UNKNOWN)

    def unclaimed(self) -> int:
        """Slots that hold bytes and are nobody's."""
        with self._lock:
            return self._space.count(UNKNOWN)

    @property
    def last_fault(self) -> str:
        """Why a block last could not be read."""
        return self._slots.last_fault

    def taken_bytes(self) -> int:
        """Bytes of the file system that we hold."""
        with self._lock:
            return self._room.taken(self._space)

    def check_integrity(self) -> None:
        """AssertionError with the numbers when the accounting disagrees with itself."""
        with self._lock:
            self._space.check_integrity()
            if set(self._space.segments) != set(self._set.files):
                raise AssertionError(f"segments {sorted(self._space.segments)} against files {sorted(self._set.files)}")

    def close(self) -> None:
        """Closes the files; no other call may run."""
        self._pool.shutdown()
        self._set.close()
        self._space = SlotSpace()
