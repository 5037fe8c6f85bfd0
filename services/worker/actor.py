"""The worker's shell: plans go to the compute lane, copies to those of loads and saves, outcomes to the scheduler.

    scheduler comes (any incarnation) ─► WorkerReady ─► Quiesce(epoch) ─► Idle(epoch) ─► Plan, Transfer ...
    scheduler goes                    ─► its epoch is forgotten: what is queued is dropped, a copy stops between blocks
    a load, step or copy gets nowhere ─► the process ends itself: its exit is a proof, the supervisor starts the next

Between WorkerReady and Idle the pool belongs to nobody; after Idle(epoch) to the scheduler of that epoch, whose tree
starts empty. Nothing of an older epoch can touch the pool then, because Idle waits for all lanes.
"""

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import outcome
import trio

from services.worker.lane import Lane
from services.worker.load_watch import LoadWatch, Meter
from services.worker.loading import load_runner
from services.worker.page_store import PageStore
from services.worker.runner import Runner
from services.worker.sessions import keys_of
from services.worker.steps import Steps
from services.worker.toy_runner import ToyRunner
from services.worker.transfer import Transfers
from services.worker.watchdog import Watchdog
from shared.actor import Actor, on
from shared.config import Config
from shared.large_memory import Wish
from shared.messages import Head, Message
from shared.messages.base import pack_u64
from shared.messages.engine import MOST_STEPS, Curtail, Idle, Plan, Quiesce, Result, RowResult, Transfer, Transferred
from shared.paths import Places
from shared.peers import Peer, PeerGone, PeerSlow

MAX_PLANS = 2
"""Plans in the compute lane, the running one included: the scheduler makes the next one while it runs."""
MAX_TRANSFERS = 1024
FIRST_BYTES = 64 << 20
"""Of the pool, touched before this worker is ready: the first hit after a restart loads its prefix into them."""
PREFAULT_BYTES = 4 << 20
"""Per turn of the lane of saves, so that a transfer waits for few milliseconds; no turn is taken beside other work."""
HUNG = 70
"""Exit code of a worker whose lane never came back."""
WATCH_S = 0.5
IDLE_S = 0.25
"""Nothing has been wanted for this long: then the pool may be touched."""
SCHEDULER = frozenset({"scheduler"})


class Worker(Actor):
    """Owns the lanes, the runner and the pool; knows one scheduler and one epoch at a time."""

    role_name: ClassVar[str] = "worker"
    accepts: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, places: Places, config: Config, *, incarnation: int) -> None:
        super().__init__(places, config, incarnation=incarnation)
        self._epoch: int | None = None
        self._loading = ("starting", 0.0)
        self._runner: Runner | None = None
        self._plans = self._transfers_queued = 0
        self._curtailed = 0
        self._worked = 0.0
        self._arena_key = ""
        self.dial("scheduler")

    async def start(self) -> None:
        """Loads the model in the compute lane, sizes the pool by it."""
        self._compute = Lane("compute")
        self._loads = Lane("loads")
        self._saves = Lane("saves", nice=self.config.store.nice, behind=self._loads)
        self.nursery.start_soon(self._watch_loading)
        try:
            self._runner = await self._compute.run(self._load)
            facts = self._runner.facts
            wish = Wish(self.config.kv.huge_pages, self.config.kv.lock_memory)
            self._pool = PageStore(facts.blocks, facts.block_bytes, wish)
            for warning in self._pool.large.warnings:
                self.log.warning("pool_memory", reason=warning)
            if not isinstance(self._runner, ToyRunner):  # a test's pool is not worth its memory unused
                await self._loads.run(partial(self._pool.prefault, FIRST_BYTES))
            self._steps = Steps(self._runner, self._pool, self.faults)
            self._transfers = Transfers(self._pool, self.faults)
        except BaseException:
            self._stop_lanes()
            raise
        self._loading = ("ready", 1.0)
        expected = self._runner.largest_step_s / self.config.scheduler.step_tokens
        self._step_watch = Watchdog("step", self.config.supervise.step_s, expected=expected)
        self._load_watch = Watchdog("loads", self.config.supervise.step_s)
        self._save_watch = Watchdog("saves", self.config.supervise.step_s)
        self.nursery.start_soon(self._watch)
        if not isinstance(self._runner, ToyRunner):  # a test's pool is not worth its memory unused
            self.nursery.start_soon(self._touch, self._pool.prefault)

    def _load(self) -> Runner:
        self.faults.at("worker_in_start")
        return load_runner(self.config, self.places, self._progress)

    async def drain(self) -> None:
        """Lets the running step and copies end, so that their outcomes still reach the scheduler."""
        await self._wait_past_lanes()
        self._epoch = None
        self._stop_lanes()

    async def _wait_past_lanes(self) -> None:
        for lane in (self._compute, self._loads, self._saves):
            await lane.wait_past()

    def _stop_lanes(self) -> None:
        for lane in (self._compute, self._loads, self._saves):
            lane.stop()

    def _progress(self, what: str, share: float) -> None:
        self._loading = (what, share)  # called in the compute thread; one assignment is atomic

    async def _watch_loading(self) -> None:
        """Ends the process when loading the model gets nowhere, until it is loaded."""
        watch, meter = LoadWatch(self.config.supervise.load_s), Meter()
        pause = min(WATCH_S, max(self.config.supervise.load_s, 0.1) / 4)
        while self._runner is None:
            await trio.sleep(pause)
            stuck = watch.tick(pause, said=self._loading, moved=meter.moved(), used_s=meter.used_s())
            if stuck is not None and self._runner is None:
                self.log.error("load_hung", **asdict(stuck), hint="this worker ends, its supervisor starts the next")
                os._exit(HUNG)

    async def _watch(self) -> None:
        """Ends the process when a lane does not come back: nobody else can tell a long step from a hung one."""
        pause = min(WATCH_S, max(self.config.supervise.step_s, 0.1) / 4)
        while True:
            await trio.sleep(pause)
            found = [watch.tick(pause) for watch in (self._step_watch, self._load_watch, self._save_watch)]
            hung = next((one for one in found if one is not None), None)
            if hung is not None:
                self.log.error("hung", **asdict(hung), hint="this worker ends, its supervisor starts the next")
                os._exit(HUNG)

    async def _touch(self, some: Callable[[int], bool]) -> None:
        """Touches memory bit by bit while nobody wants anything: first touch runs at a tenth of a copy's rate.

        `some` touches the next bytes, and is True when all are touched. Between two steps of a batch the worker is
        idle for a moment, too; a turn begun there would slow the next step down. So a turn needs a pause of `IDLE_S`
        since the last work.
        """
        touched = False
        while not touched:
            left = self._worked + IDLE_S - trio.current_time()
            if self._plans or self._transfers_queued or left > 0:
                await trio.sleep(max(left, IDLE_S / 4))
            else:
                touched = await self._saves.run(partial(some, PREFAULT_BYTES))

    # --- the scheduler comes and goes

    def peer_up(self, peer: Peer) -> None:
        """A scheduler is there: says what this worker is."""
        if peer.role == "scheduler" and self._runner is not None:
            self._send(peer, Head(), self._runner.ready)

    def peer_down(self, peer: Peer, exit_proven: bool) -> None:
        """The scheduler is gone and nobody waits for what its epoch has queued."""
        if peer.role == "scheduler":
            self._epoch = None

    @on(Quiesce, roles=SCHEDULER)
    async def quiesce(self, peer: Peer, message: Quiesce, head: Head) -> None:
        """Forgets older epochs at once, answers Idle when nothing of them runs any more."""
        self._epoch = message.epoch
        self._curtailed = 0
        await self._wait_past_lanes()
        self._send(peer, head, Idle(epoch=message.epoch))

    def _wanted(self, epoch: int) -> Callable[[], bool]:
        return lambda: self._epoch == epoch

    # --- work

    @on(Plan, roles=SCHEDULER)
    def plan(self, peer: Peer, message: Plan, head: Head) -> None:
        """Queues a step; its Result follows. A plan beyond the bound fails at once, one of another epoch is dropped."""
        if message.epoch != self._epoch:
            self.dropped("older_epoch", f"plan {message.seq} of epoch {message.epoch}, now {self._epoch}")
            return
        if self._plans >= MAX_PLANS:
            rows = tuple(RowResult(key=key, error=f"the worker has {self._plans} plans") for key in keys_of(message))
            self._send(peer, head, Result(epoch=message.epoch, seq=message.seq, rows=rows, forward_s=0.0))
            return
        self._plans += 1

        def done(result: outcome.Outcome[Result | None]) -> None:
            self._plans -= 1
            self._finished(peer, head, message.epoch, result)

        tokens = sum(max(len(row.ids) // 4, row.feeds_last) for row in message.rows) + len(message.goes_on) // 8
        steps = partial(
            self._steps.execute, message, self._wanted(message.epoch), lambda: self._curtailed >= message.seq
        )
        self._compute.submit(self._step_watch.around(tokens * min(message.steps, MOST_STEPS), steps), done)

    @on(Curtail, roles=SCHEDULER)
    def curtail(self, peer: Peer, message: Curtail) -> None:
        """Plans of several steps up to that number end soon."""
        if message.epoch == self._epoch:
            self._curtailed = message.seq

    @on(Transfer, roles=SCHEDULER)
    def transfer(self, peer: Peer, message: Transfer, head: Head) -> None:
        """Queues copies; Transferred follows. Beyond the bound none of them holds."""
        if message.epoch != self._epoch:
            self.dropped("older_epoch", f"transfer {message.seq} of epoch {message.epoch}, now {self._epoch}")
            return
        if self._transfers_queued >= MAX_TRANSFERS:
            self.dropped("too_many_transfers", f"transfer {message.seq}")
            n = len(message.copies)
            none = Transferred(
                epoch=message.epoch, seq=message.seq, checksums=pack_u64([0] * n), ok=bytes(n), seconds=0.0
            )
            self._send(peer, head, none)
            return
        self._transfers_queued += 1
        if message.arena_key != self._arena_key:
            self._arena_key = message.arena_key
            self.nursery.start_soon(self._touch, self._transfers.populate)

        def done(result: outcome.Outcome[Transferred | None]) -> None:
            self._transfers_queued -= 1
            self._finished(peer, head, message.epoch, result)

        lane, watch = (self._saves, self._save_watch) if message.save else (self._loads, self._load_watch)
        give_way = partial(watch.pause, lane.give_way)
        copies = partial(self._transfers.execute, message, self._wanted(message.epoch), give_way)
        lane.submit(watch.around(len(message.copies), copies), done)

    def _finished(self, peer: Peer, head: Head, epoch: int, result: outcome.Outcome[Any]) -> None:
        message = result.unwrap()
        if message is not None and epoch == self._epoch:
            self._send(peer, head, message)
        self._worked = trio.current_time()

    def _send(self, peer: Peer, head: Head, message: Message) -> None:
        """Answers a request as its reply, a push as a push."""
        try:
            peer.send(message, re=head.rid)
        except (PeerGone, PeerSlow) as error:
            self.dropped("unanswered", str(error))

    # --- status

    def snapshot(self) -> dict[str, Any]:
        """While the model loads: `note`, `loading` (what is being done), `loaded` (its share, 0 to 1).

        Then also `model`, `architecture`, `backend`, `numerics`, `exact`, `max_context`, `block_tokens`, `kv_dtype`,
        `limits`; `epoch` (null between schedulers), `plans` (queued or running), `hung_after_s` (of a step of one
        token, of one copy in each direction), `pool` (blocks, block_bytes, prefaulted bytes, and what LargeMemory.facts
        says), `steps` and `transfers` (totals since start, see StepStatistics and TransferStatistics).
        """
        what, share = self._loading
        if self._runner is None or not self.ready:
            return {"note": f"{what} {share:.0%}", "loading": what, "loaded": round(share, 3)}
        ready = self._runner.ready
        return {
            "note": f"{ready.model} on {ready.backend}",
            "loading": what,
            "loaded": share,
            "model": ready.model,
            "architecture": ready.architecture,
            "backend": ready.backend,
            "numerics": ready.numerics,
            "exact": self._runner.exact,
            "max_context": ready.max_context,
            "block_tokens": ready.kv.block_tokens,
            "kv_dtype": ready.kv.kv_dtype,
            "limits": ready.limits,
            "epoch": self._epoch,
            "plans": self._plans,
            "hung_after_s": {
                "step": self._step_watch.limit_s(1),
                "loads": self._load_watch.limit_s(1),
                "saves": self._save_watch.limit_s(1),
            },
            "pool": asdict(self._pool.statistics()) | self._pool.large.facts(),
            "steps": asdict(self._steps.statistics()),
            "transfers": asdict(self._transfers.statistics()),
        }
