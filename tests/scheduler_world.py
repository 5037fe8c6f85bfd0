"""A simulated world around the real engine: worker, store, journal and detokenizer, all under the test's control.

Nothing happens by itself: plans, copies and answers lie in queues until a test completes, loses or delays them. After
every event the world checks what must always hold; `settle` leaves everything alone and checks what must hold then.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec

from services.scheduler.engine import Engine
from services.scheduler.events import Advanced, Ask, Effect, Forgotten, Journal, Tell, ToWorker
from services.scheduler.kv.block_pool import FREE, REQUEST
from services.scheduler.records import Accept, AnyRecord, Step
from services.scheduler.settings import Settings
from services.scheduler.target import Target
from shared.messages.base import pack_u32, pack_u64, unpack_u32
from shared.messages.engine import (
    MOST_STEPS,
    CancelRequest,
    Copy,
    Curtail,
    Journaled,
    KVFacts,
    Plan,
    Result,
    RowResult,
    SampleSpec,
    StopAt,
    Submit,
    Transfer,
    Transferred,
)
from shared.messages.front import Rejected
from shared.messages.store import Abandon, Commit, Found, Lookup, Release, Reserve, Reserved
from tests.plan_rows import Checked, after, fed
from tests.sim_client import Sent
from tests.sim_losses import Losses
from tests.sim_store import SimStore, Slot
from tests.sim_worker import VOCAB, SimWorker, checksum_of

KEY = b"k" * 32


class World:
    """The engine and everything around it. All its events and effects are kept for a replay."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        blocks: int = 16,
        block_tokens: int = 4,
        max_context: int = 400,
        worker: bool = True,
        store: bool = False,
        check: bool = True,
    ) -> None:
        self.settings = settings or Settings(step_tokens=16, max_running=6)
        self.facts = KVFacts(b"f" * 32, block_tokens, 64, blocks, "fp32", 1, 1, 8)
        self.max_context = max_context
        self.check = check
        self.now = 100.0
        self.epoch = 0
        self.journal: list[AnyRecord] = []
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.effects: list[Effect | Plan | None] = []
        self.sent: dict[str, Sent] = {}
        self.forgotten: set[str] = set()
        self.store = SimStore()
        self.store_up = False
        self.plans: list[tuple[Plan, Result | None]] = []
        """Outstanding ones, in order, their rows whole; with a result where the worker is through already."""
        self.transfers: list[tuple[Transfer, Transferred | None]] = []
        self.asks: list[Ask] = []
        self.worker: SimWorker | None = None
        self.plan_rows: Checked | None = None
        self.curtailed = 0
        """Plans up to this number end with the step that they are in; which that is, `steps_left` says."""
        self.steps_left = MOST_STEPS
        self.mute = False
        """A store that gets questions and never answers."""
        self.stalled = False
        """A store that answers lookups and delivers nothing from disk."""
        self.stopped = False
        """A store that does nothing at all, as after SIGSTOP; what it is sent lies in `inbox`, in order."""
        self.inbox: list[Ask | Tell] = []
        self.clearing = False
        self.ids: dict[int, str] = {}
        self.losses = Losses()
        self.engine = Engine(self.settings, KEY)
        self._numbers = 0
        if worker:
            self.start_worker()
        if store:
            self.start_store()

    @property
    def plan(self) -> Plan | None:
        """The one that the worker is at."""
        return self.plans[0][0] if self.plans else None

    # --- events -----------------------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> Any:
        """One event, then the plans, then the effects, as the shell does it."""
        self.log.append((name, arguments))
        answer = getattr(self.engine, name)(*arguments)
        plans, effects = list[Plan](), list[Effect]()
        while True:
            plan = self.engine.next_plan(self.now)
            self.log.append(("next_plan", (self.now,)))
            news = self.engine.take_effects()
            effects += news
            self.effects += [*news, plan]
            if plan is None:
                break
            assert self.plan_rows is not None
            assert self.worker is not None
            plan = self.plan_rows.whole(plan)
            self.worker.hears(plan)
            self._check_plan(plan, [*(one for one, _ in self.plans), *plans])
            plans.append(plan)
        self.carry_out(effects, plans)
        return answer

    def carry_out(self, effects: list[Effect], plans: list[Plan]) -> None:
        for effect in effects:
            if isinstance(effect, Journal):
                self._journal(effect.record)
        for effect in effects:
            if isinstance(effect, ToWorker) and isinstance(effect.message, Curtail):
                assert effect.message.epoch == self.epoch
                self.curtailed = effect.message.seq
            elif isinstance(effect, ToWorker):
                self._order(effect.message)
            elif isinstance(effect, Ask):
                assert self.store_up
                (self.inbox if self.stopped else self.asks).append(effect)
            elif isinstance(effect, Tell):
                assert self.store_up
                if self.stopped:
                    self.inbox.append(effect)
                else:
                    self.store.tell(effect.message)
            elif isinstance(effect, Advanced):
                self._tell_client(effect.id)
            elif isinstance(effect, Forgotten):
                assert self.sent[effect.id].finish is not None
                self.forgotten.add(effect.id)
        self.losses.check_ends(self.ids, self.sent)
        self.plans += [(plan, None) for plan in plans]
        assert len(self.plans) <= self.settings.plans_out
        if self.check:
            self.engine.check_integrity()
        self._poison_free_blocks()

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        seed: int | None = 0,
        logprobs: int = -1,
        id: str | None = None,
        **options: Any,
    ) -> str:
        """Sends a request -> its id. The answer is in `answers`."""
        self._numbers += 1
        name = id or f"r{self._numbers}"
        message = Submit(
            id=name,
            digest=bytes([self._numbers % 256]) * 32,
            principal=options.pop("principal", "p"),
            ids=pack_u32(prompt),
            max_tokens=max_tokens,
            sample=SampleSpec(seed=seed or 0, logprobs=logprobs),
            seeded=seed is not None,
            **options,
        )
        self.send(message, drawn=self._numbers)
        return name

    def send(self, message: Submit, drawn: int) -> Journaled | Rejected:
        self.sent.setdefault(message.id, Sent(message, message.sample.seed if message.seeded else drawn))
        answer = self.call("submit", self.now, message, drawn)
        assert isinstance(answer, Journaled | Rejected)
        if isinstance(answer, Rejected) and answer.code != "conflict":
            del self.sent[message.id]
        self.answer = answer
        return answer

    def cancel(self, id: str, principal: str = "p") -> bool:
        answer = self.call("cancel", self.now, CancelRequest(id=id, principal=principal))
        self.sent[id].cancelled |= answer.known
        return bool(answer.known)

    def stop_at(self, id: str, at: int) -> None:
        sent = self.sent[id]
        sent.stop_at = min(at, sent.stop_at or at)
        self.call("stop_at", self.now, StopAt(id=id, at=at))

    def advance(self, seconds: float) -> None:
        """Time passes; the shell ticks when the engine asked for it."""
        self.now += seconds
        at = self.engine.next_deadline()
        if at is not None and at <= self.now:
            self.call("tick", self.now)
            again = self.engine.next_deadline()
            assert again is None or again > self.now

    # --- worker -----------------------------------------------------------------------------------------------

    def start_worker(self) -> None:
        self.epoch += 1
        self._lose_plans()
        self.plan_rows = Checked(self.facts, VOCAB, self.max_context)
        self.worker = SimWorker(self.facts, self.max_context)
        self.call("worker_up", self.now, self.epoch, self.facts, self.max_context)

    def kill_worker(self) -> None:
        self._lose_plans()
        self.worker = None
        self.call("worker_down", self.now)

    def _lose_plans(self) -> None:
        self.losses.lost(plan for plan, _ in self.plans)
        self.plans, self.transfers = [], []

    def finish_plan(self, change: Callable[[RowResult], RowResult] = lambda row: row) -> None:
        """The worker answers the plan that it is at; `change`: what it says of each row instead of the truth."""
        result = self._run(0, change)
        plan = self.plans.pop(0)[0]
        self.losses.finished(plan, len(result.rows) // len(plan.rows))
        self.call("result", self.now, result)

    def run_ahead(self) -> None:
        """The worker works through all plans, and the news of it comes later."""
        for index in range(len(self.plans)):
            self._run(index)

    def _run(self, index: int, change: Callable[[RowResult], RowResult] = lambda row: row) -> Result:
        assert self.worker is not None
        plan, result = self.plans[index]
        if result is None:
            assert all(self._owner(block) != FREE for row in plan.rows for block in unpack_u32(row.blocks))
            assert self.plan_rows is not None
            short = min(self.steps_left, plan.steps - 1) if plan.seq <= self.curtailed else 0
            result = self.worker.run(plan, short)
            result = msgspec.structs.replace(result, rows=tuple(change(row) for row in result.rows))
            self.worker.ended |= {row.key for row in result.rows if row.error is not None or row.dropped}
            self.plan_rows.ran(plan, result)
            self.plans[index] = plan, result
            if short:
                self._fell_short(index, plan, short)
        return result

    def _fell_short(self, index: int, plan: Plan, by: int) -> None:
        """Rows of the plans behind it begin as much earlier."""
        assert self.plan_rows is not None
        self.plan_rows.fell_short(plan, by)
        keys = {row.key for row in plan.rows}
        for at in range(index + 1, len(self.plans)):
            later, done = self.plans[at]
            assert done is None
            rows = tuple(after(row, -by) if row.key in keys else row for row in later.rows)
            self.plans[at] = msgspec.structs.replace(later, rows=rows), None

    def step(self) -> bool:
        """One whole step; False when there is nothing to run."""
        if self.plan is None:
            self.call("tick", self.now)
        if self.plan is None:
            return False
        self.finish_plan()
        return True

    def finish_transfer(self, index: int = 0, *, ok: bool = True) -> None:
        transfer, done = self.transfers.pop(index)
        self.call("transferred", self.now, done or self._copy(transfer, ok=ok))

    def copy_early(self, index: int = 0) -> None:
        """The bytes move now, the news of it comes later."""
        transfer, done = self.transfers[index]
        self.transfers[index] = transfer, done or self._copy(transfer, ok=True)

    # --- store ------------------------------------------------------------------------------------------------

    def start_store(self) -> None:
        message = self.engine.open_engine()
        self.log.append(("open_engine", ()))
        if message is None:
            return
        opened = self.store.open(message)
        self.store_up = True
        self.call("store_up", self.now, opened, self.store.incarnation)

    def kill_store(self, *, lose_arena: bool = False, answered: int = 0) -> None:
        """The store dies; the first `answered` questions were handled, but their answers are lost."""
        for ask in self.asks[:answered]:
            self.store.answer(ask.message)
        self.asks.clear()
        self.inbox.clear()
        self.stopped = False
        self.store.restart(lose_arena=lose_arena)
        self.store_up = False
        self.call("store_down", self.now)

    def stop_store(self) -> None:
        self.stopped = True

    def continue_store(self) -> None:
        """It handles all that was sent to it meanwhile, in order; its answers come late."""
        self.stopped = False
        waiting, self.inbox = self.inbox, []
        while waiting:
            effect = waiting.pop(0)
            if isinstance(effect, Tell):
                self.store.tell(effect.message)
            else:
                self._answer(effect)

    def answer_ask(self, index: int = 0, *, failed: bool = False) -> None:
        self._answer(self.asks.pop(index), failed=failed)

    def _answer(self, ask: Ask, *, failed: bool = False) -> None:
        name = {Lookup: "found", Reserve: "reserved", Commit: "committed"}[type(ask.message)]
        self.call(name, self.now, ask.ticket, None if failed else self.store.answer(ask.message))

    def lose_ask(self, index: int = 0) -> None:
        """The question is never answered."""
        self.asks.pop(index)

    def lose_reply(self, index: int = 0) -> None:
        """The answer can't be sent: the store takes back what it gave with it."""
        message = self.asks.pop(index).message
        answer = self.store.answer(message)
        if isinstance(answer, Found):
            self.store.tell(Release(lease=answer.lease))
        elif isinstance(answer, Reserved):
            given = [(slot, 7 * slot) for slot in unpack_u32(answer.slots) if slot]
            slots, generations = pack_u32(slot for slot, _ in given), pack_u64(number for _, number in given)
            self.store.tell(Abandon(incarnation=answer.incarnation, slots=slots, generations=generations))

    def stage(self, *, fail: bool = False) -> None:
        staged = self.store.stage(fail=fail)
        if staged is not None:
            self.call("staged", self.now, staged)

    def clear(self, *, answered: bool = True) -> None:
        self.begin_clear()
        self.end_clear(answered=answered)

    def begin_clear(self) -> None:
        self.clearing = True
        self.call("clear", self.now, Target())

    def end_clear(self, *, answered: bool = True) -> None:
        """The store has cleared, or could not be asked."""
        self.clearing = False
        asked = answered and self.store_up and not self.stopped
        self.call("cleared", self.now, self.store.clear() if asked else None)

    # --- scheduler --------------------------------------------------------------------------------------------

    def restart_scheduler(self, *, lose_result: bool = False) -> None:
        """The scheduler dies (maybe between a result and its journal write) and reads its journal."""
        if lose_result and self.plans and self.worker is not None:
            self.engine.result(self.now, self._run(0))  # effects are never carried out
        self.engine = Engine(self.settings, KEY)
        self.log, self.effects = [], []
        self.losses.forgotten()
        self.plans, self.transfers, self.asks, self.clearing = [], [], [], False
        if self.stopped:
            self._continue_for_nobody()
        for sent in self.sent.values():
            sent.stop_at = None if sent.finish is None else sent.stop_at
        self.call("restore", self.now, tuple(self.journal))
        for id in self.engine.retained():
            replay = self.engine.progress(id, 0)
            assert replay is not None
            assert replay.opening is not None
            assert list(unpack_u32(replay.ids))[: len(self.sent[id].tokens)] == self.sent[id].tokens
        if self.worker is not None:
            self.start_worker()
        if self.store_up:
            self.start_store()

    def _continue_for_nobody(self) -> None:
        """The stopped store goes on when the scheduler that wrote to it is gone."""
        self.stopped = False
        for effect in self.inbox:
            if isinstance(effect, Tell):
                self.store.tell(effect.message)
            else:
                self.store.answer(effect.message)
        self.inbox.clear()

    # --- running on -------------------------------------------------------------------------------------------

    def outstanding(self) -> bool:
        return bool(
            self.plan or self.transfers or (self.asks and self.answers) or (self.store.staging and self.delivers)
        )

    @property
    def answers(self) -> bool:
        return not (self.mute or self.stopped)

    @property
    def delivers(self) -> bool:
        return not (self.mute or self.stopped or self.stalled)

    def turn(self) -> bool:
        """One of everything that is outstanding; False when nothing was."""
        busy = self.outstanding()
        if self.plan is not None:
            self.finish_plan()
        if self.transfers:
            self.finish_transfer()
        if self.asks and self.answers:
            self.answer_ask()
        if self.store.staging and self.delivers:
            self.stage()
        return busy

    def live(self) -> list[str]:
        return [id for id, sent in self.sent.items() if sent.finish is None]

    def settle(self, limit: int = 20_000) -> None:
        """Leaves everything alone until nothing happens any more: then every request has ended."""
        if self.clearing:
            self.end_clear()
        for _ in range(limit):
            if self.turn():
                continue
            if not self.live() and not self.engine.statistics().saving:
                break
            at = self.engine.next_deadline()
            assert at is not None, f"{self.live()} wait for ever"
            self.advance(max(0.0, at - self.now))
        else:
            raise AssertionError(f"not done after {limit} turns: {self.live()}, {self.engine.statistics()}")
        self.check_idle()

    def check_idle(self) -> None:
        now = self.engine.statistics()
        assert (now.running, now.waiting, now.leaving, now.in_flight, now.loading) == (0, 0, 0, 0, 0)
        self.engine.check_integrity()
        if now.kv is not None:
            assert now.kv.locked == 0
            assert now.kv.free + now.kv.cached == now.kv.total
        if self.store_up and not self.asks and not self.inbox:
            assert not self.store.leases
            assert not [slot for slot in self.store.slots.values() if slot.state == "granted"]
        for id in self.sent:
            self.check_answer(id)

    def check_answer(self, id: str) -> None:
        """The client got the oracle's tokens, and the account is right."""
        self.sent[id].check(self.facts, self.max_context)

    # --- inside -----------------------------------------------------------------------------------------------

    def _journal(self, record: AnyRecord) -> None:
        self.journal.append(record)
        if isinstance(record, Accept):
            self.ids[record.key] = record.id
            assert record.key not in {other.key for other in self.journal[:-1] if isinstance(other, Accept)}
        elif isinstance(record, Step):
            assert record.rows

    def _tell_client(self, id: str) -> None:
        progress = self.engine.progress(id, len(self.sent[id].tokens))
        assert progress is not None
        self.sent[id].told(progress)

    def _order(self, transfer: Transfer) -> None:
        assert self.worker is not None
        assert transfer.copies
        self.transfers.append((transfer, None))
        for copy in transfer.copies:
            assert self._owner(copy.block) != FREE
            if not transfer.save:
                assert self._owner(copy.block) == REQUEST
                self.worker.pool[copy.block] = self.worker.poison()

    def _copy(self, transfer: Transfer, *, ok: bool) -> Transferred:
        assert self.worker is not None
        sums = []
        for copy in transfer.copies:
            slot = self._slot(copy)
            if transfer.save and slot is not None:
                slot.values = list(self.worker.pool[copy.block])
            elif not transfer.save:
                # a slot that was reused, or never existed, gives some bytes, as shared memory does
                self.worker.pool[copy.block] = list(slot.values) if slot else self.worker.poison()
            sums.append(checksum_of(self.worker.pool[copy.block]))
        held = bytes(ok and (transfer.save or sums[i] == copy.checksum) for i, copy in enumerate(transfer.copies))
        return Transferred(epoch=transfer.epoch, seq=transfer.seq, checksums=pack_u64(sums), ok=held, seconds=0.0)

    def _slot(self, copy: Copy) -> Slot | None:
        return self.store.slots.get(copy.offset // 64)

    def _owner(self, block: int) -> int:
        kv = self.engine._home.kv
        assert kv is not None
        return kv._pool.owner(block)

    def _check_plan(self, plan: Plan, before: list[Plan]) -> None:
        """Rows write only blocks that are their request's own, each by one row; the budget holds."""
        self.losses.check_plan(plan, before)
        size, written, total = self.facts.block_tokens, set[int](), 0
        for row in plan.rows:
            table = unpack_u32(row.blocks)
            total += fed(row)
            assert not (row.feeds_last and row.ids)
            for block in table[row.start // size :]:
                assert self._owner(block) == REQUEST
                assert block not in written
                written.add(block)
            assert all(self._owner(block) != FREE for block in table)
        assert 0 < total <= self.settings.step_tokens

    def _poison_free_blocks(self) -> None:
        kv = self.engine._home.kv
        if kv is None or self.worker is None:
            return
        owners = kv._pool._owner
        for block in range(self.facts.blocks):
            if owners[block] != FREE:
                self.worker.clean.discard(block)
            elif block not in self.worker.clean:
                self.worker.clean.add(block)
                self.worker.pool[block] = self.worker.poison()


def prompts(random: Random, count: int, longest: int, *, families: int = 3) -> Iterator[list[int]]:
    """Prompts that share prefixes of several families."""
    stems = [[random.randrange(VOCAB) for _ in range(longest)] for _ in range(families)]
    for _ in range(count):
        length = random.randint(1, longest)
        keep = random.randint(0, length)
        stem = stems[random.randrange(families)]
        yield stem[:keep] + [random.randrange(VOCAB) for _ in range(length - keep)]
