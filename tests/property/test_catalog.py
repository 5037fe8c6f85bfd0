"""The store's catalogue, driven at random beside a model that knows bytes, and killed at random instants.

The model keeps what each arena slot and each disk copy *contains* (as the name of the block written there), and
checks that nobody is ever handed a slot with other contents, that nothing pinned or with children vanishes, that
each loss is counted, and that a kill loses nothing that was committed.
"""

import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.store.arena.records import Geometry
from services.store.catalog import clearing
from services.store.catalog.behind import WriteOrder
from services.store.catalog.catalog import Catalog
from services.store.catalog.entries import DETACHED, ON_DISK, SUSPECT
from services.store.catalog.identity_table import DictMap, PackedMap
from services.store.catalog.integrity import check_integrity
from services.store.catalog.order import NONE
from services.store.catalog.recovery import recover
from services.store.catalog.slots import CLEAN, DIRTY, GRANTED
from services.store.catalog.staging import StageOrder
from services.store.disk.tier import ENTRY
from shared.messages.store import COMMIT_DONE, RESERVE_FULL, RESERVE_GRANTED, RESERVE_HAVE, RESERVE_NO_PARENT
from shared.scope import EVERYTHING, Scope, of_root
from tests.durable_io import Died, DurableIO, SteppedHeaders

GEOMETRY = Geometry(extents=3, extent_bytes=4 * 4096, wanted=0)
ROOTS = {b"a": b"A" * 32, b"b": b"B" * 32}
LENGTHS = {b"a": 1000, b"b": 8000}
ENGINES = ("e0", "e1")

Path = tuple[bytes, ...]
"""A root's letter, then one letter a block: the block and all before it."""


def name(path: Path) -> bytes:
    return hashlib.blake2b(b"/".join(path), digest_size=32).digest() if len(path) > 1 else ROOTS[path[0]]


BRANCHES = ((b"x", b"x", b"x", b"x"), (b"x", b"x", b"y", b"x"), (b"y", b"x", b"x", b"x"))
paths = st.tuples(st.sampled_from([b"a", b"a", b"b"]), st.sampled_from(BRANCHES), st.sampled_from([4, 3, 2, 1])).map(
    lambda drawn: (drawn[0], *drawn[1][: drawn[2]])
)


@dataclass
class Held:
    """A lease of the model: the blocks told to be in the arena, by index."""

    engine: str
    path: Path
    length: int
    places: dict[int, int] = field(default_factory=dict)
    awaited: dict[bytes, int] = field(default_factory=dict)
    """Names of blocks that come from disk, to their index."""
    let_go: set[int] = field(default_factory=set)
    """Indices of blocks that were taken, or will not come."""
    dead: set[bytes] = field(default_factory=set)
    """Names whose block is no longer this one: cleared, or withdrawn as bad."""

    def names(self) -> set[bytes]:
        """What it keeps from being evicted."""
        held = set(range(self.length)) - self.let_go
        return {name(self.path[: index + 2]) for index in held} - self.dead


class CatalogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.buffer = bytearray(GEOMETRY.total)
        self.starts = 0
        self.bytes_in: dict[int, bytes] = {}
        self.disk: dict[bytes, dict[str, Any]] = {}
        self.parent_of: dict[bytes, bytes] = {}
        self.grants: dict[tuple[int, int], tuple[str, bytes]] = {}
        self.held: dict[int, Held] = {}
        self.reads: list[StageOrder] = []
        self.batch: list[WriteOrder] = []
        self.losses = 0
        self.incarnation = 1
        self.named: dict[bytes, tuple[bool, bool]] = {}
        self.letter_of: dict[bytes, bytes] = {}
        self.orphans: set[bytes] = set()
        self.doomed: set[tuple[int, int]] = set()

    @initialize(packed=st.booleans(), cap=st.sampled_from([0, 1, 3]), window=st.sampled_from([1, 2, 100]))
    def begin(self, packed: bool, cap: int, window: int = 100) -> None:
        self.make_map = PackedMap if packed else DictMap
        self.cap = cap
        self.window = window
        self.boot()

    def boot(self) -> None:
        self.starts += 1
        self.headers = headers = SteppedHeaders(self.buffer, GEOMETRY, DurableIO())
        self.catalog = Catalog(
            headers, starts=self.starts, epoch=headers.epoch, max_slots=self.cap, make_map=self.make_map
        )
        self.catalog.leases.window_bytes = self.window * max(LENGTHS.values())
        self.catalog.leases.refill_bytes = 1
        rows = [(key, *(row[part] for part in ENTRY.names[1:])) for key, row in self.disk.items()]
        halves = [rows[::2], rows[1::2]]
        recover(self.catalog, [np.array(half, ENTRY) for half in halves])
        self.losses = 0

    # --- what the catalogue says it holds --------------------------------------------------------------------

    def look(self) -> dict[bytes, tuple[bool, bool]]:
        """Visible blocks: name -> (valid on host, on disk)."""
        entries, state = self.catalog.blocks.entries, self.catalog.blocks.slots.state
        seen = {}
        for entry in np.flatnonzero(entries.columns["flags"]).tolist():
            slot, flags = entries.host[entry], entries.flags[entry]
            host = slot != NONE and state[slot] in (DIRTY, CLEAN)
            if not flags & DETACHED and (host or flags & ON_DISK):
                seen[entries.identity(entry)] = (host, bool(flags & ON_DISK))
        return seen

    def is_visible(self, identity: bytes) -> bool:
        """On a tier, and not held back until the last lease over its bad host copy ends."""
        entries = self.catalog.blocks.entries
        return identity in self.named and not entries.flags[entries.map.get(identity)] & SUSPECT

    def settle(self, *, may_lose: bool = False, gone: set[bytes] = frozenset()) -> None:  # type: ignore[assignment]
        """Compares before and after an operation: what vanished was allowed to, and was counted."""
        before, after = self.named, self.look()
        vanished = set(before) - set(after) - gone
        if not may_lose:
            assert not vanished
        pinned = {identity for held in self.held.values() for identity in held.names()}
        assert not vanished & pinned
        granted = {identity for key, (_, identity) in self.grants.items() if key not in self.doomed}
        self.orphan(gone)
        self.orphans &= set(after) | granted
        for identity in set(after) - self.orphans:
            assert self.parent_of.get(identity) not in vanished, "a parent went before its child"
        counters = self.catalog.blocks.counters
        dirty = {identity for identity in vanished if not before[identity][1]}
        assert counters.host_losses - self.losses >= len(dirty)
        self.losses = counters.host_losses
        self.named = after

    def orphan(self, gone: set[bytes]) -> None:
        """Blocks that went for a reason (bad bytes, abandoned) leave children behind, which count no more."""
        self.orphans |= {child for child, parent in self.parent_of.items() if parent in gone}

    @invariant()
    def holds_together(self) -> None:
        if self.starts:
            check_integrity(self.catalog, writing=len(self.batch))
            assert set(self.disk) == {identity for identity, (_, disk) in self.look().items() if disk}

    # --- saves -----------------------------------------------------------------------------------------------

    @rule(path=paths, engine=st.sampled_from(ENGINES))
    def reserve(self, path: Path, engine: str) -> None:
        pairs = [(name(path[: i + 1]), name(path[:i])) for i in range(1, len(path))]
        self.parent_of.update(pairs)
        self.letter_of.update((identity, path[0]) for identity, _ in pairs)
        known = set(self.named) | {identity for _, identity in self.grants.values()}
        answers = self.catalog.reserve(
            (engine, self.incarnation),
            root=ROOTS[path[0]],
            epoch=self.catalog.epoch,
            length=LENGTHS[path[0]],
            blocks=pairs,
        )
        for (identity, parent), answer in zip(pairs, answers, strict=True):
            if answer.status == RESERVE_GRANTED:
                assert identity not in self.look()
                assert (answer.slot, answer.generation) not in self.grants
                assert answer.offset % 4096 == 0
                self.grants[answer.slot, answer.generation] = (engine, identity)
            elif answer.status == RESERVE_HAVE:
                assert identity in known
            elif answer.status == RESERVE_NO_PARENT:
                assert parent not in self.look()
            else:
                assert answer.status == RESERVE_FULL
        offsets = [self.catalog.blocks.headers.offset(slot) for slot, _ in self.grants]
        assert len(set(offsets)) == len(offsets), "two grants of one slot"
        self.settle(may_lose=True)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), how=st.sampled_from(["commit", "commit", "commit", "abandon", "stale"]))
    def end_grant(self, data: st.DataObject, how: str) -> None:
        self.finish_grant(data.draw(st.sampled_from(sorted(self.grants))), how)

    def finish_grant(self, key: tuple[int, int], how: str) -> None:
        (slot, generation), (engine, identity) = key, self.grants[key]
        owner = (engine, self.incarnation)
        if how == "stale":
            assert self.catalog.commit(owner, slot, generation - 1, 7) != COMMIT_DONE
            assert not self.catalog.abandon(("stranger", 1), slot, generation)
            self.settle()
            return
        del self.grants[key]
        self.bytes_in[slot] = identity  # the worker writes until the very end
        doomed = key in self.doomed
        self.doomed.discard(key)
        before = self.look()
        assert doomed or identity not in before, "visible before its commit"
        if how == "abandon":
            assert self.catalog.abandon(owner, slot, generation)
            self.orphan(set() if doomed else {identity})
        else:
            done = self.catalog.commit(owner, slot, generation, checksum_of(identity)) == COMMIT_DONE
            assert done == (not doomed)
            assert self.look() == (before if doomed else before | {identity: (True, False)})
        self.settle()

    @rule(path=paths, engine=st.sampled_from(ENGINES))
    def save_chain(self, path: Path, engine: str) -> None:
        before = set(self.grants)
        self.reserve(path, engine)
        for key in sorted(set(self.grants) - before):
            self.finish_grant(key, "commit")

    # --- loads -----------------------------------------------------------------------------------------------

    @rule(path=paths, engine=st.sampled_from(ENGINES))
    def lookup(self, path: Path, engine: str) -> None:
        identities = [name(path[: i + 1]) for i in range(1, len(path))]
        expected = 0
        while expected < len(identities) and self.is_visible(identities[expected]):
            expected += 1
        no_room = self.catalog.leases.counters.no_room
        found = self.catalog.lookup((engine, self.incarnation), identities)
        if self.catalog.leases.counters.no_room == no_room:
            assert len(found.places) == expected
        assert len(found.places) in (0, expected)
        self.reads += found.orders
        if found.lease is not None:
            assert len(found.lease.ahead) <= found.lease.window
            held = self.held[found.lease.number] = Held(engine, path, len(found.places))
            for index, place in enumerate(found.places):
                if place.staged:
                    self.told(held, index, place.slot, place.checksum)
                else:
                    held.awaited[identities[index]] = index
        self.settle(may_lose=True)

    @rule()
    def go_on(self) -> None:
        """What the shell asks for whenever something was given back or has arrived."""
        self.reads += self.catalog.leases.more()
        self.hear()
        self.settle(may_lose=True)

    def hear(self) -> None:
        """Each block of each lease is told of once: that it is here, or that it will not come."""
        for run in self.catalog.leases.take_news():
            held = self.held[run.lease.number]
            for index, place in enumerate(run.places, run.first):
                identity = name(held.path[: index + 2])
                assert held.awaited.pop(identity) == index, "told twice"
                if run.failed:
                    held.let_go.add(index)
                else:
                    self.told(held, index, place.slot, place.checksum)

    @precondition(lambda self: any(held.places for held in self.held.values()))
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([n for n, held in sorted(self.held.items()) if held.places]))
        self.take_blocks(number, data.draw(st.sets(st.sampled_from(sorted(self.held[number].places)))))

    def take_blocks(self, number: int, indices: set[int]) -> None:
        """They are on the device: their slots may be used for others from now on."""
        held = self.held[number]
        for index in indices:
            assert self.bytes_in[held.places.pop(index)] == name(held.path[: index + 2]), "bytes changed under a lease"
        held.let_go |= indices
        owner = (held.engine, self.incarnation)
        self.catalog.leases.taken(number, ("stranger", 1), indices)
        self.catalog.leases.taken(number, owner, indices | {held.length, 1 << 31} | set(held.awaited.values()))
        assert not self.catalog.leases.taken(number, owner, indices)
        self.settle()

    def told(self, held: Held, index: int, slot: int, checksum: int) -> None:
        identity = name(held.path[: index + 2])
        held.places[index] = slot
        assert self.bytes_in[slot] == identity, "a lease over other bytes"
        assert checksum == checksum_of(identity)

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), outcome=st.sampled_from(["ok", "ok", "ok", "lost", "fault"]))
    def end_read(self, data: st.DataObject, outcome: str) -> None:
        self.finish_read(self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1))), outcome)

    @rule(path=paths, engine=st.sampled_from(ENGINES))
    def load_chain(self, path: Path, engine: str) -> None:
        self.lookup(path, engine)
        while self.reads:
            self.finish_read(self.reads.pop(0), "ok")
            self.go_on()

    def finish_read(self, order: StageOrder, outcome: str) -> None:
        copy = self.disk.get(order.identity)
        gone = set()
        if copy is None or outcome == "lost":
            self.disk.pop(order.identity, None)
            gone.add(order.identity)
            self.catalog.staged(order, ok=False)
        elif outcome == "fault":
            self.catalog.staged(order, ok=False, lost=False)
        else:
            self.bytes_in[order.slot] = order.identity
            self.catalog.staged(order, ok=True, checksum=copy["checksum"], parent=copy["parent"])
        before = {number: dict(held.awaited) for number, held in self.held.items()}
        self.hear()
        for number, held in self.held.items():
            told = set(before[number]) - set(held.awaited)
            assert told - held.dead == {order.identity} & set(before[number]) - held.dead, "who waits hears of it"
        self.settle(gone=gone)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), bad=st.booleans())
    def release(self, data: st.DataObject, bad: bool) -> None:
        self.finish_lease(data.draw(st.sampled_from(sorted(self.held))), bad)

    def finish_lease(self, number: int, bad: bool) -> None:
        held = self.held.pop(number)
        for index, slot in held.places.items():
            assert self.bytes_in[slot] == name(held.path[: index + 2]), "bytes changed under a lease"
        indices = tuple(sorted(held.places))[-1:] if bad else ()
        gone = {name(held.path[: index + 2]) for index in indices} & held.names()
        assert self.catalog.leases.release(number, bad=indices)
        assert not self.catalog.leases.release(number)
        for other in self.held.values():
            other.dead |= gone - set(self.look())
        if bad:
            for identity in gone & set(self.look()):
                assert self.look()[identity] == (False, True), "a bad host copy is still served"
        self.settle(gone=gone)

    # --- disk lane -------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.batch)
    @rule(count=st.integers(1, 4))
    def begin_write(self, count: int) -> None:
        self.batch = self.catalog.behind.next_batch(count, 1 << 30)
        assert len({order.length for order in self.batch}) <= 1
        ahead: set[bytes] = set()
        for order in self.batch:
            entry = self.catalog.blocks.entries.parent[order.entry]
            if entry != NONE:
                parent = self.catalog.blocks.entries.identity(entry)
                assert parent in self.disk or parent in ahead, "a child is written before its parent"
            ahead.add(order.identity)
        self.settle()

    @precondition(lambda self: self.batch)
    @rule(saved=st.integers(0, 4), fault=st.booleans())
    def end_write(self, saved: int, fault: bool) -> None:
        batch, self.batch = self.batch, []
        gone = set()
        if fault:
            self.catalog.behind.put_back(batch)
        else:
            for order in batch[:saved]:
                assert self.bytes_in[order.slot] == order.identity, "bytes changed while they were written"
                self.save(order)
            for identity in self.catalog.behind.written(batch, [i < saved for i in range(len(batch))]):
                gone.add(identity)
                del self.disk[identity]
        self.settle(gone=gone)

    @precondition(lambda self: not self.batch)
    @rule()
    def write_all(self) -> None:
        self.begin_write(100)
        while self.batch:
            self.end_write(100, False)
            self.begin_write(100)

    def save(self, order: WriteOrder) -> None:
        self.disk[order.identity] = {
            "parent": order.parent,
            "root": order.root,
            "slot": 0,
            "length": order.length,
            "generation": order.generation,
            "checksum": order.checksum,
            "recency": order.recency,
        }

    @precondition(lambda self: not self.batch)
    @rule(count=st.integers(1, 3))
    def evict_disk(self, count: int) -> None:
        dropped = self.catalog.blocks.evict_disk(count, older_than=1 << 63)
        assert len(set(dropped)) == len(dropped)
        pinned = {identity for held in self.held.values() for identity in held.names()}
        assert not set(dropped) & pinned
        for identity in dropped:
            del self.disk[identity]
        lost = {identity for identity in dropped if not self.named[identity][0]}
        for identity in set(self.look()) - self.orphans:
            assert self.parent_of[identity] not in lost, "a parent left the disk before its child"
        self.settle(gone=lost)

    # --- clear, crash ----------------------------------------------------------------------------------------

    @precondition(lambda self: not self.batch and len(self.named) > 2)
    @rule(
        letter=st.sampled_from([None, *sorted(ROOTS)]),
        first=st.sampled_from([b"", b"x", b"y"]),
        really=st.sampled_from([False, False, False, True]),
    )
    def clear(self, letter: bytes | None, first: bytes, really: bool) -> None:
        if not really:  # a store that is cleared all the time never comes to anything
            return
        root = None if letter is None else ROOTS[letter]
        scope = EVERYTHING if root is None else of_root(root)
        if letter is not None and first:
            scope = Scope(scope.mask, scope.pattern, name((letter, first)))
        told = clearing.unplaced(self.catalog.blocks, scope)
        firsts = {key for key in told if key in self.disk and self.disk[key]["parent"] == root}
        old = self.catalog.epoch
        before, placed = self.look(), {key for key in self.named if self.is_placed(key)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clearing, "MANY", 0 if old % 2 else clearing.MANY)  # either way
            dropped = self.catalog.clear(scope, firsts)
        after = self.look()

        def inside(key: bytes) -> bool:
            return root in (None, ROOTS[self.letter_of[key]]) and scope.line in (b"", self.first_of(key))

        gone = set(before) - set(after)
        assert not any(inside(key) for key in after)
        assert all(inside(key) for key in gone & placed), "what has its place elsewhere stays"
        if scope.line:
            assert set(dropped.on_disk) == {key for key in self.disk if key in gone}
        for key in [key for key in self.disk if key in gone or inside(key)]:
            del self.disk[key]
        names = self.catalog.blocks.entries.map
        self.doomed |= {key for key, (_, identity) in self.grants.items() if names.get(identity) == NONE}
        assert not any(inside(identity) for key, (_, identity) in self.grants.items() if key not in self.doomed)
        for held in self.held.values():
            held.dead |= {key for key in held.names() if names.get(key) == NONE}
            assert not any(inside(key) for key in held.names())
        for path_root in sorted(ROOTS.values()):
            assert self.catalog.is_stale(path_root, old) == (root in (None, path_root))
        self.settle(gone=gone)

    def first_of(self, key: bytes) -> bytes:
        """The first block of its chain, held or not."""
        while self.parent_of[key] not in ROOTS.values():
            key = self.parent_of[key]
        return key

    def is_placed(self, key: bytes) -> bool:
        """Whether all blocks before it are visible, none of them withdrawn or once without its parent."""
        while key not in ROOTS.values():
            if not self.is_visible(key) or key in self.orphans:
                return False
            key = self.parent_of[key]
        return True

    @rule(data=st.data())
    def restart_of_an_engine(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from(ENGINES))
        mine = self.grants_of(engine)
        self.reopen(engine, data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else [])

    def grants_of(self, engine: str) -> list[tuple[int, int]]:
        return [key for key, (owner, _) in sorted(self.grants.items()) if owner == engine]

    def reopen(self, engine: str, held: list[tuple[int, int]]) -> None:
        mine = self.grants_of(engine)
        self.incarnation += 1
        kept = self.catalog.open_engine((engine, self.incarnation), [*held, (0, 1)])
        assert kept == [True] * len(held) + [False]
        for key in set(mine) - set(held):
            self.orphan(set() if key in self.doomed else {self.grants[key][1]})
            self.doomed.discard(key)
            del self.grants[key]
        self.held = {number: lease for number, lease in self.held.items() if lease.engine != engine}
        self.settle()

    @rule(saved=st.integers(0, 4))
    def crash(self, saved: int) -> None:
        for order in self.batch[:saved]:
            detached = self.catalog.blocks.entries.flags[order.entry] & DETACHED
            if not detached and self.bytes_in[order.slot] == order.identity:
                self.save(order)
        self.batch, self.reads, self.held = [], [], {}
        before = self.look()
        generation = self.catalog.generations.next()
        self.boot()
        after = self.look()
        for identity, (host, _) in before.items():
            assert identity in after, "a committed block was lost by a kill"
            assert after[identity][0] == host
        assert set(after) - set(before) <= set(self.disk)
        assert self.catalog.generations.next() > generation
        for engine in ENGINES:
            mine = self.grants_of(engine)
            assert self.catalog.open_engine((engine, self.incarnation), mine) == [True] * len(mine)
        self.named = self.look()
        assert self.named == after

    def die_in(self, operation: Callable[[], None], dice: random.Random) -> None:
        """Kills the store at a random write to its headers while it works; what it holds afterwards is whole."""
        before = self.look()
        granted = {identity for _, identity in self.grants.values()}
        self.headers.io = DurableIO(die_at=dice.randint(1, 12), cut=dice.randint(0, 160))
        try:
            operation()
        except Died:
            losses = self.catalog.blocks.counters.host_losses - self.losses + 1
            self.batch, self.reads, self.held = [], [], {}
            self.boot()
            after = self.look()
            vanished = set(before) - set(after)
            assert len(vanished) <= losses
            assert not any(before[identity][1] for identity in vanished), "a block went from both tiers"
            for identity in set(after) - self.orphans:
                assert self.parent_of[identity] not in vanished
            entries = self.catalog.blocks.entries
            for identity, (host, _) in after.items():
                assert not host or self.bytes_in[entries.host[entries.map.get(identity)]] == identity
            self.orphan(vanished | granted - set(after))
            self.named = after
            for engine in ENGINES:
                self.reopen(engine, [key for key in self.grants_of(engine) if self.catalog_knows(key)])
        else:
            self.headers.io = DurableIO()

    def catalog_knows(self, key: tuple[int, int]) -> bool:
        slots = self.catalog.blocks.slots
        return bool(slots.state[key[0]] == GRANTED and slots.generation[key[0]] == key[1])


def checksum_of(identity: bytes) -> int:
    return int.from_bytes(identity[:8], "big")


TestCatalog = CatalogMachine.TestCase


def walk(machine: CatalogMachine, dice: random.Random, steps: int) -> None:
    """Long lives with the odds of a real store; Hypothesis' own choice of rules seldom fills both tiers."""

    def path() -> Path:
        return dice.choice([b"a", b"a", b"b"]), *dice.choice(BRANCHES)[: dice.choice([4, 4, 3, 2, 1])]

    def engine() -> str:
        return dice.choice(ENGINES)

    def end_grant() -> None:
        if machine.grants:
            how = dice.choice(["commit", "commit", "abandon", "stale"])
            machine.finish_grant(dice.choice(sorted(machine.grants)), how)

    def end_read() -> None:
        if machine.reads:
            outcome = dice.choice(["ok", "ok", "ok", "ok", "lost", "fault"])
            machine.finish_read(machine.reads.pop(dice.randrange(len(machine.reads))), outcome)

    def take() -> None:
        ready = sorted(number for number, held in machine.held.items() if held.places)
        if ready:
            number = dice.choice(ready)
            machine.take_blocks(number, {index for index in machine.held[number].places if dice.random() < 0.6})

    def release() -> None:
        if machine.held:
            machine.finish_lease(dice.choice(sorted(machine.held)), dice.random() < 0.2)

    def write() -> None:
        if machine.batch:
            machine.end_write(dice.choice([4, 4, 4, 1, 0]), dice.random() < 0.1)
        else:
            machine.begin_write(dice.randint(1, 4))

    def reopen() -> None:
        who = engine()
        machine.reopen(who, [key for key in machine.grants_of(who) if dice.random() < 0.7])

    def clear() -> None:
        if not machine.batch and len(machine.named) > 2:
            machine.clear(dice.choice([None, *sorted(ROOTS)]), dice.choice([b"", b"x", b"y"]), True)

    def evict_disk() -> None:
        if not machine.batch:
            machine.evict_disk(dice.randint(1, 3))

    def die() -> None:
        machine.die_in(dice.choice([save, save, look_up, end_grant, end_good_read, write, evict_disk]), dice)

    def end_good_read() -> None:
        if machine.reads:
            machine.finish_read(machine.reads.pop(dice.randrange(len(machine.reads))), "ok")

    def save() -> None:
        machine.save_chain(path(), engine())

    def look_up() -> None:
        machine.lookup(path(), engine())

    odds = {
        "reserve": (3, lambda: machine.reserve(path(), engine())),
        "save": (8, save),
        "end grant": (6, end_grant),
        "lookup": (6, look_up),
        "end read": (12, end_read),
        "take": (6, take),
        "go on": (10, machine.go_on),
        "release": (8, release),
        "write": (12, write),
        "evict disk": (1, evict_disk),
        "clear": (0.3, clear),
        "reopen": (0.5, reopen),
        "die": (0.7, die),
        "crash": (0.5, lambda: machine.crash(dice.randint(0, 4))),
    }
    weights = [weight for weight, _ in odds.values()]
    for step in range(steps):
        dice.choices(list(odds.values()), weights)[0][1]()
        if step % 5 == 0:
            machine.holds_together()


def test_long_random_lives_of_a_small_store_lose_nothing_uncounted() -> None:
    seen: Counter[str] = Counter()
    for seed in range(200 if os.environ.get("PERDURE_HYPOTHESIS") == "many" else 8):
        dice = random.Random(seed)
        machine = CatalogMachine()
        machine.begin(dice.random() < 0.5, dice.choice([0, 0, 2, 3, 5]), dice.choice([1, 2, 100]))
        for _ in range(10):
            walk(machine, dice, 60)
            seen.update(vars(machine.catalog.blocks.counters) | vars(machine.catalog.leases.counters))
    rare = {name: count for name, count in seen.items() if count < 10}
    assert not rare, "these paths were hardly walked"
