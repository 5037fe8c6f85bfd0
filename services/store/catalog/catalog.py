"""The store's catalogue: what is held where, for whom, and what may happen next. Pure and deterministic.

    engine             OpenEngine ─ Reserve ─ Commit / Abandon            (saves)
                       Lookup ─ Found, Staged, Taken ─ Release            (loads: `leases`)
    disk lane          next_batch ─ written / put_back                    (write-behind: `behind`)
                       evict_disk                                         (room on disk)
    anybody            clear, statistics, check_integrity

Events in, answers out; no files, threads, clocks. The shell brings bytes to where the answers say. Who may touch a
slot's bytes: its engine while GRANTED, a reader thread while STAGING, everybody may read while the block is pinned.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from services.store.arena.headers import Headers
from services.store.arena.records import GRANTED as HEADER_GRANTED
from services.store.arena.records import VALID as HEADER_VALID
from services.store.catalog.behind import WriteBehind, WriteOrder
from services.store.catalog.blocks import Blocks, Counters
from services.store.catalog.clearing import Dropped, clear_blocks
from services.store.catalog.entries import DETACHED
from services.store.catalog.identity_table import Identities, IdentityMap, PackedMap
from services.store.catalog.leases import Found, Leases, LookupCounters, Owner
from services.store.catalog.order import NONE
from services.store.catalog.slots import CLEAN, DIRTY, FREE, GRANTED, STAGING
from services.store.catalog.staging import Generations, StageOrder
from shared.messages.store import (
    COMMIT_DONE,
    COMMIT_STALE,
    RESERVE_FULL,
    RESERVE_GRANTED,
    RESERVE_HAVE,
    RESERVE_NO_PARENT,
    RESERVE_STALE,
)
from shared.scope import EVERYTHING, Scope

MAX_CLEARED = 4096
"""Scopes whose last clear is remembered one by one; with one more, grants of before are refused for all."""


class Grant(NamedTuple):
    """Answer to one reserved block; slot, offset and generation only when granted."""

    status: int
    slot: int = 0
    offset: int = 0
    generation: int = 0


@dataclass(frozen=True)
class CatalogStatistics:
    """Blocks now, and counters since the start of this store."""

    blocks: int
    host_capacity: int
    host_used: int
    host_bytes: int
    """Payload of the used slots."""
    host_dirty: int
    host_clean: int
    granted: int
    staging: int
    pinned: int
    on_disk: int
    leases: int
    queued: int
    epoch: int
    counters: Counters
    lookups: LookupCounters


def engine_number(engine: str) -> int:
    """An engine's name as headers carry it; never 0, which is the store itself."""
    return int.from_bytes(hashlib.blake2b(engine.encode(), digest_size=8).digest(), "little") or 1


class Catalog:
    """One per arena file. `starts` is how often a store has started on it, this time included."""

    def __init__(
        self,
        headers: Headers,
        *,
        starts: int,
        epoch: int = 0,
        max_slots: int = 0,
        make_map: Callable[[Callable[[], Identities]], IdentityMap] = PackedMap,
    ) -> None:
        self.blocks = Blocks(headers, max_slots=max_slots, make_map=make_map)
        self.behind = WriteBehind(self.blocks)
        self.generations = Generations(starts)
        self.leases = Leases(self.blocks, self.generations, first_number=starts << 32 | 1)
        self.epoch = epoch
        self._all_cleared_at = epoch  # what was cleared before we started is not known by scope: all of it counts
        self._cleared_at: dict[Scope, int] = {}
        headers.starts, headers.epoch = starts, epoch

    # --- engines ---------------------------------------------------------------------------------------------

    def open_engine(self, owner: Owner, held: Sequence[tuple[int, int]]) -> list[bool]:
        """A scheduler says which grants its worker still holds, as (slot, generation); the rest are abandoned.

        Returns per held grant whether it stands. All leases of the engine end, those of this very scheduler too: it
        opens again after it has lost the connection, and has written its leases off then.
        """
        self.leases.release_engine(owner[0])
        number = engine_number(owner[0])
        kept = [self._grant_of(number, slot, generation) for slot, generation in held]
        keep = {slot for (slot, _), stands in zip(held, kept, strict=True) if stands}
        columns = self.blocks.slots.columns
        mine = np.flatnonzero((columns["state"] == GRANTED) & (columns["engine"] == number))
        for slot in mine.tolist():
            if slot not in keep:
                self._withdraw(slot)
        return kept

    def abandon_others(self, engines: Iterable[str]) -> int:
        """Takes back the grants of all engines but these: their processes have provably exited. How many."""
        columns = self.blocks.slots.columns
        living = [engine_number(engine) for engine in engines]
        orphans = np.flatnonzero((columns["state"] == GRANTED) & ~np.isin(columns["engine"], living))
        for slot in orphans.tolist():
            self._withdraw(slot)
        return len(orphans)

    def _grant_of(self, engine: int, slot: int, generation: int) -> bool:
        slots = self.blocks.slots
        return (
            slot < slots.count
            and slots.state[slot] == GRANTED
            and slots.generation[slot] == generation
            and slots.engine[slot] == engine
        )

    # --- reserve, commit, abandon ----------------------------------------------------------------------------

    def is_stale(self, root: bytes, epoch: int) -> bool:
        """Whether anything of `root` has been cleared since `epoch`; a line counts as all of its root."""
        if epoch >= self.epoch:
            return False
        newer = (scope for scope, at in self._cleared_at.items() if epoch < at)
        return epoch < self._all_cleared_at or any(scope.covers(root) for scope in newer)

    def reserve(
        self, owner: Owner, *, root: bytes, epoch: int, length: int, blocks: Sequence[tuple[bytes, bytes]]
    ) -> list[Grant]:
        """Slots for full blocks, given as (identity, parent) from the front of a chain on."""
        if self.is_stale(root, epoch):
            return [Grant(RESERVE_STALE)] * len(blocks)
        self.blocks.tick += 1
        return [self._reserve(owner, root, epoch, length, identity, parent) for identity, parent in blocks]

    def _reserve(self, owner: Owner, root: bytes, epoch: int, length: int, identity: bytes, parent: bytes) -> Grant:
        entries, slots = self.blocks.entries, self.blocks.slots
        if entries.map.get(identity) != NONE:
            return Grant(RESERVE_HAVE)
        before = NONE
        if parent != root:
            before = entries.map.get(parent)
            if before == NONE or entries.root[before] != entries.known_root(root):
                return Grant(RESERVE_NO_PARENT)
            self.blocks.refresh_chain(before)
        size = slots.size_class(length)
        slot = self.blocks.allocate(size, protect=before) if size >= 0 else NONE
        if slot == NONE:
            return Grant(RESERVE_FULL)
        generation, engine = self.generations.next(), engine_number(owner[0])
        self.blocks.headers.write(
            slot,
            HEADER_GRANTED,
            identity=identity,
            parent=parent,
            root=root,
            generation=generation,
            engine=engine,
            epoch=epoch,
            length=length,
        )
        entry = entries.add(identity, before, root, length)
        entries.host[entry] = slot
        entries.pins[entry] = 1
        slots.state[slot], slots.entry[slot], slots.generation[slot] = GRANTED, entry, generation
        slots.engine[slot], slots.epoch[slot], slots.checksum[slot] = engine, epoch, 0
        return Grant(RESERVE_GRANTED, slot, self.blocks.headers.offset(slot), generation)

    def commit(self, owner: Owner, slot: int, generation: int, checksum: int) -> int:
        """The slot's bytes are complete: the block is published, or refused when the grant does not stand."""
        if not self._grant_of(engine_number(owner[0]), slot, generation):
            return COMMIT_STALE
        entries, slots = self.blocks.entries, self.blocks.slots
        entry = slots.entry[slot]
        if entries.flags[entry] & DETACHED:  # cleared while it was being copied
            self._withdraw(slot)
            return COMMIT_STALE
        entries.tick[entry] = self.blocks.tick
        slots.checksum[slot] = checksum
        self.blocks.headers.publish(slot, state=HEADER_VALID, checksum=checksum, recency=self.blocks.tick, flags=0)
        slots.state[slot] = DIRTY
        self.behind.push(slot)
        self.blocks.unpin(entry)
        return COMMIT_DONE

    def abandon(self, owner: Owner, slot: int, generation: int) -> bool:
        """The grant is given back unused; False when it does not stand."""
        stands = self._grant_of(engine_number(owner[0]), slot, generation)
        if stands:
            self._withdraw(slot)
        return stands

    def _withdraw(self, slot: int) -> None:
        entries, slots = self.blocks.entries, self.blocks.slots
        entry = slots.entry[slot]
        self.blocks.headers.free(slot)
        if not entries.flags[entry] & DETACHED:
            entries.detach(entry)
        entries.host[entry] = NONE
        slots.state[slot] = FREE
        slots.give_back(slot)
        self.blocks.unpin(entry)

    # --- loads -----------------------------------------------------------------------------------------------

    def lookup(self, owner: Owner, identities: list[bytes]) -> Found:
        """See `Leases.lookup`."""
        return self.leases.lookup(owner, identities)

    def staged(self, order: StageOrder, **outcome: bool | int | bytes) -> None:
        """See `Leases.staged`. A block whose disk copy was lost while it was read is to be written again."""
        self.leases.staged(order, **outcome)  # type: ignore[arg-type]
        if outcome["ok"] and self.blocks.slots.state[order.slot] == DIRTY:
            self.behind.push(order.slot)

    # --- clear -----------------------------------------------------------------------------------------------

    def clear(self, scope: Scope = EVERYTHING, firsts: Collection[bytes] = ()) -> Dropped:
        """Drops all blocks of a scope from the catalogue; see `clearing`.

        The disk is the caller's to clear, durably, before it answers.
        """
        self.epoch += 1
        self.blocks.headers.epoch = self.epoch
        if not scope.mask or len(self._cleared_at) == MAX_CLEARED:
            self._all_cleared_at = self.epoch
            self._cleared_at.clear()
        else:
            self._cleared_at[scope] = self.epoch
        return clear_blocks(self.blocks, scope, firsts)

    def catch_up(self, starts: int, epoch: int) -> None:
        """A disk tier that could be opened only late has seen this start as its number `starts`, and `epoch` clears."""
        self.generations.at_least(starts)
        self.blocks.headers.starts = max(self.blocks.headers.starts, starts)
        if epoch > self.epoch:
            self.epoch = self._all_cleared_at = self.blocks.headers.epoch = epoch

    # --- facts -----------------------------------------------------------------------------------------------

    def statistics(self) -> CatalogStatistics:
        """A snapshot; O(slots) in numpy."""
        entries, slots = self.blocks.entries, self.blocks.slots
        states = np.bincount(slots.columns["state"], minlength=8)
        return CatalogStatistics(
            blocks=entries.live,
            host_capacity=slots.capacity(),
            host_used=slots.used,
            host_bytes=int(
                entries.columns["length"][: entries.top][entries.columns["host"][: entries.top] != NONE].sum()
            ),
            host_dirty=int(states[DIRTY]),
            host_clean=int(states[CLEAN]),
            granted=int(states[GRANTED]),
            staging=int(states[STAGING]),
            pinned=int(np.count_nonzero(entries.columns["pins"])),
            on_disk=int(np.count_nonzero(entries.columns["flags"] & 2)),
            leases=len(self.leases.open),
            queued=self.behind.length,
            epoch=self.epoch,
            counters=self.blocks.counters,
            lookups=self.leases.counters,
        )


__all__ = ["Catalog", "CatalogStatistics", "Grant", "Owner", "WriteOrder", "engine_number"]
