"""The detokenizer's feed against a plain record of what it was sent: nothing lost, nothing out of order, bounded."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.feed import Feed
from shared.messages import Message
from shared.messages.base import pack_u32, unpack_u32
from shared.messages.engine import Forget, Opening, Progress, Synced

IDS = [letter * 32 for letter in "abcde"]


class Full(Exception):
    """The peer's queue takes nothing more."""


class FeedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[str, list[int]] = {}
        self.feed = Feed(self.progress)
        self.told: dict[str, list[int]] = {}
        self.synced = False
        self.given = self.used = 0
        self.room = 0
        self.fresh: set[str] = set()
        """Accepted since the connection was made: told after Synced perhaps."""

    def progress(self, id: str, start: int) -> Progress | None:
        if id not in self.outputs:
            return None
        opening = Opening(principal="p", prompt_tokens=1, stop=(), stop_ids=(), logprobs=False, detached=False)
        ids = self.outputs[id][start:]
        return Progress(id=id, start=start, ids=pack_u32(ids), opening=opening if not start else None)

    def send(self, message: Message) -> None:
        if not self.room:
            raise Full
        self.room -= 1
        if isinstance(message, Synced):
            assert not self.synced
            self.synced = True
            assert set(self.told) >= set(self.outputs) - self.fresh
        elif isinstance(message, Forget):
            assert message.id in self.told
            del self.told[message.id]
        else:
            assert isinstance(message, Progress)
            self.used += 1
            assert self.used <= self.given
            known = self.told.setdefault(message.id, [])
            assert message.start <= len(known)
            assert message.opening is not None or known
            known[message.start :] = unpack_u32(message.ids)

    @rule()
    def connect(self) -> None:
        self.told, self.synced, self.given, self.used = {}, False, 0, 0
        self.fresh = set()
        self.feed.connect(list(self.outputs))

    @rule()
    def disconnect(self) -> None:
        self.feed.disconnect()
        assert self.feed.due == 0
        self.told = {}

    @rule(id=st.sampled_from(IDS))
    def submit(self, id: str) -> None:
        if id not in self.outputs:
            self.outputs[id] = []
            self.fresh = self.fresh | {id}
            self.feed.advanced(id)

    @rule(id=st.sampled_from(IDS), count=st.integers(1, 4))
    def draw(self, id: str, count: int) -> None:
        if id in self.outputs:
            self.outputs[id] += range(len(self.outputs[id]), len(self.outputs[id]) + count)
            self.feed.advanced(id)

    @rule(id=st.sampled_from(IDS))
    def forget(self, id: str) -> None:
        if self.outputs.pop(id, None) is not None:
            self.fresh = self.fresh - {id}
            self.feed.forgotten(id)

    @precondition(lambda self: self.feed.connected)
    @rule(credit=st.integers(-1, 3))
    def give(self, credit: int) -> None:
        self.feed.give(credit)
        self.given += max(0, credit)

    @precondition(lambda self: self.feed.connected)
    @rule(room=st.integers(0, 5))
    def flush(self, room: int) -> None:
        self.room = room
        try:
            self.feed.flush(self.send)
        except Full:
            assert not self.room

    @invariant()
    def marks_only(self) -> None:
        assert self.feed.due <= 2 * len(IDS) + 1
        assert self.feed.credit == self.given - self.used or not self.feed.connected

    def teardown(self) -> None:
        if not self.feed.connected:
            self.connect()
        self.feed.give(100)
        self.given += 100
        self.room = 100
        self.feed.flush(self.send)
        assert self.told == self.outputs
        assert self.synced
        assert self.feed.synced
        assert self.feed.due == 0


TestFeed = FeedMachine.TestCase


def test_a_forgotten_request_whose_id_is_used_anew_begins_with_its_opening() -> None:
    sent: list[Message] = []
    opening = Opening(principal="p", prompt_tokens=1, stop=(), stop_ids=(), logprobs=False, detached=False)
    feed = Feed(lambda id, start: Progress(id=id, start=start, ids=pack_u32([1, 2][start:]), opening=opening))
    feed.connect(["a"])
    feed.give(10)
    feed.flush(sent.append)
    feed.forgotten("a")
    feed.advanced("a")
    feed.flush(sent.append)
    assert [type(message) for message in sent] == [Progress, Synced, Forget, Progress]
    assert [message.start for message in sent if isinstance(message, Progress)] == [0, 0]


def test_what_a_full_peer_does_not_take_is_made_again_and_costs_no_credit() -> None:
    feed = Feed(lambda id, start: Progress(id=id, start=start, ids=b""))
    feed.connect(["a"])
    feed.give(1)

    def full(_: Message) -> None:
        raise Full

    with pytest.raises(Full):
        feed.flush(full)
    assert feed.credit == 1
    assert feed.due == 2
