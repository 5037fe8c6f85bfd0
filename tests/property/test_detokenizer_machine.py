"""The detokenizer under random requests, clients, restarts of either side, slow readers and late stops.

The naive model keeps what the scheduler journaled and decodes it from scratch. Whatever happens, each client has a
prefix of the truth, and whoever gets a finish has exactly all of it.
"""

import codecs
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.detokenizer.requests import Answer, Complain, Effect, Requests, ToClient, ToScheduler
from shared.messages.base import pack_u32, unpack_u32
from shared.messages.engine import CancelRequest, Forget, Opening, Progress, StopAt
from shared.messages.front import Attach, Attached, Chunk, Credit, Finish, Rejected, Timing, Usage
from tests.property.test_text import apply_stops

GRACE = 50.0
SPECIAL = 256
PIECES = [*(bytes((byte,)) for byte in "aST é✅".encode()), b"ST", b"OP", b"STOP", b"", "✅".encode(), b"\xff"]
STOPS = st.lists(st.sampled_from(["STOP", "TS", "a", "✅S", " "]), max_size=2, unique=True).map(tuple)


def token_bytes(token: int) -> bytes:
    return b"" if token == SPECIAL else PIECES[token]


@dataclass
class Truth:
    """One request as the scheduler's journal has it."""

    id: str
    stop: tuple[str, ...]
    detached: bool
    tokens: list[int] = field(default_factory=list)
    emitted: int = 0
    finish: Finish | None = None

    def text(self, upto: int, *, whole: bool) -> str:
        """The naive full decode of the first tokens; `whole` with what the end releases."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(b"".join(token_bytes(token) for token in self.tokens[:upto]), final=whole)
        return apply_stops(text, self.stop)[0]

    def stop_at(self) -> int | None:
        """The naive search: after how many tokens is a stop string complete?"""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = ""
        for count, token in enumerate(self.tokens, 1):
            text += decoder.decode(token_bytes(token))
            if apply_stops(text, self.stop)[1]:
                return count
        return None

    def opening(self) -> Opening:
        return Opening(
            principal="me",
            prompt_tokens=1,
            stop=self.stop,
            stop_ids=(SPECIAL,),
            logprobs=False,
            detached=self.detached,
        )


@dataclass
class Reader:
    """One client and what it has of one request."""

    request: str
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    attached: bool = False


class Detokenizing(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.truths: dict[str, Truth] = {}
        self.readers: dict[int, Reader] = {}
        self.stops: list[StopAt] = []
        self.lossy = False
        self.connected = False
        self.opened = 0
        self.books = Requests(token_bytes, grace_s=GRACE)
        self.scheduler_returns()

    # --- carrying effects out

    def carry(self, effects: list[Effect]) -> None:
        blocked: set[object] = set()
        for effect in effects:
            match effect:
                case ToClient(client=int() as client, message=Chunk() as chunk):
                    if self.lossy or (client, chunk.id) in blocked:  # once full, all that follows is full
                        blocked.add((client, chunk.id))
                        self.books.unsent(client, chunk)
                    else:
                        self.read(self.readers[client], chunk)
                case (
                    ToClient(client=int() as client, message=Rejected())
                    | Answer(client=int() as client, message=Rejected())
                ):
                    self.readers[client].attached = False
                case Answer(client=int() as client, message=Attached()):
                    self.readers[client].attached = True
                case ToScheduler(message=StopAt() as stop):
                    assert stop.at == self.truths[stop.id].stop_at()
                    self.stops.append(stop)
                case ToScheduler(message=CancelRequest() as cancel):
                    assert not self.truths[cancel.id].detached
                    assert not any(reader.attached and reader.request == cancel.id for reader in self.readers.values())
                case ToScheduler(message=Credit()):
                    pass
                case Complain(reason=reason):
                    raise AssertionError(reason)
                case _:
                    raise AssertionError(effect)

    def read(self, reader: Reader, chunk: Chunk) -> None:
        assert reader.attached
        assert chunk.start == len(reader.ids)
        ids = unpack_u32(chunk.ids).tolist()
        assert chunk.end - chunk.start == len(ids)
        reader.ids += ids
        reader.text += chunk.text
        truth = self.truths[reader.request]
        assert reader.ids == truth.tokens[: len(reader.ids)]
        if chunk.finish is None:
            assert ids, "a chunk without news"
            assert reader.text == truth.text(len(reader.ids), whole=False)[: len(reader.text)]
            return
        assert reader.finish is None
        reader.finish, reader.attached = chunk.finish, False
        assert truth.finish is not None
        at = truth.stop_at()
        if at is not None and at <= truth.finish.usage.completion_tokens:
            assert (len(reader.ids), chunk.finish.reason) == (at, "stop")
        else:
            assert len(reader.ids) == truth.finish.usage.completion_tokens
            assert chunk.finish == truth.finish
        assert chunk.finish.usage.completion_tokens == len(reader.ids)
        assert reader.text == truth.text(len(reader.ids), whole=True)

    def emit(self, truth: Truth, *, replay: bool = False) -> None:
        start = 0 if replay else truth.emitted
        ids = pack_u32(truth.tokens[start:])
        opening = truth.opening() if replay or start == 0 else None
        truth.emitted = len(truth.tokens)
        message = Progress(id=truth.id, start=start, ids=ids, opening=opening, finish=truth.finish)
        self.carry(self.books.progress(message, self.now))

    # --- the scheduler

    @rule(stop=STOPS, detached=st.booleans())
    def open(self, stop: tuple[str, ...], detached: bool) -> None:
        if self.connected and len(self.truths) < 4:
            self.opened += 1
            truth = self.truths[f"{self.opened:032x}"] = Truth(f"{self.opened:032x}", stop, detached)
            self.emit(truth)

    @rule(
        which=st.integers(0, 9),
        tokens=st.lists(st.one_of(st.integers(0, len(PIECES) - 1), st.just(SPECIAL)), min_size=1, max_size=6),
        told=st.booleans(),
    )
    def draw(self, which: int, tokens: list[int], told: bool) -> None:
        """Journals tokens; when they are not told, the next restart or drawing tells them."""
        live = [truth for truth in self.truths.values() if truth.finish is None]
        if self.connected and live:
            truth = live[which % len(live)]
            truth.tokens += tokens
            if told:
                self.emit(truth)

    @rule(which=st.integers(0, 9), reason=st.sampled_from(["length", "cancelled", "deadline", "error"]))
    def finish(self, which: int, reason: str) -> None:
        live = [truth for truth in self.truths.values() if truth.finish is None]
        if self.connected and live:
            self.end(live[which % len(live)], reason)

    def end(self, truth: Truth, reason: str) -> None:
        usage = Usage(prompt_tokens=1, completion_tokens=len(truth.tokens), cached_tokens=0, cached_by_tier={})
        timing = Timing(queued_s=0, ttft_s=0, total_s=0)
        truth.finish = Finish(reason=reason, usage=usage, timing=timing)  # type: ignore[arg-type]
        self.emit(truth)

    @rule()
    def hear_of_a_stop(self) -> None:
        """The scheduler may hear late: it has drawn more, or ended the request, or forgotten it."""
        if self.connected and self.stops:
            stop = self.stops.pop(0)
            truth = self.truths.get(stop.id)
            if truth is not None and truth.finish is None:
                usage = Usage(prompt_tokens=1, completion_tokens=stop.at, cached_tokens=0, cached_by_tier={})
                truth.finish = Finish(reason="stop", usage=usage, timing=Timing(queued_s=0, ttft_s=0, total_s=0))
                self.emit(truth)

    @rule(which=st.integers(0, 9))
    def forget(self, which: int) -> None:
        over = [truth for truth in self.truths.values() if truth.finish is not None]
        over = [t for t in over if not any(reader.request == t.id for reader in self.readers.values())]
        if self.connected and over:
            truth = over[which % len(over)]
            self.books.forget(Forget(id=truth.id), self.now)
            self.carry(self.books.tick(self.now))
            del self.truths[truth.id]

    @rule()
    def scheduler_restarts(self) -> None:
        self.connected = False
        self.books.scheduler_down()
        self.scheduler_returns()

    def scheduler_returns(self) -> None:
        self.stops.clear()
        self.carry(self.books.scheduler_up())
        for truth in self.truths.values():
            self.emit(truth, replay=True)
        self.carry(self.books.synced(self.now))
        self.connected = True

    @rule()
    def detokenizer_restarts(self) -> None:
        self.books = Requests(token_bytes, grace_s=GRACE)
        for reader in self.readers.values():
            reader.attached = False
        self.scheduler_returns()

    # --- clients

    @rule(which=st.integers(0, 9), who=st.integers(0, 4), credit=st.integers(1, 3))
    def attach(self, which: int, who: int, credit: int) -> None:
        """A client comes, or comes again from the token where it was; a finished one begins anew."""
        reader = self.readers.get(who)
        if reader is None or reader.finish is not None:
            if not self.truths:
                return
            reader = self.readers[who] = Reader(sorted(self.truths)[which % len(self.truths)])
        message = Attach(id=reader.request, start=len(reader.ids), credit=credit)
        self.carry(self.books.attach(who, "me", message, who, self.now))

    @rule(who=st.integers(0, 4), chunks=st.integers(1, 3))
    def credit(self, who: int, chunks: int) -> None:
        if who in self.readers and self.readers[who].attached:
            self.carry(self.books.credit(who, Credit(id=self.readers[who].request, chunks=chunks)))

    @rule(who=st.integers(0, 4), for_good=st.booleans())
    def leave(self, who: int, for_good: bool) -> None:
        if who in self.readers:
            self.books.gone(who, self.now)
            self.readers[who].attached = False
            if for_good:
                del self.readers[who]

    @rule(lossy=st.booleans())
    def queues_fill_or_empty(self, lossy: bool) -> None:
        self.lossy = lossy

    @rule(seconds=st.floats(0, 60))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.carry(self.books.tick(self.now))

    # --- what always holds

    @invariant()
    def books_are_in_order(self) -> None:
        self.books.check_integrity()

    def teardown(self) -> None:
        """In the end everybody who asks gets all of it."""
        if not hasattr(self, "books"):
            return
        self.lossy = False
        for truth in self.truths.values():
            if truth.finish is None:
                self.end(truth, "length")
        for who, reader in self.readers.items():
            if reader.finish is None:
                attach = Attach(id=reader.request, start=len(reader.ids), credit=64)
                self.carry(self.books.attach(who, "me", attach, who, self.now))
                assert reader.finish is not None


TestDetokenizing = Detokenizing.TestCase
