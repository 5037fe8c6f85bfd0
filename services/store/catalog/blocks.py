"""Blocks over both tiers: pins, recency, and who goes when room is needed.

    pinned (leased, granted, being read or written)   in no order, never evicted
    host, clean (on disk too)                         evicted in any order, free of cost
    host, dirty (nowhere else)                        evicted leaf first: a counted loss
    disk                                              evicted leaf first, unless the host holds it too

So what is held stays contiguous over host union disk: a block's parent outlives it. Pure: the header tables, which
are told of each change before anybody else, are any buffer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from services.store.arena.headers import Headers
from services.store.arena.records import FLAG_CLEAN
from services.store.catalog.entries import DETACHED, ON_DISK, SUSPECT, Entries
from services.store.catalog.identity_table import Identities, IdentityMap, PackedMap
from services.store.catalog.order import NONE
from services.store.catalog.slots import CLEAN, DIRTY, FREE, GRANTED, QUARANTINED, STAGING, HostSlots

DISK = 0
"""Head of the one list of the disk order."""


@dataclass
class Counters:
    """Since the start of this store: what went, and why."""

    host_evictions: int = 0
    host_losses: int = 0
    host_lost_bytes: int = 0
    disk_evictions: int = 0
    disk_failures: int = 0
    quarantined: int = 0
    cleared: int = 0
    extents_reclaimed: int = 0


class Blocks:
    """Entries and slots together. `tick` is the logical clock of recency, raised by each operation that uses blocks."""

    def __init__(
        self,
        headers: Headers,
        *,
        max_slots: int = 0,
        make_map: Callable[[Callable[[], Identities]], IdentityMap] = PackedMap,
    ) -> None:
        self.headers = headers
        self.entries = Entries(make_map)
        self.slots = HostSlots(headers, max_slots=max_slots)
        self.counters = Counters()
        self.tick = 0
        self._evicted_by_size = [0] * 64

    # --- orders ----------------------------------------------------------------------------------------------

    def _host_head(self, entry: int) -> int:
        slot = self.entries.host[entry]
        return 2 * self.slots.class_of(slot) + int(self.slots.state[slot] == DIRTY)

    def enter(self, entry: int) -> None:
        """Puts an unpinned entry into the orders of the tiers that hold it, right behind its parent if it is there."""
        entries = self.entries
        parent = entries.parent[entry]
        if entries.host[entry] != NONE:
            head = self._host_head(entry)
            if parent != NONE and parent in entries.host_order and self._host_head(parent) == head:
                entries.host_order.insert_behind(head, parent, entry)
            else:
                entries.host_order.push(head, entry)
        if entries.flags[entry] & ON_DISK:
            if parent != NONE and parent in entries.disk_order:
                entries.disk_order.insert_behind(DISK, parent, entry)
            else:
                entries.disk_order.push(DISK, entry)

    def leave(self, entry: int) -> None:
        """Takes an entry out of the orders; its slot's state must still be the one it entered with."""
        if entry in self.entries.host_order:
            self.entries.host_order.remove(self._host_head(entry), entry)
        if entry in self.entries.disk_order:
            self.entries.disk_order.remove(DISK, entry)

    def _to_front(self, entry: int) -> None:
        entries = self.entries
        if entry in entries.host_order:
            head = self._host_head(entry)
            entries.host_order.remove(head, entry)
            entries.host_order.push(head, entry)
        if entry in entries.disk_order:
            entries.disk_order.remove(DISK, entry)
            entries.disk_order.push(DISK, entry)

    def to_oldest(self, entry: int) -> None:
        """An unpinned block that the disk holds too becomes the first whose slot is reused; others stay."""
        entries = self.entries
        if entry in entries.host_order and entries.flags[entry] & ON_DISK:
            head = self._host_head(entry)
            entries.host_order.remove(head, entry)
            entries.host_order.insert_behind(head, entries.host_order.previous[head], entry)

    def mark(self, entry: int, tick: int) -> None:
        """Sets an entry's recency, in its header too."""
        self.entries.tick[entry] = tick
        slot = self.entries.host[entry]
        if slot != NONE:
            self.headers.set_recency(slot, tick)

    def refresh_chain(self, entry: int) -> None:
        """Makes a block and all before it the most recent, when it has fallen back far.

        A long answer commits block after block behind a parent that nobody looks up meanwhile. Refreshing at each
        commit would cost the square of the length; once in a sixteenth of the store costs nothing.
        """
        if self.tick - self.entries.tick[entry] <= max(64, self.entries.live // 16):
            return
        while entry != NONE:
            self.mark(entry, self.tick)
            self._to_front(entry)
            entry = self.entries.parent[entry]

    # --- pins ------------------------------------------------------------------------------------------------

    def pin(self, entry: int) -> None:
        """Nobody may evict it or reuse its slot."""
        if not self.entries.pins[entry]:
            self.leave(entry)
        self.entries.pins[entry] += 1

    def unpin(self, entry: int) -> None:
        """Undoes one `pin`."""
        self.entries.pins[entry] -= 1
        if not self.entries.pins[entry]:
            self.settle(entry)

    def settle(self, entry: int) -> None:
        """An entry without pins finds its place: in the orders, or gone when no tier holds it."""
        entries = self.entries
        if entries.flags[entry] & DETACHED:
            entries.flags[entry] &= ~ON_DISK
        if entries.flags[entry] & (DETACHED | SUSPECT) and entries.host[entry] != NONE:
            self._vacate(entry)
        entries.flags[entry] &= ~SUSPECT
        if entries.host[entry] == NONE and not entries.flags[entry] & ON_DISK:
            if not entries.flags[entry] & DETACHED:
                entries.detach(entry)
            entries.remove(entry)
        else:
            self.enter(entry)

    # --- leaving a tier --------------------------------------------------------------------------------------

    def _vacate(self, entry: int) -> None:
        """The entry, which is in no order, loses its host slot."""
        slot = self.entries.host[entry]
        self.headers.free(slot)
        self.entries.host[entry] = NONE
        self.slots.give_back(slot)

    def drop_host(self, entry: int) -> None:
        """An unpinned entry leaves the host; it goes for good when it is not on disk."""
        entries = self.entries
        entries.host_order.remove(self._host_head(entry), entry)
        self._vacate(entry)
        if not entries.flags[entry] & ON_DISK:
            entries.detach(entry)
            entries.remove(entry)

    def drop_disk(self, entry: int) -> None:
        """The disk copy is gone: a host copy becomes dirty again, otherwise the block is lost. Pinned or not."""
        entries, slot = self.entries, self.entries.host[entry]
        entries.flags[entry] &= ~ON_DISK
        in_host_order = entry in entries.host_order
        if in_host_order:
            entries.host_order.remove(self._host_head(entry), entry)
        if slot != NONE and self.slots.state[slot] == CLEAN:
            self.slots.state[slot] = DIRTY
            self.headers.set_flags(slot, 0)
        if in_host_order:  # the oldest place: behind its parent wherever that is
            head = self._host_head(entry)
            entries.host_order.insert_behind(head, entries.host_order.previous[head], entry)
        in_disk_order = entry in entries.disk_order
        if in_disk_order:
            entries.disk_order.remove(DISK, entry)
        if slot == NONE and not entries.flags[entry] & DETACHED:
            entries.detach(entry)
        if slot == NONE and in_disk_order:  # else pinned: it goes with its last pin
            entries.remove(entry)

    def suspect(self, entry: int) -> None:
        """The host copy of a pinned block failed its checksum: nobody sees it again, its slot rests for a while."""
        entries, slot = self.entries, self.entries.host[entry]
        if slot == NONE or self.slots.state[slot] not in (DIRTY, CLEAN):
            return
        self.headers.free(slot)
        self.slots.state[slot] = QUARANTINED
        self.counters.quarantined += 1
        if entries.flags[entry] & ON_DISK:
            entries.flags[entry] |= SUSPECT
        elif not entries.flags[entry] & DETACHED:
            entries.detach(entry)

    # --- making room -----------------------------------------------------------------------------------------

    def allocate(self, size: int, protect: int = NONE) -> int:
        """A slot of a size class, evicting if need be, but never `protect`; NONE when all is pinned or parents."""
        slot = self.slots.take(size)
        while slot == NONE and (self._evict_host(size, protect) or self._reclaim_extent(size, protect, newest=NONE)):
            slot = self.slots.take(size)
        return slot

    def _evict_host(self, size: int, protect: int) -> bool:
        order, entries = self.entries.host_order, self.entries
        self._evicted_by_size[size] += 1
        for entry in order.from_oldest(2 * size):
            if self._grow_share(size, protect, entry):
                return True
            self.counters.host_evictions += 1
            self.drop_host(entry)
            return True
        for entry in order.from_oldest(2 * size + 1):
            if not entries.children[entry] and entry != protect:
                if self._grow_share(size, protect, entry):
                    return True
                self.lose(entry)
                return True
        return False

    def lose(self, entry: int) -> None:
        """Evicts a dirty leaf: the counted loss."""
        self.counters.host_losses += 1
        self.counters.host_lost_bytes += self.entries.length[entry]
        self.drop_host(entry)

    def _grow_share(self, size: int, protect: int, victim: int) -> bool:
        """Once in an extent's worth of evictions: is an extent of another slot size older than our oldest block?"""
        if len(self.slots.sizes) == 1 or self.slots.is_full():
            return False
        if self._evicted_by_size[size] < self.headers.geometry.slots(self.slots.sizes[size]):
            return False
        self._evicted_by_size[size] = 0
        return self._reclaim_extent(size, protect, newest=self.entries.tick[victim])

    def _reclaim_extent(self, size: int, protect: int, *, newest: int) -> bool:
        """Empties the least recently used extent of another class whose blocks are all older than tick `newest`."""
        best, best_tick = -1, newest if newest != NONE else 1 << 64
        span = self.headers.geometry.slot_span
        ticks, pins = self.entries.columns["tick"], self.entries.columns["pins"]
        for extent, owner in enumerate(self.slots.extent_size):
            if owner in (-1, size):
                continue
            part = slice(extent * span, extent * span + self.headers.count(extent))
            states = self.slots.columns["state"][part]
            if np.isin(states, (GRANTED, STAGING, QUARANTINED)).any():
                continue
            held = self.slots.columns["entry"][part][states != FREE]
            if pins[held].any() or protect in held:
                continue
            tick = int(ticks[held].max(initial=0))
            if tick < best_tick:
                best, best_tick = extent, tick
        return best >= 0 and self._empty_extent(best)

    def _empty_extent(self, extent: int) -> bool:
        owner, span = self.slots.extent_size[extent], self.headers.geometry.slot_span
        part = slice(extent * span, extent * span + self.headers.count(extent))
        states = self.slots.columns["state"][part]
        for entry in self.slots.columns["entry"][part][states == CLEAN].tolist():
            self.counters.host_evictions += 1
            self.drop_host(entry)
        while self.slots.in_extent[extent]:
            leaves = (e for e in self.entries.host_order.from_oldest(2 * owner + 1) if not self.entries.children[e])
            leaf = next(leaves, NONE)
            if leaf == NONE:
                return False
            self.lose(leaf)
        self.slots.close_extent(extent)
        self.counters.extents_reclaimed += 1
        return True

    def evict_disk(self, count: int, older_than: int) -> Sequence[bytes]:
        """Identities of at most `count` blocks that leave the disk, the least recent first, older than a tick.

        Leaves, or blocks that the host holds too (which become dirty there, not to be written again).
        """
        gone: list[bytes] = []
        entries = self.entries
        for entry in entries.disk_order.from_oldest(DISK):  # one pass: a child is met before its parent
            if len(gone) == count or entries.tick[entry] >= older_than:
                break
            if not entries.children[entry] or entries.host[entry] != NONE:
                gone.append(entries.identity(entry))
                self.counters.disk_evictions += 1
                self.drop_disk(entry)
        return gone

    def set_clean(self, entry: int) -> None:
        """A pinned block has reached the disk."""
        slot = self.entries.host[entry]
        self.entries.flags[entry] |= ON_DISK
        if slot != NONE and self.slots.state[slot] == DIRTY:
            self.slots.state[slot] = CLEAN
            self.headers.set_flags(slot, FLAG_CLEAN)
