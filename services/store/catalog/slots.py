"""Slots of the host tier: which is free, which is held for whom; extents are given to slot sizes as they are needed.

A slot's number is extent * span + index; arrays are indexed by it (untouched parts of them cost no memory).
Each change is in the header table before anybody is told.
"""

from typing import Any

import numpy as np

from services.store.arena.headers import Headers
from services.store.arena.records import aligned
from services.store.catalog.order import NONE

FREE, GRANTED, STAGING, DIRTY, CLEAN, QUARANTINED = 0, 1, 2, 3, 4, 5
"""STAGING: granted to ourselves, a disk read is under way. QUARANTINED: held bad bytes; out of use for a while."""

MAX_SIZES = 24
"""Slot sizes that can share an arena."""


class HostSlots:
    """Allocation and per-slot facts. Sizes are pages-aligned strides; a *size class* is an index of `sizes`."""

    def __init__(self, headers: Headers, *, max_slots: int = 0) -> None:
        geometry = headers.geometry
        count = geometry.extents * geometry.slot_span
        self.headers = headers
        self.count = count
        self.max_slots = max_slots or count
        self.columns: dict[str, Any] = {
            "state": np.zeros(count, np.uint8),
            "entry": np.zeros(count, np.uint32),
            "generation": np.zeros(count, np.uint64),
            "checksum": np.zeros(count, np.uint64),
            "engine": np.zeros(count, np.uint64),
            "epoch": np.zeros(count, np.uint64),
            "queued": np.zeros(count, np.uint32),
        }
        self.state: Any = memoryview(self.columns["state"])
        self.entry: Any = memoryview(self.columns["entry"])
        self.generation: Any = memoryview(self.columns["generation"])
        self.checksum: Any = memoryview(self.columns["checksum"])
        self.engine: Any = memoryview(self.columns["engine"])
        self.epoch: Any = memoryview(self.columns["epoch"])
        self.queued: Any = memoryview(self.columns["queued"])
        self.sizes: list[int] = []
        self.extent_size: list[int] = [-1] * geometry.extents
        self.in_extent = [0] * geometry.extents
        self._free: list[int] = []
        self._free_counts: list[int] = []
        self.used = 0
        self.quarantine: list[int] = []
        for extent, stride in enumerate(headers.strides):
            if stride:
                self.extent_size[extent] = self.size_class(stride)

    def size_class(self, length: int) -> int:
        """Class of payloads of `length` bytes; -1 when there are too many sizes or a slot exceeds an extent."""
        stride = aligned(length)
        if stride in self.sizes:
            return self.sizes.index(stride)
        if len(self.sizes) == MAX_SIZES or not self.headers.geometry.slots(stride):
            return -1
        self.sizes.append(stride)
        self._free.append(NONE)
        self._free_counts.append(0)
        return len(self.sizes) - 1

    def class_of(self, slot: int) -> int:
        """Size class of a slot's extent."""
        return self.extent_size[slot // self.headers.geometry.slot_span]

    def is_full(self) -> bool:
        """Whether the cap (a fault hook, or all slots) is reached."""
        return self.used >= self.max_slots

    def take(self, size: int) -> int:
        """A free slot of a class, from a new extent if needed; NONE when something must be evicted first."""
        if self.is_full():
            return NONE
        if self._free[size] == NONE and not self._open_extent(size):
            return NONE
        slot = self._free[size]
        self._free[size] = self.entry[slot]
        self._free_counts[size] -= 1
        self.in_extent[slot // self.headers.geometry.slot_span] += 1
        self.used += 1
        return slot

    def _open_extent(self, size: int) -> bool:
        if -1 not in self.extent_size:
            return False
        extent = self.extent_size.index(-1)
        self.headers.format_extent(extent, self.sizes[size])
        self.extent_size[extent] = size
        self.chain_free(extent, size)
        return True

    def chain_free(self, extent: int, size: int) -> None:
        """Puts the FREE slots of an extent in front of the free list of its class, in ascending order."""
        start = extent * self.headers.geometry.slot_span
        states = self.columns["state"][start : start + self.headers.count(extent)]
        free = np.flatnonzero(states == FREE) + start
        self.in_extent[extent] = len(states) - len(free)
        if len(free):
            links = self.columns["entry"]
            links[free[:-1]] = free[1:]
            links[free[-1]] = self._free[size]
            self._free[size] = int(free[0])
            self._free_counts[size] += len(free)

    def give_back(self, slot: int) -> None:
        """A slot with a FREE header goes to its free list (or, when its bytes went bad, to the end of the line)."""
        if self.state[slot] == QUARANTINED:
            self.quarantine.append(slot)
            if len(self.quarantine) <= self.max_slots // 64:
                return
            slot = self.quarantine.pop(0)
        self._put_free(slot)

    def _put_free(self, slot: int) -> None:
        size = self.class_of(slot)
        self.state[slot] = FREE
        self.entry[slot] = self._free[size]
        self._free[size] = slot
        self._free_counts[size] += 1
        self.in_extent[slot // self.headers.geometry.slot_span] -= 1
        self.used -= 1

    def rebuild_free(self) -> None:
        """Free lists anew from the states, after recovery or a clear."""
        self._free = [NONE] * len(self.sizes)
        self._free_counts = [0] * len(self.sizes)
        for extent in reversed(range(len(self.extent_size))):
            if self.extent_size[extent] >= 0:
                self.chain_free(extent, self.extent_size[extent])
        self.used = sum(self.in_extent)

    def close_extent(self, extent: int) -> None:
        """An extent without used slots serves no class any more: its free slots leave their list."""
        assert self.in_extent[extent] == 0, f"extent {extent} has {self.in_extent[extent]} used slots"
        size = self.extent_size[extent]
        self.extent_size[extent] = -1
        self._free[size], self._free_counts[size] = NONE, 0
        for other in reversed(range(len(self.extent_size))):
            if self.extent_size[other] == size:
                self.chain_free(other, size)

    def free_slots(self, size: int) -> int:
        """Free slots of a class, extents not yet given not counted."""
        return self._free_counts[size]

    def capacity(self) -> int:
        """Slots that exist or could, were all open extents to serve the first class; for status only."""
        given = sum(self.headers.count(extent) for extent, size in enumerate(self.extent_size) if size >= 0)
        spare = self.extent_size.count(-1)
        per_spare = self.headers.geometry.slots(self.sizes[0]) if self.sizes else 0
        return min(self.max_slots, given + spare * per_spare)

    def check_integrity(self) -> None:
        """AssertionError when free lists, counts and states disagree."""
        for size in range(len(self.sizes)):
            count, slot = 0, self._free[size]
            while slot != NONE:
                assert self.state[slot] == FREE, f"slot {slot} is on the free list in state {self.state[slot]}"
                assert self.class_of(slot) == size, f"slot {slot} is on the free list of class {size}"
                count, slot = count + 1, self.entry[slot]
                assert count <= self.count, f"the free list of class {size} does not end"
            assert count == self._free_counts[size], f"class {size}: {count} free, counted {self._free_counts[size]}"
            extents = [extent for extent, owner in enumerate(self.extent_size) if owner == size]
            total = sum(self.headers.count(extent) for extent in extents)
            held = sum(self.in_extent[extent] for extent in extents)
            assert held + count == total, f"class {size}: {held} held + {count} free != {total}"
        assert self.used == sum(self.in_extent), f"{self.used} used, extents say {sum(self.in_extent)}"
        used = int(np.count_nonzero(self.columns["state"]))
        assert used == self.used, f"{used} slots are not FREE, {self.used} counted"
