"""Concurrent customers of a stack under attack: each asks, reads to the end, and judges its answer at once.

    order ──► Generate ──► Accepted ──► chunks ──► finish ──► judged ──► replayed at the next checkpoint
                              └── from here on the request must end, whatever dies

A request that was accepted and did not end as it must is a violation: lost, hung, wrong, doubled, ended with an error.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from ops.chaos.mix import SALTS, Item, Mix, Order
from ops.chaos.models import Oracle, Subject
from ops.client import Client, RequestRejected, ServiceAway, Stream, connected, new_id
from shared.messages.base import pack_u32, unpack_u32
from shared.messages.front import Finish, Generate, Sampling
from shared.model.toy import toy_decode
from shared.paths import Places
from shared.peers import ProtocolViolation, RequestFailed

ORDERS_A_CLIENT = 8
"""Then a customer connects anew."""
REFUSALS = frozenset({"deadline"})
"""Codes with which a stack under attack may refuse a request that it has not accepted. (`overloaded` because a service
is away is no refusal: the client sends again.)
"""
NO_ROOM = re.compile(r"free some space|No space left|injected fault at (journal_before_accept|scheduler_before_step)")
"""Why a stack may refuse a request as overloaded: it could not keep the promise."""
ENDS: dict[str, frozenset[str]] = {
    "cancel": frozenset({"length", "cancelled"}),
    "deadline": frozenset({"length", "deadline"}),
}


@dataclass(frozen=True)
class Violation:
    """A broken promise, for people."""

    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.what}: {self.detail}"


@dataclass
class Record:
    """One request as its customer saw it."""

    order: Order
    id: str
    lives: int
    accepted: bool = False
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None

    def __str__(self) -> str:
        return f"request {self.id} ({self.order.kind} #{self.order.number}, {len(self.order.item.ids)} prompt tokens)"


@dataclass
class Totals:
    """What all customers together have seen."""

    requests: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    accepted: int = 0
    retries: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached: Counter[str] = field(default_factory=Counter)
    replayed: int = 0


class Customers:
    """Runs `subject.customers` of them while the gate is open. `lives` tells how often services have been started."""

    def __init__(
        self, places: Places, subject: Subject, oracle: Oracle, mix: Mix, lives: Callable[[Places], int]
    ) -> None:
        self.places = places
        self.subject = subject
        self.oracle = oracle
        self.mix = mix
        self.violations: list[Violation] = []
        self.totals = Totals()
        self.accepted: list[str] = []
        """Ids of all accepted requests, for the ledger."""
        self.unseen: list[Record] = []
        """Judged, but not yet replayed."""
        self._lives = lives
        self._gate = trio.Event()
        self._busy = 0
        self._idle = trio.Event()
        self._leaving = False

    # --- the gate -------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Lets the customers in."""
        self._gate.set()

    async def close(self) -> None:
        """Lets nobody in, and waits until all who are inside are done and have hung up."""
        self._gate = trio.Event()
        while self._busy:
            self._idle = trio.Event()
            await self._idle.wait()

    def send_home(self) -> None:
        """They leave; call after `close`."""
        self._leaving = True
        self._gate.set()

    async def run(self) -> None:
        """Returns once they have left."""
        async with trio.open_nursery() as nursery:
            for _ in range(self.subject.customers):
                nursery.start_soon(self._customer)

    async def _customer(self) -> None:
        while True:
            await self._gate.wait()
            if self._leaving:
                return
            self._busy += 1
            try:
                async with connected(self.places, recovery_timeout_s=self.subject.patience_s) as client:
                    for _ in range(ORDERS_A_CLIENT):
                        await self._serve(client, next(self.mix))
                        if not self._gate.is_set():
                            break
            finally:
                self._busy -= 1
                self._idle.set()

    async def alone(self, item: Item) -> int | None:
        """One plain request, judged like all others, while the gate is closed: its cached tokens, None if it failed."""
        before = len(self.unseen)
        async with connected(self.places, recovery_timeout_s=self.subject.patience_s) as client:
            await self._serve(client, Order(0, "plain", item))
        if len(self.unseen) == before or (finish := self.unseen[-1].finish) is None:
            return None
        return finish.usage.cached_tokens

    # --- one request ----------------------------------------------------------------------------------------------

    async def _serve(self, client: Client, order: Order) -> None:
        request = Generate(
            id=new_id(),
            ids=pack_u32(list(order.item.ids)),
            sampling=Sampling(max_tokens=order.item.tokens, temperature=0.0, ignore_eos=True),
            cache_salt=order.salt,
            no_store=order.no_store,
            no_read=order.no_read,
            detached=order.detached,
            deadline_s=order.deadline_s,
        )
        record = Record(order, request.id, self._lives(self.places))
        self.totals.requests[order.kind] += 1
        with trio.move_on_after(self.subject.patience_s) as patience:
            try:
                await self._ask(client, request, record)
            except RequestRejected as refused:
                code = refused.rejected.code
                may = code in REFUSALS or (code == "overloaded" and NO_ROOM.search(refused.rejected.reason))
                if record.accepted or not may:
                    self.violate("lost" if record.accepted else "refused", f"{record}: {refused}")
                self.totals.refused[code] += 1
            except (ServiceAway, RequestFailed, ProtocolViolation) as error:
                self.violate("lost", f"{record}: {error!r}")
        if record.accepted:
            self.accepted.append(record.id)
        if patience.cancelled_caught:
            state = "accepted" if record.accepted else "never accepted"
            self.violate("hung", f"{record}, {state}, {len(record.ids)} tokens after {self.subject.patience_s:.0f} s")
        elif record.finish is not None:
            self._judge(record, record.finish)

    async def _ask(self, client: Client, request: Generate, record: Record) -> None:
        if request.detached:
            patience_s = self.subject.patience_s
            async with (
                connected(self.places, recovery_timeout_s=patience_s) as other,
                other.generate(request) as stream,
            ):
                await stream.accepted()
                self._accepted(record, stream)
            async with client.follow(request.id) as stream:
                await self._read(stream, record)
            return
        async with client.generate(request) as stream:
            await stream.accepted()
            self._accepted(record, stream)
            await self._read(stream, record, until=record.order.cancel_after)
        if record.finish is None:  # walked away: whatever came since belongs to it, too
            async with client.follow(request.id, start=len(record.ids)) as stream:
                await self._read(stream, record)

    def _accepted(self, record: Record, stream: Stream) -> None:
        record.accepted = True
        if stream.prompt_tokens != len(record.order.item.ids):
            self.violate("wrong usage", f"{record}: accepted as {stream.prompt_tokens} prompt tokens")

    async def _read(self, stream: Stream, record: Record, until: int = 0) -> None:
        async for chunk in stream:
            ids = list(unpack_u32(chunk.ids))
            if chunk.start != len(record.ids) or chunk.end != chunk.start + len(ids):
                span = f"[{chunk.start}, {chunk.end}) with {len(ids)} ids"
                self.violate("gap or doubled token", f"{record}: {span} after {len(record.ids)}")
            record.ids += ids
            record.text += chunk.text
            record.finish = chunk.finish
            if until and len(record.ids) >= until and chunk.finish is None:
                break
        self.totals.retries += stream.retries

    # --- judging --------------------------------------------------------------------------------------------------

    def violate(self, what: str, detail: str) -> None:
        """Notes a broken promise."""
        self.violations.append(Violation(what, detail))

    def _judge(self, record: Record, finish: Finish) -> None:
        order, usage, totals = record.order, finish.usage, self.totals
        totals.accepted += 1
        totals.ends[finish.reason] += 1
        totals.tokens += len(record.ids)
        totals.prompt_tokens += usage.prompt_tokens
        totals.cached.update(usage.cached_by_tier)
        if finish.reason not in ENDS.get(order.kind, frozenset({"length"})):
            self.violate("wrong end", f"{record}: {finish.reason} {finish.error or ''}")
        whole = finish.reason == "length"
        verdict = self.oracle.verdict(order.item, record.ids, whole=whole)
        if not verdict.equal:
            self.violate("wrong tokens", f"{record}: {verdict}; {len(record.ids)} of {order.item.tokens} tokens")
        if whole and self.subject.strict and record.text != toy_decode(record.ids):
            self.violate("wrong text", f"{record}: {record.text!r}")
        counts = (usage.prompt_tokens, usage.completion_tokens)
        if counts != (len(order.item.ids), len(record.ids)):
            self.violate("wrong usage", f"{record}: {usage} for {len(record.ids)} tokens")
        cached = usage.cached_tokens
        if cached != sum(usage.cached_by_tier.values()) or not 0 <= cached < max(usage.prompt_tokens, 1):
            self.violate("wrong usage", f"{record}: {usage}")
        if cached and record.lives == self._lives(
            self.places
        ):  # else it may have met what it saved itself before a restart
            if order.no_read:
                self.violate("no_read was read", f"{record}: {usage}")
            if order.salt is not None and order.salt not in SALTS:
                self.violate("a salt was shared", f"{record}: {usage}")
        self.unseen.append(record)

    async def replay(self) -> None:
        """Follows every request judged since the last time once more from its first token: same tokens, same end."""
        records, self.unseen = self.unseen, []
        async with connected(self.places, recovery_timeout_s=self.subject.patience_s) as client:
            for record in records:
                with trio.move_on_after(self.subject.patience_s) as patience:
                    try:
                        async with client.follow(record.id) as stream:
                            result = await stream.result()
                    except (RequestRejected, RequestFailed, ServiceAway, ProtocolViolation) as error:
                        self.violate("lost", f"{record}, followed again: {error!r}")
                        continue
                    if (list(result.ids), result.text) != (record.ids, record.text) or result.finish != record.finish:
                        seen = f"{len(record.ids)} tokens, {record.finish}"
                        self.violate("changed", f"{record}: {seen}; again {len(result.ids)} tokens, {result.finish}")
                    self.totals.replayed += 1
                if patience.cancelled_caught:
                    self.violate("hung", f"{record}, followed again")
