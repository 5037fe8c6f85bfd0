"""The allocator of disk slots against plain sets."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.store.disk.footer import SLOT_BITS
from services.store.disk.slot_space import HOLE, SPENT, UNKNOWN, USED, SlotSpace

SIZES = [8192, 12288]


class SlotSpaceMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.space = SlotSpace()
        self.size_of: dict[int, int] = {}
        self.model: dict[int, int] = {}

    @rule(size=st.sampled_from(SIZES), slots=st.integers(1, 12), unknown=st.booleans())
    def add(self, size: int, slots: int, unknown: bool) -> None:
        number = len(self.space.segments)
        state = UNKNOWN if unknown else HOLE
        self.space.add(number, size, bytearray((state,)) * slots)
        for index in range(slots):
            self.model[number << SLOT_BITS | index] = state
            self.size_of[number << SLOT_BITS | index] = size

    @rule(size=st.sampled_from(SIZES), count=st.integers(1, 9), data=st.data())
    def allocate(self, size: int, count: int, data: st.DataObject) -> None:
        after = data.draw(st.sampled_from([None, *sorted(self.model)]))
        free = {s for s, state in self.model.items() if state in (HOLE, SPENT) and self.size_of[s] == size}
        spent = {slot for slot in free if self.model[slot] == SPENT}
        taken = self.space.allocate(size, count, after)
        assert len(taken) == len(set(taken)) == min(count, len(free))
        assert set(taken) <= free
        assert len(set(taken) & spent) == min(count, len(spent))  # no new space while there is room without
        if after is not None and not spent and after + 1 in free:
            assert taken[0] == after + 1
        self.model.update(dict.fromkeys(taken, USED))

    @precondition(lambda self: USED in self.model.values())
    @rule(data=st.data(), state=st.sampled_from([HOLE, SPENT, UNKNOWN]))
    def free(self, data: st.DataObject, state: int) -> None:
        slot = data.draw(st.sampled_from(sorted(s for s, held in self.model.items() if held == USED)))
        self.space.set(slot, state)
        self.model[slot] = state

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        known = st.sampled_from(sorted(self.model))
        slots = data.draw(st.lists(known | st.sampled_from([3 << SLOT_BITS | 99, 98 << SLOT_BITS]), max_size=20))
        claimed = self.space.claim(np.array(slots, np.uint32)).tolist()
        for slot, mine in zip(slots, claimed, strict=True):
            assert mine == (self.model.get(slot) == UNKNOWN)
            if mine:
                self.model[slot] = USED

    @precondition(lambda self: self.space.segments)
    @rule()
    def disown(self) -> None:
        for segment in self.space.segments.values():
            segment.disown()
        self.model = {slot: UNKNOWN if state == USED else state for slot, state in self.model.items()}

    @invariant()
    def agrees(self) -> None:
        self.space.check_integrity()
        assert all(self.space.state(slot) == state for slot, state in self.model.items())
        for state in (HOLE, USED, UNKNOWN, SPENT):
            assert self.space.count(state) == list(self.model.values()).count(state)
        for size in SIZES:
            spent = [s for s, state in self.model.items() if state == SPENT and self.size_of[s] == size]
            assert self.space.spent(size) == len(spent)
        assert self.space.state(99 << SLOT_BITS) is None


TestSlotSpace = SlotSpaceMachine.TestCase


def test_a_run_is_taken_whole_where_there_is_one() -> None:
    space = SlotSpace()
    space.add(0, 8192, bytearray([HOLE, USED, HOLE, HOLE, USED, HOLE, HOLE, HOLE, HOLE]))
    assert space.allocate(8192, 4) == [5, 6, 7, 8]
    assert space.allocate(8192, 3) == [0, 2, 3] or space.count(HOLE) == 0
