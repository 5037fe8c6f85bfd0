"""The radix tree against a naive trie of single blocks: same matches, same evictions in the same order, same locks."""

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from services.scheduler.kv.node import Node
from services.scheduler.kv.radix import RadixTree

Key = tuple[int, tuple[int, ...]]
"""(namespace life, tokens from the root to the end of the block); block length 1."""

ROOTS = [b"a" * 32, b"b" * 32]
BLOCKS = 400
roots = st.sampled_from([*[ROOTS[0]] * 4, ROOTS[1]])
runs = st.lists(st.integers(0, 1), min_size=0, max_size=6).map(tuple)


@dataclass
class Entry:
    block: int
    recency: int
    locks: int = 0
    pins: int = 0


class RadixMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pins = array("I", bytes(4 * BLOCKS))
        self.tree = RadixTree(1, b"k" * 32, self.pins)
        self.free = list(range(BLOCKS))
        self.entries: dict[Key, Entry] = {}
        self.lives = dict(zip(ROOTS, range(2), strict=True))
        self.dead: set[int] = set()
        self.tick = 0
        self.held: list[tuple[Key, Node]] = []

    # --- the naive model

    def prefixes(self, key: Key) -> Iterator[Key]:
        for end in range(1, len(key[1]) + 1):
            yield key[0], key[1][:end]

    def longest(self, key: Key) -> Key:
        end = 0
        while end < len(key[1]) and (key[0], key[1][: end + 1]) in self.entries:
            end += 1
        return key[0], key[1][:end]

    def resting(self, key: Key) -> int:
        total = 0
        for k, entry in self.entries.items():
            if k[0] != key[0] or not (entry.locks or entry.pins):
                continue
            if k[1][: len(key[1])] == key[1]:
                total += entry.locks
            # a copy rests on the edge that holds its block, so it keeps the edge's later blocks as well
            edge_end = self.tree._homes[entry.block].blocks[-1] if entry.pins else entry.block
            rests_at = next(at[1] for at, other in self.entries.items() if other.block == edge_end)
            if rests_at[: len(key[1])] == key[1]:
                total += entry.pins
        return total

    def is_leaf(self, key: Key) -> bool:
        return not any(
            k[0] == key[0] and len(k[1]) > len(key[1]) and k[1][: len(key[1])] == key[1] for k in self.entries
        )

    def touch(self, key: Key) -> None:
        self.tick += 1
        for prefix in self.prefixes(key):
            self.entries[prefix].recency = self.tick

    def drop(self, key: Key) -> int:
        block = self.entries.pop(key).block
        self.free.append(block)
        return block

    def sweep(self) -> set[int]:
        """What goes by itself: blocks of a dead namespace on which nothing rests."""
        return {self.drop(key) for key in list(self.entries) if key[0] in self.dead and not self.resting(key)}

    # --- rules

    @rule(root=roots, run=runs)
    def match(self, root: bytes, run: tuple[int, ...]) -> None:
        key = self.longest((self.lives[root], run))
        found = self.tree.match(root, array("I", run).tobytes(), touch=False)
        assert found == [self.entries[prefix].block for prefix in self.prefixes(key)]

    @rule(root=roots, run=runs)
    def open(self, root: bytes, run: tuple[int, ...]) -> None:
        key = self.longest((self.lives[root], run))
        space = self.tree.space(root)
        node, blocks = self.tree.descend(space, array("I", run).tobytes())
        self.tree.lock(node)
        self.touch(key)
        assert blocks == [self.entries[prefix].block for prefix in self.prefixes(key)]
        assert node.end == len(key[1])
        if key[1]:
            self.entries[key].locks += 1
        self.held.append((key, node))

    @precondition(lambda self: any(key[0] not in self.dead for key, _ in self.held))
    @rule(which=st.integers(0, 99))
    def open_the_same(self, which: int) -> None:
        alive = [key for key, _ in self.held if key[0] not in self.dead]
        life, run = alive[which % len(alive)]
        self.open(next(root for root in ROOTS if self.lives[root] == life), run)

    def alive(self, which: int) -> Key | None:
        """One of the entries that a match can find."""
        keys = [key for key in self.entries if key[0] not in self.dead]
        return keys[which % len(keys)] if keys else None

    @rule(root=roots, run=runs)
    def come_and_go(self, root: bytes, run: tuple[int, ...]) -> None:
        self.open(root, ())
        self.publish(len(self.held) - 1, run)
        self.close(len(self.held) - 1)

    @rule(which=st.integers(0, 999))
    def open_a_prefix(self, which: int) -> None:
        key = self.alive(which)
        if key is not None:
            self.open(next(root for root in ROOTS if self.lives[root] == key[0]), key[1])

    @rule(which=st.integers(0, 999))
    def use_a_leaf(self, which: int) -> None:
        key = self.alive(which)
        if key is not None and self.is_leaf(key):
            root = next(root for root in ROOTS if self.lives[root] == key[0])
            self.tree.match(root, array("I", key[1]).tobytes())
            self.touch(key)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), run=runs)
    def publish(self, which: int, run: tuple[int, ...]) -> None:
        which %= len(self.held)
        key, node = self.held[which]
        if key[0] in self.dead:
            return
        end: Key = key[0], key[1] + run
        known = len(self.longest(end)[1]) - len(key[1])
        mine = [self.free.pop() for _ in run]
        after, canonical, had = self.tree.insert(node, array("I", run).tobytes(), mine)
        self.tree.lock(after)
        assert self.tree.unlock(node) == []
        assert had == known
        for i in range(len(key[1]), len(end[1])):
            block = mine[i - len(key[1])]
            prefix = end[0], end[1][: i + 1]
            if prefix in self.entries:
                self.free.append(block)
            else:
                self.entries[prefix] = Entry(block, 0)
        self.touch(end)
        assert canonical == [self.entries[p].block for p in self.prefixes(end)][len(key[1]) :]
        if key[1]:
            self.entries[key].locks -= 1
        if end[1]:
            self.entries[end].locks += 1
        self.held[which] = end, after

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def close(self, which: int) -> None:
        key, node = self.held.pop(which % len(self.held))
        if key[1]:
            self.entries[key].locks -= 1
        assert set(self.tree.unlock(node)) == self.sweep()

    @precondition(lambda self: self.entries)
    @rule(which=st.integers(0, 999))
    def pin(self, which: int) -> None:
        entry = list(self.entries.values())[which % len(self.entries)]
        entry.pins += 1
        self.pins[entry.block] += 1
        self.tree.pin(entry.block)

    @precondition(lambda self: any(self.pins))
    @rule(which=st.integers(0, 999))
    def unpin(self, which: int) -> None:
        pinned = [entry for entry in self.entries.values() if entry.pins]
        entry = pinned[which % len(pinned)]
        entry.pins -= 1
        self.pins[entry.block] -= 1
        assert set(self.tree.unpin(entry.block)) == self.sweep()

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        expected = []
        while len(expected) < count:
            leaves = [k for k in self.entries if k[0] not in self.dead and self.is_leaf(k) and not self.resting(k)]
            if not leaves:
                break
            expected.append(self.drop(min(leaves, key=lambda k: (self.entries[k].recency, -len(k[1])))))
        assert self.tree.evict(count) == expected

    @rule(root=st.sampled_from([*ROOTS, None]), really=st.integers(0, 3))
    def clear(self, root: bytes | None, really: int) -> None:
        if really:  # too many clears leave nothing to look at
            return
        for name in ROOTS if root is None else [root]:
            self.dead.add(self.lives[name])
            self.lives[name] = max([*self.lives.values(), *self.dead]) + 1
        assert set(self.tree.clear(lambda each: root in (None, each))) == self.sweep()

    @rule(root=roots, token=st.integers(0, 1), really=st.integers(0, 2))
    def clear_line(self, root: bytes, token: int, really: int) -> None:
        """What begins with one block lives on as a namespace of its own, that is dead."""
        if really:
            return
        old, new = self.lives[root], max([*self.lives.values(), *self.dead]) + 1
        self.dead.add(new)

        def moved(key: Key) -> Key:
            return (new, key[1]) if key[0] == old and key[1][:1] == (token,) else key

        self.entries = {moved(key): entry for key, entry in self.entries.items()}
        self.held = [(moved(key), node) for key, node in self.held]
        assert set(self.tree.clear_line(root, array("I", [token]).tobytes())) == self.sweep()

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.tree.check_integrity()
        resting = [bool(self.resting(key)) for key in self.entries]
        assert self.tree.protected == sum(resting)
        assert self.tree.evictable == len(resting) - sum(resting)
        assert self.tree.indexed == sum(1 for key in self.entries if key[0] not in self.dead)
        assert all(self.tree.holds(entry.block) for entry in self.entries.values())
        used = {life for life, _ in self.entries} | {key[0] for key, _ in self.held}
        assert self.tree.statistics().spaces == len(used - self.dead)


def test_the_tree_agrees_with_a_trie_of_single_blocks() -> None:
    examples = 2000 if os.environ.get("PERDURE_HYPOTHESIS") == "many" else 50
    run_state_machine_as_test(
        RadixMachine, settings=settings(max_examples=examples, stateful_step_count=45, deadline=None)
    )
