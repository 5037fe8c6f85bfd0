"""Plans, at most two of them out, and their results, in order.

next_plan:  force a retraction (tests) ─► blocks for each decode, oldest first, retracting the newest
            ─► decodes, then running prefills, into the budget ─► admissions into the rest
            ─► who was in a lost step alone ─► rows
result:     tokens appended, full blocks published ─► journal Admit, Step ─► ended requests ─► told

A plan is made while the one before it runs, on the assumption that every row of that one goes on; the worker feeds
what it has drawn itself. A request that ends meanwhile has one row too many: its result is dropped, nothing of it is
journaled, told or published, and its blocks are freed when that result is in.

Nobody's blocks are taken while a plan is out, and no suspect of a lost step is planned beside or behind anything: then
the next plan waits for the result.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from services.scheduler.batch import Batch, Slice, decodes_first
from services.scheduler.desk import Desk
from services.scheduler.events import Advanced
from services.scheduler.limits import MOST_LOAD_LOSSES
from services.scheduler.policy import WaitingQueue
from services.scheduler.records import Admit, Step, StepRow
from services.scheduler.request import Request
from services.scheduler.residence import Residence
from services.scheduler.told import Told
from shared.messages.base import pack_u32
from shared.messages.engine import Plan, Result, RowResult
from shared.messages.front import FinishReason, TokenLogprob

LEAST_TOLD = 16
"""Tokens of a prompt in a step from which its seconds tell anything."""

Finisher = Callable[[float, Request, FinishReason, tuple[str, str] | None], None]


@dataclass(frozen=True)
class _Out:
    """An outstanding plan. `replaced`: blocks that it names and that nobody else needs any more, pinned."""

    seq: int
    slices: list[Slice]
    replaced: list[int] = field(default_factory=list)


class Steps:
    """Plans and results. `finish` ends a request; `retracted` is told who has to wait again."""

    def __init__(self, desk: Desk, home: Residence, waiting: WaitingQueue, finish: Finisher) -> None:
        self._desk = desk
        self._home = home
        self._waiting = waiting
        self._finish = finish
        self._outs: deque[_Out] = deque()
        self._told = Told()
        self._steps_unforced = 0
        self._turns = 0

    @property
    def in_flight(self) -> int:
        """Rows of the outstanding plans."""
        return sum(len(out.slices) for out in self._outs)

    def worker_down(self) -> list[Request]:
        """The outstanding plans will never be answered; returns whose they were."""
        outs, self._outs = self._outs, deque()
        self._told.forget()
        return list({part.request.key: part.request for out in outs for part in out.slices}.values())

    # --- planning -----------------------------------------------------------------------------------------------

    def next_plan(self, now: float) -> Plan | None:
        """The next step, or None when enough are out, there is no pool, or nothing can run."""
        kv = self._home.kv
        if kv is None or len(self._outs) >= self._desk.settings.plans_out:
            return None
        if not self._outs:
            forced = self._retract_by_force(now)
            self._make_room(now)
        elif self._must_wait() or not self._reserve():
            return None
        else:
            forced = False
        self._home.loader.allow(now)
        batch = Batch(self._desk.settings.step_tokens)
        for request in decodes_first(self._home.running.values()):
            if self._home.has_room(request):
                batch.add(request)
        self._admit(now, batch)
        batch = batch.isolated()
        self._home.saver.go_on(now)
        if not batch.slices:
            return None
        self._steps_unforced += not forced
        self._desk.counters.steps += 1
        slices = list(batch.slices.values())
        seq, living = self._desk.next_seq(), self._home.running
        plan = self._told.plan(self._desk.epoch, seq, slices, kv.block_tokens, living)
        for request, count, draws in slices:
            request.plan(count, draws=draws)
            if request.load is not None:
                self._home.loader.planned(request.load, count)
            self._turns += 1
            request.last_turn = self._turns
            if request.admit is None:
                self._begin(now, request)
        self._outs.append(_Out(seq, slices))
        return plan

    def _begin(self, now: float, request: Request) -> None:
        """It is in a step for the first time."""
        device, host, disk = request.from_tier
        request.admit = Admit(request.key, now, device, host, disk)
        self._desk.counters.prompt_tokens += request.prompt_tokens
        self._desk.counters.cached_device += device
        self._desk.counters.cached_host += host
        self._desk.counters.cached_disk += disk

    def _growing(self) -> list[Request]:
        """Oldest first."""
        return [request for key, request in sorted(self._home.running.items()) if request.load is None]

    def _make_room(self, now: float) -> None:
        for request in self._growing():
            if request.key in self._home.running:
                for retracted in self._home.make_room(now, request):
                    self._waiting.add(retracted)

    def _must_wait(self) -> bool:
        """Whether the next plan has to wait for a result, whatever the room."""
        if any(part.request.losses for out in self._outs for part in out.slices):  # maybe ended meanwhile
            return True
        if any(request.losses for request in self._home.running.values()):
            return True
        if any(request.losses for request in islice(self._waiting, self._desk.settings.scan)):
            return True
        return self._force_due() and any(self._home.may_be_forced(request) for request in self._home.running.values())

    def _reserve(self) -> bool:
        """Blocks for the tokens that the outstanding plan draws; False when someone would have to give some up."""
        return all(self._home.reserve(request) for request in self._growing())

    def _force_due(self) -> bool:
        every = self._desk.settings.retract_every
        return 0 < every <= self._steps_unforced

    def _retract_by_force(self, now: float) -> bool:
        """Fault hook: every `retract_every` steps the newest request that got anywhere gives its blocks up."""
        if not self._force_due():
            return False
        for request in sorted(self._home.running.values(), key=lambda request: -request.key):
            if self._home.may_be_forced(request):
                self._steps_unforced = 0
                request.forced_at = request.output_tokens
                self._desk.counters.retracted_by_force += 1
                self._home.retract(now, request)
                self._waiting.add(request)
                return True
        return False

    def _admit(self, now: float, batch: Batch) -> None:
        kept_for: Request | None = None
        for request in self._waiting.candidates(self._home.cached_blocks):
            if len(self._home.running) >= self._desk.settings.max_running:
                return
            if kept_for is not None and not self._home.leaves_room(request, kept_for):
                continue
            if self._consider(now, request, batch) and kept_for is None and self._waiting.aged(request):
                kept_for = request

    def _consider(self, now: float, request: Request, batch: Batch) -> bool:
        """Admits a request, or looks its prefix up, or lets it wait.

        True when it waits for room or for a lookup: room is kept for an aged one then.
        """
        home = self._home
        if request.load is not None:
            return True
        cached, wanted = home.cached_blocks(request), home.wanted_blocks(request)
        if not home.may_fit(request, cached):
            return True
        if cached < wanted:
            if home.has_maker(request, cached):
                self._desk.counters.shared_waits += not request.sharing
                request.sharing = True
                return False
            if self._look_up(now, request, cached, wanted):
                return True
        if not batch.left:
            return False
        if not home.admit(request):
            return True
        self._waiting.admitted(request)
        batch.add(request)
        return False

    def _look_up(self, now: float, request: Request, cached: int, wanted: int) -> bool:
        """Asks the store for the blocks that the device lacks; False when there is no point in waiting for it."""
        store, loader = self._desk.store, self._home.loader
        if store is None or not store.arena or self._desk.clears_out or not request.lookups_left:
            return False
        if loader.breaker.open:
            self._desk.counters.waits_refused += 1
            if loader.breaker.may_probe(now):
                loader.probe(now, self._home.names(request, 1)[0])
            return False
        if request.load_losses >= MOST_LOAD_LOSSES:
            return False
        if any(other.losses for other in self._home.running.values()):
            return True  # one suspect at a time: a load that kills must not be taken for their step
        if loader.active >= self._desk.settings.max_loads or not self._home.fits(request):
            return True
        request.lookups_left -= 1
        loader.ask(now, request, cached, self._home.names(request, wanted)[cached:])
        self._home.announce(request, cached, wanted)
        return True

    # --- results ------------------------------------------------------------------------------------------------

    def result(self, now: float, result: Result) -> None:
        """Outcome of an outstanding plan; any other is ignored."""
        seqs = [out.seq for out in self._outs]
        if result.epoch != self._desk.epoch or result.seq not in seqs:
            self._desk.counters.stale_results += 1
            return
        for seq in seqs[: seqs.index(result.seq)]:  # the worker keeps the order: what should have come before is lost
            self._over(now, self._outs.popleft(), Result(epoch=result.epoch, seq=seq, rows=(), forward_s=0.0))
        self._over(now, self._outs.popleft(), result)

    def _over(self, now: float, out: _Out, result: Result) -> None:
        rows = {row.key: row for row in result.rows}
        records = list[StepRow]()
        advanced = list[Request]()
        ended = list[tuple[Request, FinishReason, tuple[str, str] | None]]()
        self._home.unpin(out.replaced)
        self._measure(now, out, result)
        for part in out.slices:
            request = part.request
            request.planned_result(part.tokens, draws=part.draws)
            if request.finish is not None:
                self._desk.counters.dropped_rows += 1
                self._home.left(request)
                continue
            row = rows.get(request.key, RowResult(request.key, error="the worker sent no result for this row"))
            error = self._take(now, part, row, records)
            if error is not None:
                ended.append((request, "error", ("internal", error)))
            elif reason := request.natural_end():
                ended.append((request, reason, None))
            elif part.draws:
                advanced.append(request)
        if records:
            self._desk.journal(Step(at=now, rows=tuple(records)))
        for request in advanced:
            self._desk.effects.append(Advanced(request.id))
        for request, why, what in ended:
            self._finish(now, request, why, what)

    def _measure(self, now: float, out: _Out, result: Result) -> None:
        """A step that was nearly all of one prompt tells how quickly prompts are computed."""
        part = max(out.slices, key=lambda part: part.tokens)
        rest = sum(other.tokens for other in out.slices) - part.tokens
        if part.tokens >= LEAST_TOLD and rest * 8 <= part.tokens and part.request.seq is not None:
            self._home.loader.computed_step(now, part.tokens, part.request.computed, result.forward_s)

    def _take(self, now: float, part: Slice, row: RowResult, records: list[StepRow]) -> str | None:
        """One row's outcome; returns what went wrong."""
        request = part.request
        if row.error is not None:
            return row.error
        if row.dropped:
            return f"the worker dropped the row of output {request.output_tokens}, though nothing had ended the request"
        if part.draws and not 0 <= row.token < 1 << 32:
            return f"the worker drew no token for output {request.output_tokens}"
        if request.admit is not None and request.load is None and not request.admit_journaled:
            request.admit_journaled = True
            self._desk.journal(request.admit)
        self._desk.counters.computed_tokens += part.tokens
        replaced = self._home.computed(now, request, part.tokens)
        if replaced:
            self._outs[-1].replaced.extend(replaced)
        request.came_to(request.computed)
        if part.draws:
            logprobs = None if request.logprobs is None else (row.logprob or TokenLogprob(0.0, b"", ()),)
            records.append(StepRow(request.key, request.output_tokens, pack_u32([row.token]), logprobs))
            request.add(now, row.token, logprobs[0] if logprobs else None)
            self._desk.counters.output_tokens += 1
        return None
