"""The block pool against sets: each block has one owner, counts are sums, nothing is ever freed under a copy."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.kv.block_pool import COPY, FREE, REQUEST, TREE, BlockPool, OutOfBlocks, OwnershipError

TOTAL = 9


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.owner = dict.fromkeys(range(TOTAL), FREE)
        self.pins = dict.fromkeys(range(TOTAL), 0)

    def owned_by(self, owner: int) -> list[int]:
        return [block for block, o in self.owner.items() if o == owner]

    @rule(count=st.integers(0, TOTAL + 1))
    def allocate(self, count: int) -> None:
        free = self.owned_by(FREE)
        if count > len(free):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        taken = self.pool.allocate(count)
        assert len(set(taken)) == count
        assert set(taken) <= set(free)
        self.owner.update(dict.fromkeys(taken, REQUEST))

    @rule(block=st.integers(0, TOTAL - 1))
    def take(self, block: int) -> None:
        self.expecting(self.owner[block] == FREE, lambda: self.pool.take(block))
        if self.owner[block] == FREE:
            self.owner[block] = REQUEST

    @rule(block=st.integers(0, TOTAL - 1))
    def adopt(self, block: int) -> None:
        self.expecting(self.owner[block] == REQUEST, lambda: self.pool.adopt([block]))
        if self.owner[block] == REQUEST:
            self.owner[block] = TREE

    @rule(block=st.integers(0, TOTAL - 1), owner=st.sampled_from([REQUEST, TREE]))
    def release(self, block: int, owner: int) -> None:
        self.expecting(self.owner[block] == owner, lambda: self.pool.release([block], owner))
        if self.owner[block] == owner:
            self.owner[block] = COPY if self.pins[block] else FREE

    @rule(block=st.integers(0, TOTAL - 1))
    def pin(self, block: int) -> None:
        self.expecting(self.owner[block] != FREE, lambda: self.pool.pin(block))
        self.pins[block] += self.owner[block] != FREE

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b, pins in self.pins.items() if pins]))
        self.pool.unpin(block)
        self.pins[block] -= 1
        if self.owner[block] == COPY and not self.pins[block]:
            self.owner[block] = FREE

    def expecting(self, allowed: bool, action) -> None:
        if allowed:
            action()
        else:
            with pytest.raises(OwnershipError):
                action()

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        assert [self.pool.owner(b) for b in range(TOTAL)] == list(self.owner.values())
        now = self.pool.statistics()
        assert now.free + now.request + now.tree + now.copy == now.total == TOTAL
        assert now.pinned == sum(1 for pins in self.pins.values() if pins)


TestPool = PoolMachine.TestCase
