"""The scheduler's shell: sockets, time and files around the pure engine.

    message ──► checked, posted ──► turn: events, tick, plan ──► one journal write ──► effects, replies, plan, feed
                                      ▲ also when a deadline of the engine is reached

Everything that changes the engine happens in a turn, in the order of arrival; all that came since the last turn
shares one write. Messages that came together are followed by their turn at once: to wake a task for it would cost a
pass of the event loop for each step. Nothing leaves before that write has succeeded: while it fails, nothing new is
planned or promised, and the turn is tried again. An exception in the engine ends the process: the next one starts from
the journal.
"""

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import trio

from services.scheduler.clock import SteadyClock
from services.scheduler.durable import Durable
from services.scheduler.engine import Engine
from services.scheduler.events import Advanced, Ask, Effect, Forgotten, Journal, Tell, ToWorker
from services.scheduler.feed import Feed
from services.scheduler.picture import picture
from services.scheduler.rates_file import read_rates, write_rates
from services.scheduler.settings import Settings
from services.scheduler.store_link import StoreLink
from services.scheduler.target import NoTarget, Target
from services.scheduler.wellformed import submit_fault
from services.scheduler.worker_link import WorkerLink
from shared.actor import Actor, Reject, on
from shared.config import Config, ConfigError
from shared.identity import load_or_create_key
from shared.messages import Head, Message
from shared.messages.admin import CheckIntegrity, Integrity
from shared.messages.engine import CancelRequest, Journaled, Plan, Result, StopAt, Submit, Transferred, WorkerReady
from shared.messages.front import Cancelled, Credit, Rejected
from shared.messages.store import Clear, ClearCache, Cleared, Staged
from shared.paths import Places
from shared.peers import Peer, PeerGone, PeerSlow

RETRY_JOURNAL_S = 0.25
RETRY_SLOW_S = 0.01
"""How soon a peer whose queue was full is tried again."""
SAVE_RATES_S = 10.0
CHECK_IDLE_S = 1.0
"""How long nothing must have happened before the engine checks itself."""
CHECK_BLOCKS = 65_536
"""Pools of more blocks are not checked: the check walks over all of them on the loop, a quarter of a second for 65,536,
and no thread can do it while the engine may change. Small pools, which tests have, show the same faults.
"""

TOKENIZER, WORKER = frozenset({"tokenizer"}), frozenset({"worker"})
DETOKENIZER, STORE, ADMIN = frozenset({"detokenizer"}), frozenset({"store"}), frozenset({"admin"})


@dataclass(frozen=True)
class Reply:
    """An answer that waits for the journal."""

    peer: Peer
    head: Head
    message: Message


class Scheduler(Actor):
    """Owns the engine, the journal and the links; decides nothing that the engine can decide."""

    role_name: ClassVar[str] = "scheduler"
    accepts: ClassVar[frozenset[str]] = frozenset({"tokenizer", "worker", "detokenizer"})

    def __init__(self, places: Places, config: Config, *, incarnation: int) -> None:
        super().__init__(places, config, incarnation=incarnation)
        self.core: Engine
        self.clock = SteadyClock()
        self.durable = Durable(places, config, self.faults, self.dropped)
        self.feed = Feed(lambda id, start: self.core.progress(id, start))
        self.store = StoreLink(self)
        self.worker = WorkerLink(self)
        self._detokenizer: Peer | None = None
        self._events: deque[Callable[[float], None]] = deque()
        self._outgoing: list[Effect | Reply | Plan] = []
        self._woken = trio.Event()
        self._pause = trio.CancelScope()
        self._in_batch = self._awake = False
        self._retry_at = 0.0
        self._store_by = self.clock.now() + config.scheduler.store_wait_s if config.kv.prefix_cache else 0.0
        self._check_at: float | None = None
        self._unchecked = False
        self.idle_checks = 0
        self._draining = False

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Reads the key and the journal; requests of earlier lives wait again before anybody can connect."""
        try:
            settings = Settings.of(self.config)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        key = load_or_create_key(self.places.identity_key)
        self.core = Engine(settings, key)
        recovered = await self.durable.recover()
        self.core.restore(self.clock.now(), recovered.records)
        self.core.recall(await trio.to_thread.run_sync(read_rates, self.places.rates))
        self.durable.retain(recovered.records, self.core.retained())
        self.log.info(
            "recovered", records=len(recovered.records), torn_bytes=recovered.torn_bytes, losses=len(recovered.losses)
        )
        self.nursery.start_soon(self._turns)
        self.nursery.start_soon(self.durable.sync_for_ever)
        self.nursery.start_soon(self.durable.fill_ledger_for_ever)
        self.nursery.start_soon(self._save_rates_for_ever)

    async def drain(self) -> None:
        """Admits nothing more, puts what has happened on file. A step that is out will be computed again.

        Requests that arrive from now on get no answer, not a refusal: their tokenizer asks the next incarnation.
        """
        self._draining = True
        self._turn()
        write_rates(self.places.rates, self.core.rates())
        await self.durable.close()

    def snapshot(self) -> dict[str, Any]:
        """See `picture`; before the journal is read, nothing but that."""
        if not self.ready:
            return {"note": "reading the journal"}
        return picture(self)

    async def _save_rates_for_ever(self) -> None:
        saved = self.core.rates()
        while True:
            await trio.sleep(SAVE_RATES_S)
            if (rates := self.core.rates()) != saved:
                saved = rates
                await trio.to_thread.run_sync(write_rates, self.places.rates, rates)

    # --- turns ----------------------------------------------------------------------------------------------------

    def post(self, event: Callable[[float], None]) -> None:
        """Something happened: `event(now)` tells the engine in the next turn."""
        self._events.append(event)
        if not self._in_batch:
            self._woken.set()

    def accept(self, peer: Peer, head: Head, message: Message) -> None:
        """A message; the turn for what it posts is that of all that came with it."""
        self._in_batch = True
        super().accept(peer, head, message)

    def handled(self) -> None:
        """The turn for the messages that have just come."""
        self._in_batch = False
        if self._events and not self._awake:
            self._woken.set()
        elif self._events:
            self._turn()
            self._pause.deadline = self._next_turn_at()

    def wake(self) -> None:
        """Something can be sent that could not be before."""
        self._woken.set()

    async def _turns(self) -> None:
        self._awake = True
        while True:
            with trio.move_on_at(self._next_turn_at()) as self._pause:
                await self._woken.wait()
            self._woken = trio.Event()
            self._turn()

    def _next_turn_at(self) -> float:
        """By trio's clock."""
        times = (self.core.next_deadline(), self._check_at, self._retry_at or None, self._store_by or None)
        due = [at for at in times if at is not None]
        return trio.current_time() + max(0.0, min(due) - self.clock.now()) if due else float("inf")

    def _turn(self) -> None:
        now = self.clock.now()
        self._retry_at = 0.0
        while self._events:
            self._events.popleft()(now)
            self._outgoing += self.core.take_effects()
        if (deadline := self.core.next_deadline()) is not None and deadline <= now:
            self.core.tick(now)
        awaits_store = self._awaits_store(now)  # asked in every turn: it ends the wait, which `_turns` sleeps by
        may_plan = self.worker.ready and not self.durable.reason and not awaits_store
        plans = list(iter(lambda: self.core.next_plan(now), None)) if may_plan else []
        self._outgoing += self.core.take_effects()
        self._outgoing += plans
        if self._write():
            outgoing, self._outgoing = self._outgoing, []
            for effect in outgoing:
                self._carry_out(effect)
            self._flush()
            self._check_when_idle(now)
        else:
            self._retry_at = now + RETRY_JOURNAL_S

    def _awaits_store(self, now: float) -> bool:
        """Whether the store, started at the same time as we, may still come: its blocks are worth a short wait."""
        if self._store_by and (self.store.opened or now >= self._store_by):
            self._store_by = 0.0
        return self._store_by > 0

    def _write(self) -> bool:
        records = [effect.record for effect in self._outgoing if isinstance(effect, Journal)]
        return not records or self.durable.write(records)

    def _carry_out(self, effect: Effect | Reply | Plan) -> None:
        match effect:
            case Journal():
                pass  # written already
            case Plan():
                self.worker.send(effect)
            case ToWorker():
                self.worker.send(effect.message)
            case Ask():
                self.store.ask(effect)
            case Tell():
                self.store.tell(effect.message)
            case Advanced():
                self.feed.advanced(effect.id)
            case Forgotten():
                self.feed.forgotten(effect.id)
                self.durable.journal.forget(effect.key)
            case Reply():
                self.answer(effect.peer, effect.head, effect.message)

    def _flush(self) -> None:
        """Sends what found no room before; tries again soon when there still is none."""
        slow = not self.worker.outbox.flush() or not self.store.outbox.flush()
        if self._detokenizer is not None and self.feed.due:
            try:
                self.feed.flush(self._detokenizer.send)
            except PeerSlow:
                slow = True
            except PeerGone:
                pass  # peer_down follows
        if slow:
            self._retry_at = self.clock.now() + RETRY_SLOW_S

    def _check_when_idle(self, now: float) -> None:
        """The engine checks itself once, a while after it has become idle, unless its pool is large."""
        if not self.core.idle:
            self._unchecked, self._check_at = True, None
        elif self._unchecked and self._check_at is None:
            self._check_at = now + CHECK_IDLE_S
        elif self._check_at is not None and now >= self._check_at:
            self._unchecked, self._check_at = False, None
            if self.worker.facts is None or self.worker.facts.blocks <= CHECK_BLOCKS:
                self.core.check_integrity()
                self.idle_checks += 1

    # --- who comes and goes ---------------------------------------------------------------------------------------

    def peer_up(self, peer: Peer) -> None:
        """A detokenizer is told everything; a store is opened; a worker introduces itself."""
        if peer.role == "detokenizer":
            self._detokenizer = peer
            self.post(lambda now: self.feed.connect(self.core.retained()))
        elif peer.role == "store":
            self.store.came(peer)

    def peer_down(self, peer: Peer, exit_proven: bool) -> None:
        """What was for it is dropped; a worker's pool is given up only when its exit is proven."""
        if peer.role == "worker":
            self.worker.gone(peer, exit_proven)
        elif peer.role == "store":
            self.store.gone()
        elif peer is self._detokenizer:
            self._detokenizer = None
            self.post(lambda now: self.feed.disconnect())

    # --- requests -------------------------------------------------------------------------------------------------

    @on(Submit, roles=TOKENIZER)
    def _submit(self, peer: Peer, message: Submit, head: Head) -> Rejected | None:
        fault = submit_fault(message)
        if fault:
            return Rejected(id=message.id[:256], code="bad_request", reason=fault)
        if not self._draining:
            self.post(lambda now: self._submitted(now, peer, head, message))
        return None

    def _submitted(self, now: float, peer: Peer, head: Head, message: Submit) -> None:
        refusal = self.durable.refusal()
        answer: Journaled | Rejected
        if refusal and self.core.progress(message.id, 0) is None:
            answer = Rejected(id=message.id, code="overloaded", reason=refusal)
        else:
            answer = self.core.submit(now, message, secrets.randbits(63))
        if isinstance(answer, Rejected):
            self.answer(peer, head, answer)  # promises nothing, so it need not wait for the journal
            return
        self._outgoing += self.core.take_effects()
        if not answer.known:
            self._outgoing.append(Advanced(message.id))  # before any token, so that clients can attach
        self._outgoing.append(Reply(peer, head, answer))

    @on(CancelRequest, roles=TOKENIZER | DETOKENIZER)
    def _cancel(self, peer: Peer, message: CancelRequest, head: Head) -> None:
        def cancelled(now: float) -> None:
            answer: Cancelled = self.core.cancel(now, message)
            self._outgoing += self.core.take_effects()
            self._outgoing.append(Reply(peer, head, answer))

        self.post(cancelled)

    @on(StopAt, roles=DETOKENIZER)
    def _stop_at(self, peer: Peer, message: StopAt) -> None:
        self.post(lambda now: self.core.stop_at(now, message))

    @on(Credit, roles=DETOKENIZER)
    def _credit(self, peer: Peer, message: Credit) -> None:
        if peer is self._detokenizer:
            self.post(lambda now: self.feed.give(message.chunks))

    # --- worker and store -----------------------------------------------------------------------------------------

    @on(WorkerReady, roles=WORKER)
    def _worker_ready(self, peer: Peer, message: WorkerReady) -> None:
        self.worker.introduced(peer, message)

    @on(Result, roles=WORKER)
    def _result(self, peer: Peer, message: Result) -> None:
        if peer is self.worker.outbox.peer:
            self.post(lambda now: self.core.result(now, message))

    @on(Transferred, roles=WORKER)
    def _transferred(self, peer: Peer, message: Transferred) -> None:
        if peer is self.worker.outbox.peer:
            checked = self.worker.checked(message)
            self.post(lambda now: self.core.transferred(now, checked))

    @on(Staged, roles=STORE)
    def _staged(self, peer: Peer, message: Staged) -> None:
        self.store.staged(peer, message)

    # --- books ----------------------------------------------------------------------------------------------------

    @on(CheckIntegrity, roles=ADMIN)
    def _check_integrity(self, peer: Peer, message: CheckIntegrity) -> Integrity:
        """The check that runs when idle, now; a complaint is told, not died of."""
        blocks = self.worker.facts.blocks if self.worker.facts else 0
        if blocks > CHECK_BLOCKS:
            skipped = f"its pool has {blocks:,} blocks; of more than {CHECK_BLOCKS:,} the check would hold up the steps"
            return Integrity(skipped=skipped, idle_checks=self.idle_checks)
        try:
            self.core.check_integrity()
        except (AssertionError, RuntimeError, ValueError) as error:
            return Integrity(complaint=str(error), idle_checks=self.idle_checks)
        return Integrity(idle_checks=self.idle_checks)

    @on(ClearCache, roles=ADMIN)
    async def _clear(self, peer: Peer, message: ClearCache) -> Cleared:
        """Device, host and disk tier, in this order, so that nothing old is saved again behind the clear."""
        done = trio.Event()
        targets: list[Target] = []
        refused: list[str] = []
        dropped = 0

        def clear(now: float) -> None:
            nonlocal dropped
            try:
                target = self.core.target(message)
                dropped = self.core.clear(now, target)
                targets.append(target)
            except NoTarget as error:
                refused.append(str(error))
            done.set()

        self.post(clear)
        await done.wait()
        if refused:
            raise Reject("bad_request", refused[0])
        cleared = await self.store.clear(Clear(scope=targets[0].scope))
        epoch = cleared.epoch if isinstance(cleared, Cleared) else None
        self.post(lambda now: self.core.cleared(now, epoch))
        if not isinstance(cleared, Cleared):
            raise Reject("overloaded", f"{dropped} blocks of the device are cleared, but {cleared}; try again")
        size = self.worker.facts.block_bytes if self.worker.facts else 0
        return Cleared(
            blocks={"device": dropped} | cleared.blocks,
            bytes={"device": dropped * size} | cleared.bytes,
            epoch=cleared.epoch,
        )
