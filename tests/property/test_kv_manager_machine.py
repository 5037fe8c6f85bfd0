"""The KV manager against memory: every block that a request may read holds exactly that request's tokens, always.

The model writes into `memory[block]` what the worker would compute there (the namespace and all tokens up to the
block's end), at once for a step and at the end of the copy for a load. So a block handed out too early, a duplicate
not remapped (W17), an eviction under a copy (W23) or a stale index entry (W16) shows as wrong content.
"""

import os
from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from services.scheduler.kv.block_pool import OwnershipError
from services.scheduler.kv.manager import KVManager
from services.scheduler.kv.sequence import CachedBlock, Sequence
from shared import identity

KEY = b"k" * 32
ROOTS = [b"a" * 32, b"b" * 32]
Content = tuple[bytes, tuple[int, ...]]


@dataclass(eq=False)
class Request:
    root: bytes
    tokens: "array[int]"
    seq: Sequence
    life: int
    read: bool
    store: bool
    computed: int = 0
    loads: set[int] = field(default_factory=set)
    """Blocks of the sequence whose bytes are still on their way."""


@dataclass(eq=False)
class CopyInFlight:
    block: int
    content: Content | None
    load: bool


class ManagerMachine(RuleBasedStateMachine):
    block_tokens = 2

    def __init__(self) -> None:
        super().__init__()
        self.kv: KVManager
        self.memory: dict[int, Content] = {}
        self.live: list[Request] = []
        self.copies: list[CopyInFlight] = []
        self.cached: dict[tuple[Content, int], int] = {}
        """Content and life of its namespace -> block, of everything that was published and is still held."""
        self.lives = dict.fromkeys(ROOTS, 0)
        self.store: set[bytes] = set()

    @initialize(blocks=st.integers(1, 14), prefix_cache=st.sampled_from([True, True, True, False]))
    def make(self, blocks: int, prefix_cache: bool) -> None:
        self.kv = KVManager(blocks, self.block_tokens, KEY, prefix_cache=prefix_cache)

    def content(self, request: Request, index: int) -> Content:
        return request.root, tuple(request.tokens[: (index + 1) * self.block_tokens])

    def pick(self, which: int) -> Request:
        return self.live[which % len(self.live)]

    # --- a request's life

    @rule(
        root=st.sampled_from(ROOTS),
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        tail=st.integers(0, 3),
        read=st.sampled_from([True, True, True, False]),
        store=st.sampled_from([True, True, True, False]),
    )
    def open(self, root: bytes, ids: list[int], tail: int, read: bool, store: bool) -> None:
        width = max(1, self.block_tokens // 4)
        tokens = array("I", [i for i in ids for _ in range(width)] + [9] * tail)
        limit = len(tokens) - 1
        peeked = self.kv.match(root, tokens, limit, touch=False)
        seq = self.kv.open(root, tokens, limit, read=read, store=store)
        request = Request(root, tokens, seq, self.lives[root], read, store)
        expected = []
        if read and self.kv.prefix_cache:
            while (len(expected) + 1) * self.block_tokens <= limit:
                block = self.cached.get((self.content(request, len(expected)), request.life))
                if block is None:
                    break
                expected.append(block)
            assert peeked.blocks == expected
            assert peeked.tokens == len(expected) * self.block_tokens
        assert seq.blocks == expected
        assert seq.cached_blocks == len(expected)
        request.computed = len(expected) * self.block_tokens
        assert request.computed < len(tokens)  # W04: a token is left to compute logits from
        self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), more=st.integers(1, 9))
    def compute(self, which: int, more: int) -> None:
        """A step: own the blocks, write them, publish what is full. A decode lengthens the tokens."""
        request = self.pick(which)
        if request.loads:
            return
        target = request.computed + more * max(1, self.block_tokens // 3)
        while len(request.tokens) < target:
            request.tokens.append(len(request.tokens) % 2)
        if not self.grow(request, target):
            return
        for index in range(request.computed // self.block_tokens, -(-target // self.block_tokens)):
            assert index >= request.seq.cached_blocks, "a step would write into a block of the tree"
            self.memory[request.seq.blocks[index]] = self.content(request, index)
        request.computed = target
        self.publish(request, self.kv.publish(request.seq, request.tokens, request.computed))

    def grow(self, request: Request, target: int) -> bool:
        before, had = self.kv.statistics(), len(request.seq.blocks)
        needed = max(0, -(-target // self.block_tokens) - had)
        grown = self.kv.grow(request.seq, target)
        assert grown == (needed <= before.free + before.cached)
        now = self.kv.statistics()
        assert now.evicted - before.evicted == (max(0, needed - before.free) if grown else 0)
        if grown:
            taken = request.seq.blocks[had:]
            assert not {copy.block for copy in self.copies} & set(taken), "a block with a copy in flight was given away"
            gone = [key for key, block in self.cached.items() if block in set(taken)]
            for key in gone:
                del self.cached[key]
        self.cached = {key: block for key, block in self.cached.items() if self.kv._tree.holds(block)}
        return grown

    def publish(self, request: Request, new: list[CachedBlock]) -> None:
        full = request.computed // self.block_tokens
        if not request.store or not self.kv.prefix_cache or request.life != self.lives[request.root]:
            assert new == []
            return
        names = identity.chain(KEY, request.root, request.tokens.tobytes(), self.block_tokens)
        chain = [request.root, *names]
        expected = [i for i in range(full) if (self.content(request, i), request.life) not in self.cached]
        assert [block.index for block in new] == expected
        for block in new:
            assert (block.parent, block.identity) == (chain[block.index], chain[block.index + 1])
            assert self.memory[block.block] == self.content(request, block.index)
            self.cached[self.content(request, block.index), request.life] = block.block
        if request.seq.closed:
            return
        assert request.seq.cached_blocks == full
        for index in range(full):
            assert request.seq.blocks[index] == self.cached[self.content(request, index), request.life]

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def close(self, which: int) -> None:
        """Finished, cancelled or retracted, also in the middle of a load."""
        request = self.pick(which)
        self.live.remove(request)
        self.publish(request, self.kv.close(request.seq, request.tokens, request.computed))
        with pytest.raises(OwnershipError):
            self.kv.close(request.seq, request.tokens, request.computed)
        self.cached = {key: block for key, block in self.cached.items() if self.kv._tree.holds(block)}

    # --- copies

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), count=st.integers(1, 4))
    def load(self, which: int, count: int) -> None:
        """Blocks behind the hit start to arrive from the store."""
        request = self.pick(which)
        first = request.seq.cached_blocks
        end = min(first + count, (len(request.tokens) - 1) // self.block_tokens)
        if request.loads or request.computed != first * self.block_tokens or end <= first:
            return
        if not self.grow(request, end * self.block_tokens):
            return
        for index in range(first, end):
            block = request.seq.blocks[index]
            self.kv.pin(block)
            request.loads.add(block)
            self.copies.append(CopyInFlight(block, self.content(request, index), load=True))

    @precondition(lambda self: self.cached)
    @rule(which=st.integers(0, 99))
    def save(self, which: int) -> None:
        (content, _), block = list(self.cached.items())[which % len(self.cached)]
        if self.kv._tree.holds(block):
            self.kv.pin(block)
            self.copies.append(CopyInFlight(block, content, load=False))

    @precondition(lambda self: any(request.seq.blocks[request.seq.cached_blocks :] for request in self.live))
    @rule(which=st.integers(0, 99))
    def copy_own(self, which: int) -> None:
        """A copy out of a block that a request still owns: it may be published, or a duplicate, before it ends."""
        own = [block for request in self.live for block in request.seq.blocks[request.seq.cached_blocks :]]
        block = own[which % len(own)]
        self.kv.pin(block)
        self.copies.append(CopyInFlight(block, None, load=False))

    @precondition(lambda self: self.copies)
    @rule(which=st.integers(0, 99))
    def copy_ends(self, which: int) -> None:
        copy = self.copies.pop(which % len(self.copies))
        if copy.load:
            self.memory[copy.block] = copy.content
        elif copy.content is not None:
            assert self.memory[copy.block] == copy.content, "a save copied bytes that changed under it"
            name = list(identity.chain(KEY, copy.content[0], array("I", copy.content[1]).tobytes(), self.block_tokens))[
                -1
            ]
            self.store.add(name)
            self.kv.mark_saved(copy.block, name)
        self.kv.unpin(copy.block)
        for request in self.live:
            if copy.load and copy.block in request.loads:
                request.loads.remove(copy.block)
                if not request.loads:
                    request.computed = len(request.seq.blocks) * self.block_tokens
                    new = self.kv.attach(request.seq, request.tokens, request.computed)
                    self.store.update(block.identity for block in new)
                    assert all(self.kv.is_saved(block.block) for block in new)
                    self.publish(request, new)
        self.cached = {key: block for key, block in self.cached.items() if self.kv._tree.holds(block)}

    # --- the whole

    @rule(root=st.sampled_from([*ROOTS, None]))
    def clear(self, root: bytes | None) -> None:
        gone = {key: b for key, b in self.cached.items() if root is None or key[0][0] == root}
        current = [key for key in gone if key[1] == self.lives[key[0][0]]]
        assert self.kv.clear(lambda each: root in (None, each)) == len(current)
        for name in ROOTS if root is None else [root]:
            self.lives[name] += 1
        self.cached = {key: block for key, block in self.cached.items() if self.kv._tree.holds(block)}

    @invariant()
    def every_readable_block_holds_what_it_should(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        owners: dict[int, Request] = {}
        for request in self.live:
            seq = request.seq
            for index in range(-(-request.computed // self.block_tokens)):
                held = self.memory[seq.blocks[index]]
                wanted = self.content(request, index)
                assert held == wanted or index == request.computed // self.block_tokens
                assert held[0] == wanted[0]
                assert held[1][: request.computed] == wanted[1][: request.computed]
            for block in seq.blocks[seq.cached_blocks :]:
                assert owners.setdefault(block, request) is request, "two requests own one block"
        for (content, _), block in self.cached.items():
            assert self.memory[block] == content
        saved = {block for block in range(self.kv.total) if self.kv.is_saved(block)}
        for block in saved:
            assert self.kv._tree.identity(block) in self.store

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        while self.copies:
            self.copy_ends(0)
        while self.live:
            self.close(0)
        self.kv.check_integrity()
        now = self.kv.statistics()
        assert now.locked == 0
        assert now.free + now.cached == now.total
        assert self.kv.prefix_cache or now.free == now.total  # A02
        self.kv.clear()
        assert self.kv.statistics().free == now.total


@pytest.mark.parametrize("block_tokens", [1, 2, 16, 128])
def test_w16_w17_w23_a01_a02_every_block_holds_its_own_tokens(block_tokens: int) -> None:
    machine = type(f"Machine{block_tokens}", (ManagerMachine,), {"block_tokens": block_tokens})
    examples = 2000 if os.environ.get("PERDURE_HYPOTHESIS") == "many" else 40
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=50, deadline=None))
