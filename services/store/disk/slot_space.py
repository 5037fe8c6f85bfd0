"""Which slots of the segment files are free: pure accounting, one byte a slot.

HOLE ── allocate ─► USED ── free(punched) ─► HOLE
                     └───── free(not punched) ─► SPENT ── allocate ─► USED
UNKNOWN (holds bytes, nobody has claimed it yet) ── adopt ─► USED, or free
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.store.disk.footer import MAX_SLOTS, SLOT_BITS

HOLE, USED, UNKNOWN, SPENT = 0, 1, 2, 3


@dataclass(slots=True)
class SegmentSlots:
    """One segment's slots; `state` has one byte each."""

    number: int
    slot_bytes: int
    state: bytearray
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = [self.state.count(value) for value in (HOLE, USED, UNKNOWN, SPENT)]

    def set(self, index: int, value: int) -> None:
        """Moves one slot to another state."""
        self.counts[self.state[index]] -= 1
        self.counts[value] += 1
        self.state[index] = value

    def claim(self, indices: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """UNKNOWN -> USED, of distinct indices; which of them were UNKNOWN."""
        state = np.frombuffer(self.state, np.uint8)
        there = indices < len(state)
        there[there] = state[indices[there]] == UNKNOWN
        state[indices[there]] = USED
        count = int(np.count_nonzero(there))
        self.counts[UNKNOWN] -= count
        self.counts[USED] += count
        return there

    def disown(self) -> None:
        """USED -> UNKNOWN, all of them."""
        self.state = self.state.replace(bytes((USED,)), bytes((UNKNOWN,)))
        self.counts[UNKNOWN] += self.counts[USED]
        self.counts[USED] = 0


class SlotSpace:
    """All segments. Not thread-safe; its owner locks."""

    def __init__(self) -> None:
        self.segments: dict[int, SegmentSlots] = {}

    def add(self, number: int, slot_bytes: int, state: bytearray) -> None:
        """A segment has come into being; `state` is kept."""
        if number in self.segments:
            raise ValueError(f"segment {number} is there already")
        self.segments[number] = SegmentSlots(number, slot_bytes, state)

    def remove(self, number: int) -> None:
        """A segment is gone, with whatever was in it."""
        self.segments.pop(number, None)

    def state(self, slot: int) -> int | None:
        """None for a slot that no segment has."""
        segment = self.segments.get(slot >> SLOT_BITS)
        index = slot & ((1 << SLOT_BITS) - 1)
        return None if segment is None or index >= len(segment.state) else segment.state[index]

    def set(self, slot: int, value: int) -> None:
        """Moves a slot that exists to another state."""
        self.segments[slot >> SLOT_BITS].set(slot & ((1 << SLOT_BITS) - 1), value)

    def claim(self, slots: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """UNKNOWN -> USED; which were there to be claimed, the first of equal ones."""
        claimed = np.zeros(len(slots), bool)
        order = np.argsort(slots)
        ascending = slots[order]
        if (ascending[1:] == ascending[:-1]).any():
            ascending, order = np.unique(slots, return_index=True)
        for number, segment in self.segments.items():
            start, end = np.searchsorted(ascending, (number << SLOT_BITS, (number + 1) << SLOT_BITS))
            if start < end:
                claimed[order[start:end]] = segment.claim(ascending[start:end] & np.uint32(MAX_SLOTS - 1))
        return claimed

    def count(self, *values: int) -> int:
        """Slots in any of these states."""
        return sum(segment.counts[value] for segment in self.segments.values() for value in values)

    def bytes(self, *values: int) -> int:
        """Bytes of the slots in any of these states."""
        return sum(s.slot_bytes * s.counts[value] for s in self.segments.values() for value in values)

    def spent(self, slot_bytes: int) -> int:
        """Slots of this size that take no new space when they are written."""
        return sum(s.counts[SPENT] for s in self.segments.values() if s.slot_bytes == slot_bytes)

    def allocate(self, slot_bytes: int, count: int, after: int | None = None) -> list[int]:
        """Up to `count` slots of this size, USED from now on: behind `after` if that is free, else the longest runs.

        SPENT slots go first, so that the space taken never grows while there is room without.
        """
        taken: list[int] = []
        for value in (SPENT, HOLE):
            if after is not None and len(taken) < count:
                self._extend(slot_bytes, count, after, value, taken)
            length = count - len(taken)
            while length and len(taken) < count:
                if not self._take_run(slot_bytes, length, value, taken):
                    length //= 2
                length = min(length, count - len(taken))
        return taken

    def _extend(self, slot_bytes: int, count: int, after: int, value: int, taken: list[int]) -> None:
        segment = self.segments.get(after >> SLOT_BITS)
        if segment is None or segment.slot_bytes != slot_bytes:
            return
        index = (after & ((1 << SLOT_BITS) - 1)) + 1
        while len(taken) < count and index < len(segment.state) and segment.state[index] == value:
            segment.set(index, USED)
            taken.append(segment.number << SLOT_BITS | index)
            index += 1

    def _take_run(self, slot_bytes: int, length: int, value: int, taken: list[int]) -> bool:
        wanted = bytes((value,)) * length
        for segment in self.segments.values():
            if segment.slot_bytes != slot_bytes or segment.counts[value] < length:
                continue
            start = segment.state.find(wanted)
            if start < 0:
                continue
            for index in range(start, start + length):
                segment.set(index, USED)
            taken.extend(range(segment.number << SLOT_BITS | start, (segment.number << SLOT_BITS | start) + length))
            return True
        return False

    def check_integrity(self) -> None:
        """AssertionError when the counts are not those of the states."""
        for segment in self.segments.values():
            counted = [segment.state.count(value) for value in (HOLE, USED, UNKNOWN, SPENT)]
            if counted != segment.counts or sum(counted) != len(segment.state):
                raise AssertionError(f"segment {segment.number} counts {segment.counts}, holds {counted}")
