"""Leases: a run of blocks that an engine is loading. Its blocks are pinned until they are taken, or it is released.

    Lookup  ─► lease over the leading run held: host blocks at once, disk blocks staged into slots of ours, from the
               back ─► Staged pushes, in the order in which they arrive │ a failed one is a hole, the others still come
    Taken   ─► these are on the device: unpinned, so their slots are room for what is still to be staged
    Release ─► all the rest unpinned, deepest first, so that parents end up more recent than their children

A lease may be larger than the host tier: at most `window` blocks of it are on their way from disk, or here and not
taken yet. One that found no room waits until somebody gives some back. From the back, because the engine may compute
the front meanwhile. Two leases that want the same disk block share one read.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.store.catalog.blocks import Blocks
from services.store.catalog.entries import DETACHED, ON_DISK, SUSPECT
from services.store.catalog.order import NONE
from services.store.catalog.slots import CLEAN, DIRTY, STAGING
from services.store.catalog.staging import Generations, StageOrder, begin_staging, end_staging, is_wanted

MAX_LEASES = 4096
"""More are refused (as a miss): somebody forgets to release."""

WINDOW_BYTES = 64 << 20
"""Twice what all readers may have under way: while one half is read, the other is copied and given back. At most half
of the host tier, so that two can be served at the same time.
"""

REFILL_BYTES = 4 << 20
"""A window is refilled by so much at a time, so that neighbours on disk are read in one call."""

Owner = tuple[str, int]
"""Engine and incarnation of its scheduler."""


class BlockPlace(NamedTuple):
    """Where a leased block lies. `staged` False: on its way from disk, so only `from_disk` means anything."""

    slot: int
    offset: int
    generation: int
    checksum: int
    staged: bool
    from_disk: bool


@dataclass(eq=False)
class Lease:
    """`entries`: pinned, in order; NONE where the block was taken, or will not come.

    `known`: per block, whether its owner was told where it lies. `cursor`: blocks from there on are staged, or being
    staged, or need not be. `ahead`: indices of those that were staged for it and are not taken yet.
    """

    number: int
    owner: Owner
    entries: "array[int]"
    known: bytearray
    cursor: int
    window: int
    refill: int
    spent: bool = False
    """Too large for the host tier: what was taken of it is the first to go."""
    ahead: set[int] = field(default_factory=set)


class StagedRun(NamedTuple):
    """News for a lease's owner: blocks from `first` on are in the arena; or `failed`: these will not come."""

    lease: Lease
    first: int
    places: list[BlockPlace]
    failed: bool


NO_PLACE = BlockPlace(0, 0, 0, 0, staged=False, from_disk=True)


@dataclass
class LookupCounters:
    """Blocks looked up, and where they were found. `no_room`: lookups whose disk part found no room at once."""

    lookups: int = 0
    asked: int = 0
    host_hits: int = 0
    host_hit_bytes: int = 0
    disk_hits: int = 0
    disk_hit_bytes: int = 0
    no_room: int = 0
    staged: int = 0
    staged_bytes: int = 0
    stage_failures: int = 0


@dataclass
class Found:
    """Outcome of a lookup: no lease when nothing was found; `orders` are reads to start now."""

    lease: Lease | None
    places: list[BlockPlace]
    orders: list[StageOrder] = field(default_factory=list)


class Leases:
    """All leases of this store's life; numbers carry the start count, so that an old release never fits a new lease.

    After whatever may have brought news or freed room, the shell asks for `more` reads, then for `take_news`.
    """

    def __init__(self, blocks: Blocks, generations: Generations, *, first_number: int) -> None:
        self._blocks = blocks
        self._generations = generations
        self._next = first_number
        self.window_bytes, self.refill_bytes = WINDOW_BYTES, REFILL_BYTES
        self.open: dict[int, Lease] = {}
        self._awaited: dict[int, list[tuple[Lease, int]]] = {}
        """Entries that are not in the arena yet: who waits for them, with the index there."""
        self._short: dict[int, Lease] = {}
        """Leases that go on when there is room, longest waiting first."""
        self._news: list[StagedRun] = []
        self.counters = LookupCounters()

    # --- lookup ----------------------------------------------------------------------------------------------

    def lookup(self, owner: Owner, identities: Sequence[bytes]) -> Found:
        """Leases the leading run that is held, and begins to stage its disk part.

        A disk part that no room can be had for, now or by what this lease and others give back, is not leased.
        """
        blocks, entries = self._blocks, self._blocks.entries
        self.counters.lookups += 1
        self.counters.asked += len(identities)
        run: array[int] = array("I")
        blocks.tick += 1
        for identity in identities if len(self.open) < MAX_LEASES else ():
            entry = entries.map.get(identity)
            if entry == NONE or not self._is_visible(entry):
                break
            if run:
                self._adopt(entry, run[-1])
            blocks.pin(entry)
            run.append(entry)
        if not run:
            return Found(None, [])
        lease = self._begin(owner, run)
        places = [self._place(entry) for entry in run]
        lease.known[:] = bytes(place.staged for place in places)
        for index, place in enumerate(places):
            if not place.staged:
                self._awaited.setdefault(run[index], []).append((lease, index))
        orders = self._stage_on(lease)
        self.counters.no_room += lease.number in self._short
        if not lease.ahead and not any(lease.known) and len(self.open) == 1:
            self.release(lease.number)
            return Found(None, [])
        self._count_hits(run, places)
        return Found(lease, places, orders)

    def _begin(self, owner: Owner, run: "array[int]") -> Lease:
        """A lease over pinned entries, whose reads come only now: with the whole run pinned, they evict none of it."""
        entries, slots = self._blocks.entries, self._blocks.slots
        longest = max(entries.length[entry] for entry in run)
        missing = sum(entries.host[entry] == NONE for entry in run)
        lease = Lease(
            number=self._next,
            owner=owner,
            entries=run,
            known=bytearray(len(run)),
            cursor=len(run),
            window=max(1, min(self.window_bytes // longest, slots.capacity() // 2)),
            refill=max(1, self.refill_bytes // longest),
            spent=missing > slots.capacity() // 2,
        )
        self._next += 1
        self.open[lease.number] = lease
        return lease

    def _count_hits(self, run: "array[int]", places: list[BlockPlace]) -> None:
        lengths = self._blocks.entries.length
        from_disk = sum(place.from_disk for place in places)
        disk_bytes = sum(lengths[entry] for entry, place in zip(run, places, strict=True) if place.from_disk)
        self.counters.disk_hits += from_disk
        self.counters.disk_hit_bytes += disk_bytes
        self.counters.host_hits += len(places) - from_disk
        self.counters.host_hit_bytes += sum(lengths[entry] for entry in run) - disk_bytes

    def _adopt(self, entry: int, parent: int) -> None:
        """An orphan whose parent is back is linked again; its own header says who that is, not the caller."""
        entries, slot = self._blocks.entries, self._blocks.entries.host[entry]
        if entries.parent[entry] != NONE or slot == NONE or self._blocks.slots.state[slot] == STAGING:
            return
        if self._blocks.headers.parent_and_root(slot)[0] == entries.identity(parent):
            entries.link(entry, parent)

    def _is_visible(self, entry: int) -> bool:
        entries, slot = self._blocks.entries, self._blocks.entries.host[entry]
        if entries.flags[entry] & SUSPECT:
            return False
        return slot == NONE or self._blocks.slots.state[slot] in (CLEAN, DIRTY, STAGING)

    def _place(self, entry: int) -> BlockPlace:
        slots, slot = self._blocks.slots, self._blocks.entries.host[entry]
        if slot == NONE or slots.state[slot] == STAGING:
            return NO_PLACE
        offset = self._blocks.headers.offset(slot)
        return BlockPlace(slot, offset, slots.generation[slot], slots.checksum[slot], staged=True, from_disk=False)

    # --- staging ---------------------------------------------------------------------------------------------

    def more(self) -> list[StageOrder]:
        """Reads for leases that waited for room, as far as there is some now."""
        waiting, self._short = self._short, {}
        return [order for lease in waiting.values() for order in self._stage_on(lease)]

    def take_news(self) -> list[StagedRun]:
        """What owners must be told, neighbours together."""
        news, self._news = self._news, []
        news.sort(key=lambda run: (run.lease.number, run.failed, run.first))
        runs: list[StagedRun] = []
        for run in news:
            last = runs[-1] if runs else None
            same = last is not None and last.lease is run.lease and last.failed == run.failed
            if last is not None and same and last.first + len(last.places) == run.first:
                last.places.extend(run.places)
            else:
                runs.append(run)
        return [run for run in runs if run.lease.number in self.open]

    def _stage_on(self, lease: Lease) -> list[StageOrder]:
        """Orders reads of the next blocks towards the front, as many as window and room allow."""
        entries, orders = self._blocks.entries, list[StageOrder]()
        if lease.ahead and len(lease.ahead) > lease.window - lease.refill:
            return orders
        while lease.cursor and len(lease.ahead) < lease.window:
            index = lease.cursor - 1
            entry = lease.entries[index]
            if entry != NONE and not lease.known[index]:
                if entries.host[entry] == NONE:
                    if entries.flags[entry] & (DETACHED | ON_DISK) != ON_DISK:  # cleared, or lost, since the lookup
                        self._forsake(entry)
                        continue
                    order = begin_staging(self._blocks, entry, self._generations)
                    if order is None:
                        self._short[lease.number] = lease
                        break
                    orders.append(order)
                lease.ahead.add(index)
            lease.cursor -= 1
        return orders

    def is_wanted(self, order: StageOrder) -> bool:
        """Whether anybody still waits for a read that has not begun."""
        return is_wanted(self._blocks, order)

    def staged(
        self, order: StageOrder, *, ok: bool, checksum: int = 0, parent: bytes = bytes(32), lost: bool = True
    ) -> None:
        """A read has ended; see `end_staging`."""
        entry = self._blocks.slots.entry[order.slot]
        if end_staging(self._blocks, order, ok=ok, checksum=checksum, parent=parent, lost=lost):
            self.counters.staged += 1
            self.counters.staged_bytes += order.length
            place = self._place(entry)._replace(from_disk=True)
            for lease, index in self._awaited.pop(entry, ()):
                lease.known[index] = 1
                self._news.append(StagedRun(lease, index, [place], failed=False))
        else:
            self.counters.stage_failures += 1
            self._forsake(entry)
        self._blocks.unpin(entry)

    def _forsake(self, entry: int) -> None:
        """A block that somebody waits for will not come."""
        for lease, index in self._awaited.pop(entry, ()):
            self._news.append(StagedRun(lease, index, [NO_PLACE], failed=True))
            self._let_go(lease, [index])
            self._go_on(lease)

    # --- taking, release -------------------------------------------------------------------------------------

    def taken(self, number: int, owner: Owner, indices: Iterable[int]) -> list[int]:
        """These blocks are on the device, checked: unpinned. Returns their entries that are still there.

        What the owner was not told of, or has given back before, is not touched.
        """
        lease = self.open.get(number)
        if lease is None or lease.owner != owner:
            return []
        own, known = lease.entries, lease.known
        mine = sorted({i for i in indices if i < len(own) and own[i] != NONE and known[i]}, reverse=True)
        entries = [own[index] for index in mine]
        self._blocks.tick += 1
        self._let_go(lease, mine)
        self._go_on(lease)
        return [entry for entry in entries if self._blocks.entries.flags[entry]]

    def _go_on(self, lease: Lease) -> None:
        if lease.cursor:
            self._short[lease.number] = lease

    def _let_go(self, lease: Lease, indices: Iterable[int]) -> None:
        """Unpins blocks, in this order; those that were only passing through are the first whose slots are reused."""
        for index in indices:
            entry, lease.entries[index] = lease.entries[index], NONE
            passing = lease.spent and index in lease.ahead
            lease.ahead.discard(index)
            self._unpin(entry)
            if passing:
                self._blocks.to_oldest(entry)

    def _unpin(self, entry: int) -> None:
        if not self._blocks.entries.flags[entry] & DETACHED:
            self._blocks.mark(entry, self._blocks.tick)
        self._blocks.unpin(entry)

    def release(self, number: int, owner: Owner | None = None, bad: tuple[int, ...] = ()) -> bool:
        """Gives a lease back; `bad`: indices of blocks that failed their checksum. False: it has no such lease."""
        lease = self.open.get(number)
        if lease is None or (owner is not None and lease.owner[0] != owner[0]):
            return False
        del self.open[number]
        self._short.pop(number, None)
        held = [index for index, entry in enumerate(lease.entries) if entry != NONE]
        for index in held:
            if not lease.known[index]:
                self._stop_waiting(lease, index)
        for index in set(bad).intersection(held):
            if lease.known[index]:
                self._blocks.suspect(lease.entries[index])
        self._blocks.tick += 1
        self._let_go(lease, reversed(held))
        return True

    def _stop_waiting(self, lease: Lease, index: int) -> None:
        waiting = self._awaited[lease.entries[index]]
        waiting.remove((lease, index))
        if not waiting:
            del self._awaited[lease.entries[index]]

    def release_owner(self, owner: Owner) -> int:
        """Gives back all leases of a scheduler that is no more; how many."""
        return self._release_all([number for number, lease in self.open.items() if lease.owner == owner])

    def release_engine(self, engine: str) -> int:
        """Gives back all leases of an engine, whichever of its schedulers took them; how many."""
        return self._release_all([number for number, lease in self.open.items() if lease.owner[0] == engine])

    def _release_all(self, numbers: list[int]) -> int:
        for number in numbers:
            self.release(number)
        return len(numbers)
