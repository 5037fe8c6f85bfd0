"""The scheduler's counterparts, played by hand over real sockets: tokenizer, worker, detokenizer, store."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import trio

from services.scheduler.actor import Scheduler
from shared.config import Config, KVConfig, SchedulerConfig, StoreConfig
from shared.messages import Head, Message
from shared.messages.base import pack_u32, unpack_u32
from shared.messages.engine import (
    Idle,
    Journaled,
    KVFacts,
    Plan,
    Progress,
    Quiesce,
    Result,
    RowResult,
    SampleSpec,
    Submit,
    Synced,
    Transfer,
    WorkerReady,
)
from shared.messages.front import Credit, Finish, Rejected
from shared.messages.hello import Snapshot, Status
from shared.paths import Places
from shared.peers import Peer
from shared.testing import TestPeer, dialled, running
from tests.plan_rows import PlanRows, after, fed

B = 4
M = TypeVar("M", bound=Message)
CONFIG = Config(
    scheduler=SchedulerConfig(step_tokens=64, burst_s=0.0, result_ttl_s=60.0, store_wait_s=0.0),
    store=StoreConfig(),
    kv=KVConfig(),
)
FACTS = KVFacts(
    fingerprint=b"f" * 32, block_tokens=B, block_bytes=256, blocks=32, kv_dtype="fp32", layers=1, kv_heads=1, head_dim=8
)


def a_submit(id: str, prompt: list[int], max_tokens: int = 3, **fields: Any) -> Submit:
    defaults: dict[str, Any] = {
        "principal": "local",
        "sample": SampleSpec(),
        "seeded": True,
        "digest": id[:1].encode() * 32,
    }
    return Submit(id=id, ids=pack_u32(prompt), max_tokens=max_tokens, **(defaults | fields))


def next_token(position: int) -> int:
    """What the played worker draws as the token at `position`: told apart by position alone."""
    return 1000 + position


def expected(prompt: list[int], count: int) -> list[int]:
    return [next_token(len(prompt) + i) for i in range(count)]


def result_of(plan: Plan) -> Result:
    rows = []
    for row in (after(row, step) for step in range(plan.steps) for row in plan.rows):
        end = row.start + fed(row)
        rows.append(RowResult(row.key, next_token(end) if row.sample is not None else -1))
    return Result(epoch=plan.epoch, seq=plan.seq, rows=tuple(rows), forward_s=0.0)


class PlayedWorker:
    """Answers Quiesce; `step` answers one plan, `run` all of them until cancelled. Plans are noted with whole rows,
    transfers in `transfers`.
    """

    def __init__(self, node: TestPeer, peer: Peer) -> None:
        self.node, self.peer = node, peer
        self.plans: list[Plan] = []
        self.transfers: list[Transfer] = []
        self.epochs: list[int] = []
        self.rows = PlanRows()

    async def introduce(self, facts: KVFacts = FACTS, max_context: int = 512) -> None:
        self.peer.send(
            WorkerReady(
                model="played",
                architecture="none",
                vocab=5000,
                max_context=max_context,
                backend="none",
                numerics="none",
                kv=facts,
                limits={},
            )
        )
        _, head, quiesce = await self.node.receive_request()
        assert isinstance(quiesce, Quiesce)
        self.epochs.append(quiesce.epoch)
        self.rows = PlanRows()
        self.node.answer(self.peer, head, Idle(epoch=quiesce.epoch))

    async def plan(self) -> Plan:
        """The next plan; transfers before it are noted."""
        while True:
            _, _, message = await self.node.receive_request()
            if isinstance(message, Plan):
                self.plans.append(self.rows.whole(message))
                return self.plans[-1]
            assert isinstance(message, Transfer)
            self.transfers.append(message)

    async def step(self) -> Plan:
        plan = await self.plan()
        self.peer.send(result_of(plan))
        return plan

    async def run(self) -> None:
        while True:
            await self.step()


@dataclass
class Story:
    """What a detokenizer was told of one request."""

    tokens: list[int] = field(default_factory=list)
    openings: int = 0
    messages: int = 0
    finish: Finish | None = None


class PlayedDetokenizer:
    """Gives credit, puts tokens in place by index, refuses contradictions."""

    def __init__(self, node: TestPeer, peer: Peer) -> None:
        self.node, self.peer = node, peer
        self.stories: dict[str, Story] = {}
        self.synced = False

    def credit(self, chunks: int) -> None:
        self.peer.send(Credit(chunks=chunks))

    async def one(self) -> Message:
        message: Message = await self.node.receive()
        if isinstance(message, Synced):
            assert not self.synced
            self.synced = True
        elif isinstance(message, Progress):
            story = self.stories.setdefault(message.id, Story())
            story.messages += 1
            story.openings += message.opening is not None
            assert story.openings, "tokens before the opening"
            assert message.start <= len(story.tokens), "a gap"
            ids = list(unpack_u32(message.ids))
            known = story.tokens[message.start : message.start + len(ids)]
            assert ids[: len(known)] == known, "other tokens than before"
            story.tokens[message.start :] = ids
            story.finish = message.finish or story.finish
        return message

    async def until(self, holds: Callable[[], object]) -> None:
        with trio.fail_after(10):
            while not holds():
                await self.one()

    def tokens_of(self, id: str) -> list[int]:
        return self.stories[id].tokens if id in self.stories else []

    async def finished(self, *ids: str) -> None:
        await self.until(lambda: all(id in self.stories and self.stories[id].finish for id in ids))


@dataclass
class Stage:
    """A running scheduler and who has been dialled in."""

    scheduler: Scheduler
    places: Places
    nursery: trio.Nursery
    admin: Peer

    async def dial(self, role: str, incarnation: int = 1) -> tuple[TestPeer, Peer]:
        """A counterpart that stays until the stage ends; its life nests with no other."""

        async def hold(*, task_status: Any) -> None:
            async with dialled(role, "scheduler", self.places, incarnation=incarnation) as pair:
                task_status.started(pair)
                await trio.sleep_forever()

        pair: tuple[TestPeer, Peer] = await self.nursery.start(hold)
        return pair

    async def worker(self, incarnation: int = 1, facts: KVFacts = FACTS) -> PlayedWorker:
        worker = PlayedWorker(*await self.dial("worker", incarnation))
        await worker.introduce(facts)
        return worker

    async def detokenizer(self, incarnation: int = 1, credit: int = 1000) -> PlayedDetokenizer:
        detokenizer = PlayedDetokenizer(*await self.dial("detokenizer", incarnation))
        if credit:
            detokenizer.credit(credit)
        return detokenizer

    async def until(self, holds: Callable[[], object]) -> None:
        """Waits for something to be so in the scheduler, a round trip at a time."""
        with trio.fail_after(10):
            while not holds():
                await self.admin.ask(Status(), Snapshot, deadline_s=5)

    @asynccontextmanager
    async def working(self, worker: PlayedWorker) -> AsyncIterator[None]:
        """The worker answers every plan until the block ends."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            yield
            nursery.cancel_scope.cancel()

    def finished(self, reason: str = "length") -> int:
        """Requests that have ended so."""
        return self.scheduler.core.statistics().counters[f"finished_{reason}"]

    async def tokenizer(self) -> Peer:
        _, peer = await self.dial("tokenizer")
        return peer


@asynccontextmanager
async def staged(places: Places, config: Config = CONFIG, incarnation: int = 1) -> AsyncIterator[Stage]:
    async with (
        running(Scheduler, places, config, incarnation=incarnation) as scheduler,
        dialled("admin", "scheduler", places) as (_, admin),
        trio.open_nursery() as nursery,
    ):
        yield Stage(scheduler, places, nursery, admin)
        nursery.cancel_scope.cancel()


async def submit(peer: Peer, message: Submit) -> Journaled | Rejected:
    answer: Journaled | Rejected = await peer.ask(message, (Journaled, Rejected), deadline_s=10)
    return answer


async def pushed(node: TestPeer, kind: type[M]) -> tuple[Head, M]:
    """The next message, which must be of this kind, with its head."""
    _, head, message = await node.receive_request()
    assert isinstance(message, kind), message
    return head, message
