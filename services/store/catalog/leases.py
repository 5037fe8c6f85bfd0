"""Leases: a run of blocks that an engine is loading. Its blocks are pinned until it is released.

    Lookup ─► lease over the leading run held: host blocks at once, disk blocks staged into slots of ours
              staged in any order, told in order ─► Staged pushes │ a failed one ends the run there
    Release ─► unpinned, deepest first, so that parents end up more recent than their children

Two leases that want the same disk block share one read.
"""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from services.store.arena.records import FLAG_CLEAN, GRANTED, VALID
from services.store.catalog.blocks import Blocks
from services.store.catalog.entries import DETACHED, ON_DISK, SUSPECT
from services.store.catalog.order import NONE
from services.store.catalog.slots import CLEAN, DIRTY, FREE, STAGING

MAX_LEASES = 4096
"""More are refused (as a miss): somebody forgets to release."""

Owner = tuple[str, int]
"""Engine and incarnation of its scheduler."""


class StageOrder(NamedTuple):
    """A disk block to read into the arena at `offset`."""

    identity: bytes
    slot: int
    generation: int
    offset: int
    length: int


class BlockPlace(NamedTuple):
    """Where a leased block lies. `staged` False: on its way from disk."""

    slot: int
    offset: int
    generation: int
    checksum: int
    staged: bool
    from_disk: bool


@dataclass
class Lease:
    """`entries`: pinned, in order. Those before `told` have been told to the owner as being in the arena.

    `by_push`: per block, whether the owner learns of it by a Staged (1) or knew from Found (0).
    """

    number: int
    owner: Owner
    entries: "array[int]"
    by_push: bytes
    told: int = 0
    failed: bool = False


class StagedRun(NamedTuple):
    """News for a lease's owner: blocks from `first` on are in the arena; or `failed`: the run ends there."""

    lease: Lease
    first: int
    places: list[BlockPlace]
    failed: bool


@dataclass
class LookupCounters:
    """Blocks looked up, and where they were found."""

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
    """All leases of this store's life; numbers carry the start count, so that an old release never fits a new lease."""

    def __init__(self, blocks: Blocks, *, first_number: int) -> None:
        self._blocks = blocks
        self._next = first_number
        self.open: dict[int, Lease] = {}
        self._incomplete: set[int] = set()
        self.counters = LookupCounters()

    # --- lookup ----------------------------------------------------------------------------------------------

    def lookup(self, owner: Owner, identities: list[bytes], generation: "Generations") -> Found:
        """Leases the leading run that is held and (for its disk part) has room in the arena."""
        blocks, entries = self._blocks, self._blocks.entries
        self.counters.lookups += 1
        self.counters.asked += len(identities)
        run: array[int] = array("I")
        orders: list[StageOrder] = []
        blocks.tick += 1
        for identity in identities if len(self.open) < MAX_LEASES else ():
            entry = entries.map.get(identity)
            if entry == NONE or not self._is_visible(entry):
                break
            if run:
                self._adopt(entry, run[-1])
            blocks.pin(entry)
            run.append(entry)
        # Only now, with the whole run pinned, is room made, so that reads do not evict what this very lookup found;
        # when there is no other room, its deepest blocks give way: a shorter run that begins at the front is of use.
        index, wanted = 0, len(run)
        while index < len(run):
            if entries.host[run[index]] == NONE:
                while (order := self._begin_staging(run[index], generation)) is None and len(run) > index + 1:
                    self._unpin(run[-1:])
                    run.pop()
                if order is None:
                    self._unpin(run[index:])
                    run = run[:index]
                    break
                orders.append(order)
            index += 1
        self.counters.no_room += len(run) < wanted
        if not run:
            return Found(None, [])
        places = [self._place(entry) for entry in run]
        lease = Lease(self._next, owner, run, bytes(not place.staged for place in places))
        self._next += 1
        self.open[lease.number] = lease
        self._advance(lease)
        if lease.told < len(run):
            self._incomplete.add(lease.number)
        self._count_hits(run, places)
        return Found(lease, places, orders)

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
        staged = slots.state[slot] != STAGING
        return BlockPlace(
            slot=slot,
            offset=self._blocks.headers.offset(slot),
            generation=slots.generation[slot],
            checksum=slots.checksum[slot],
            staged=staged,
            from_disk=not staged,
        )

    # --- staging ---------------------------------------------------------------------------------------------

    def _begin_staging(self, entry: int, generation: "Generations") -> StageOrder | None:
        blocks, entries = self._blocks, self._blocks.entries
        length = entries.length[entry]
        size = blocks.slots.size_class(length)
        slot = blocks.allocate(size) if size >= 0 else NONE
        if slot == NONE:
            return None
        identity = entries.identity(entry)
        number = generation.next()
        slots = blocks.slots
        slots.state[slot], slots.entry[slot], slots.generation[slot] = STAGING, entry, number
        slots.engine[slot] = slots.checksum[slot] = 0
        self._write_header(entry, slot, GRANTED, parent=bytes(32))
        entries.host[entry] = slot
        blocks.pin(entry)  # the read's own pin: a released lease does not take the slot from under it
        return StageOrder(identity, slot, number, blocks.headers.offset(slot), length)

    def _write_header(self, entry: int, slot: int, state: int, *, parent: bytes) -> None:
        entries = self._blocks.entries
        self._blocks.headers.write(
            slot,
            state,
            identity=entries.identity(entry),
            parent=parent,
            root=entries.roots[entries.root[entry]],
            generation=self._blocks.slots.generation[slot],
            engine=0,
            epoch=0,
            length=entries.length[entry],
            checksum=self._blocks.slots.checksum[slot],
            recency=entries.tick[entry],
            flags=FLAG_CLEAN,
        )

    def is_wanted(self, order: StageOrder) -> bool:
        """Whether anybody still waits for a read that has not begun (its own pin is not a reason to read)."""
        entry = self._blocks.slots.entry[order.slot]
        return bool(self._blocks.entries.pins[entry] > 1 and not self._blocks.entries.flags[entry] & DETACHED)

    def staged(
        self, order: StageOrder, *, ok: bool, checksum: int = 0, parent: bytes = bytes(32), lost: bool = True
    ) -> list[StagedRun]:
        """A read has ended: returns what owners must be told.

        `checksum` and `parent` are what the disk knows of the block. `lost`: a failed read means that the disk copy
        is gone (and not that the disk could not be asked).
        """
        blocks, entries, slots = self._blocks, self._blocks.entries, self._blocks.slots
        entry = slots.entry[order.slot]
        assert slots.state[order.slot] == STAGING
        assert slots.generation[order.slot] == order.generation
        if ok and not entries.flags[entry] & DETACHED:
            slots.checksum[order.slot] = checksum
            self._write_header(entry, order.slot, VALID, parent=parent)
            slots.state[order.slot] = CLEAN if entries.flags[entry] & ON_DISK else DIRTY  # the index was lost meanwhile
            before = entries.map.get(parent)
            if before != NONE and entries.parent[entry] == NONE:
                entries.link(entry, before)
            self.counters.staged += 1
            self.counters.staged_bytes += order.length
        else:
            self.counters.stage_failures += 1
            blocks.headers.free(order.slot)
            entries.host[entry] = NONE
            slots.state[order.slot] = FREE
            slots.give_back(order.slot)
            if lost and entries.flags[entry] & ON_DISK:
                blocks.counters.disk_failures += 1
                entries.flags[entry] &= ~ON_DISK
                if not entries.flags[entry] & DETACHED:
                    entries.detach(entry)
        news = [run for number in sorted(self._incomplete) for run in self._tell(self.open[number], entry)]
        blocks.unpin(entry)
        return news

    def _tell(self, lease: Lease, entry: int) -> list[StagedRun]:
        """What `lease` learns from a read of `entry` that has ended."""
        entries = self._blocks.entries
        runs: list[StagedRun] = []
        if entries.host[entry] == NONE and entry in lease.entries:
            end = lease.entries.index(entry)
            self._unpin(lease.entries[end:])
            lease.entries = lease.entries[:end]
            lease.failed = True
        known = lease.told
        self._advance(lease)
        for index in range(known, lease.told):
            if not lease.by_push[index]:
                continue
            if not runs or index != runs[-1].first + len(runs[-1].places):
                runs.append(StagedRun(lease, index, [], False))
            runs[-1].places.append(self._place(lease.entries[index]))
        if lease.told == len(lease.entries):
            self._incomplete.discard(lease.number)
            if lease.failed:
                runs.append(StagedRun(lease, lease.told, [], True))
        return runs

    def _advance(self, lease: Lease) -> None:
        entries, state = self._blocks.entries, self._blocks.slots.state
        while lease.told < len(lease.entries) and state[entries.host[lease.entries[lease.told]]] != STAGING:
            lease.told += 1

    # --- release ---------------------------------------------------------------------------------------------

    def _unpin(self, run: "array[int]") -> None:
        for entry in reversed(run):
            if not self._blocks.entries.flags[entry] & DETACHED:
                self._blocks.mark(entry, self._blocks.tick)
            self._blocks.unpin(entry)

    def release(self, number: int, owner: Owner | None = None, bad: tuple[int, ...] = ()) -> bool:
        """Gives a lease back; `bad`: indices of blocks that failed their checksum. False: it has no such lease."""
        lease = self.open.get(number)
        if lease is None or (owner is not None and lease.owner[0] != owner[0]):
            return False
        del self.open[number]
        self._incomplete.discard(number)
        for index in bad:
            if index < len(lease.entries) and (index < lease.told or not lease.by_push[index]):
                self._blocks.suspect(lease.entries[index])
        self._blocks.tick += 1
        self._unpin(lease.entries)
        return True

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


class Generations:
    """Numbers that only grow, over restarts too: the start count in the upper half."""

    def __init__(self, starts: int) -> None:
        self._last = starts << 32

    def next(self) -> int:
        """A generation that no slot ever had."""
        self._last += 1
        return self._last

    def at_least(self, starts: int) -> None:
        """No generation of before this start from now on."""
        self._last = max(self._last, starts << 32)
