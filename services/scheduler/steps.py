"""Plans, at most two of them out, and their results, in order.

next_plan:  force a retraction (tests) ─► blocks for each decode, oldest first, retracting the newest
            ─► decodes, then running prefills, into the budget ─► admissions into the rest
            ─► who was in a lost step alone ─► rows
result:     tokens appended, full blocks published ─► journal Admit, Step ─► ended requests ─► told

A plan is made while the one before it runs, on the assumption that every row of that one goes on; the worker feeds
what it has drawn itself. A request that ends meanwhile has one row too many: its result is dropped, nothing of it is
journaled, told or published, and its blocks are freed when that result is in.

When all rows are decodes and nobody waits, a plan is for several steps, as many as take `burst_s`: what a plan costs
beside the worker's computing is paid once for all of them. Who comes meanwhile curtails the plans that are out, so that
it waits no longer than behind single steps.

Nobody's blocks are taken while a plan is out, and no suspect of a lost step is planned beside or behind anything: then
the next plan waits for the result.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from services.scheduler.batch import Batch, Slice, decodes_first
from services.scheduler.desk import Desk
from services.scheduler.events import Advanced, ToWorker
from services.scheduler.limits import MOST_LOAD_LOSSES
from services.scheduler.policy import WaitingQueue
from services.scheduler.records import Admit, Step, StepRow
from services.scheduler.request import Request
from services.scheduler.residence import Residence
from services.scheduler.told import Told
from shared.messages.engine import MOST_STEPS, Curtail, Plan, Result, RowResult
from shared.messages.front import FinishReason

LEAST_TOLD = 16
"""Tokens of a prompt in a step from which its seconds tell anything."""

Finisher = Callable[[float, Request, FinishReason, tuple[str, str] | None], None]
End = tuple[FinishReason, tuple[str, str] | None]
"""Why a request ends, and the code and text of an error."""


@dataclass(frozen=True)
class _Out:
    """An outstanding plan. `replaced`: blocks that it names and that nobody else needs any more, pinned."""

    seq: int
    slices: list[Slice]
    steps: int
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
        self._curtailed = 0
        """Number of the last plan that was."""
        self._decode_s: float | None = None
        """Seconds of a step of decodes alone, smoothed."""

    @property
    def in_flight(self) -> int:
        """Rows of the outstanding plans."""
        return sum(len(out.slices) for out in self._outs)

    def worker_down(self) -> list[Request]:
        """The outstanding plans will never be answered; returns whose they were."""
        outs, self._outs = self._outs, deque()
        self._told.forget()
        self._decode_s = None
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
        slices = list(batch.slices.values())
        steps = self._steps_of(slices)
        seq, living = self._desk.next_seq(), self._home.running
        plan = self._told.plan(self._desk.epoch, seq, slices, kv.block_tokens, living, steps)
        for request, count, draws in slices:
            request.plan(count + steps - 1, steps * draws)
            if request.load is not None:
                self._home.loader.planned(request.load, count)
            self._turns += 1
            request.last_turn = self._turns
            if request.admit is None:
                self._begin(now, request)
        self._outs.append(_Out(seq, slices, steps))
        return plan

    def _steps_of(self, slices: list[Slice]) -> int:
        """How many steps in a row the next plan may stand for; there are blocks for all of them then."""
        settings, running = self._desk.settings, self._home.running.values()
        if not settings.burst_s or settings.retract_every or self._decode_s is None or len(self._waiting):
            return 1
        if any(tokens > 1 or not draws or request.losses for request, tokens, draws in slices):
            return 1
        steps = min(MOST_STEPS, *(part.request.drawable for part in slices))
        if self._decode_s:
            steps = min(steps, int(settings.burst_s / self._decode_s))
        if steps < 2 or any(request.load is not None for request in running):
            return 1
        return steps if all(self._home.reserve(part.request, steps - 1) for part in slices) else 1

    def curtail(self) -> None:
        """Somebody has come: plans of several steps end with the step that they are in."""
        last = self._outs[-1].seq if self._outs else 0
        if last > self._curtailed and any(out.steps > 1 for out in self._outs):
            self._curtailed = last
            self._desk.counters.curtailed += 1
            self._desk.effects.append(ToWorker(Curtail(epoch=self._desk.epoch, seq=last)))

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
        rows = dict[int, list[RowResult]]()
        for row in result.rows:
            rows.setdefault(row.key, []).append(row)
        self._desk.counters.steps += max(map(len, rows.values()), default=0)
        records = list[StepRow]()
        advanced = list[Request]()
        ended = list[tuple[Request, FinishReason, tuple[str, str] | None]]()
        self._home.unpin(out.replaced)
        self._measure(now, out, result)
        for part in out.slices:
            request = part.request
            request.planned_result(part.tokens + out.steps - 1, out.steps * part.draws)
            told = rows.get(request.key, [])[: out.steps]
            if request.finish is not None:
                self._desk.counters.dropped_rows += len(told)
                self._home.left(request)
                continue
            if not told:
                told = [RowResult(request.key, error="the worker sent no result for this row")]
            before, end = request.output_tokens, None
            for row in told:
                if end := self._take(now, part, row):
                    break
            self._record(request, before, records)
            if end:
                ended.append((request, *end))
                continue
            if len(told) < out.steps:
                self._told.fell_short(request.key, out.steps - len(told))
            if part.draws:
                advanced.append(request)
        if records:
            self._desk.journal(Step(at=now, rows=tuple(records)))
        for request in advanced:
            self._desk.effects.append(Advanced(request.id))
        for request, why, what in ended:
            self._finish(now, request, why, what)

    def _measure(self, now: float, out: _Out, result: Result) -> None:
        """A step that was nearly all of one prompt tells how quickly prompts are computed, one without any how quickly
        decodes are.
        """
        if result.rows and all(part.tokens == 1 for part in out.slices):
            each = result.forward_s * len(out.slices) / len(result.rows)
            self._decode_s = each if self._decode_s is None else (self._decode_s + each) / 2
        part = max(out.slices, key=lambda part: part.tokens)
        rest = sum(other.tokens for other in out.slices) - part.tokens
        if part.tokens >= LEAST_TOLD and rest * 8 <= part.tokens and part.request.seq is not None:
            self._home.loader.computed_step(now, part.tokens, part.request.computed, result.forward_s)

    def _take(self, now: float, part: Slice, row: RowResult) -> End | None:
        """One row's outcome in one step; returns how the request ends with it, if it does."""
        request = part.request
        if (fault := _fault(part, row)) is not None:
            return "error", ("internal", fault)
        if request.admit is not None and request.load is None and not request.admit_journaled:
            request.admit_journaled = True
            self._desk.journal(request.admit)
        self._desk.counters.computed_tokens += part.tokens
        replaced = self._home.computed(now, request, part.tokens)
        if replaced:
            self._outs[-1].replaced.extend(replaced)
        request.came_to(request.computed)
        if part.draws:
            request.add(now, row.token, row.logprob)
            self._desk.counters.output_tokens += 1
        reason = request.natural_end()
        return None if reason is None else (reason, None)

    @staticmethod
    def _record(request: Request, before: int, records: list[StepRow]) -> None:
        """For the journal: what it has drawn since it had `before` tokens of output."""
        if request.output_tokens > before:
            drawn = request.tokens[request.prompt_tokens + before :]
            logprobs = None if request.logprobs is None else tuple(request.logprobs[before:])
            records.append(StepRow(request.key, before, drawn.tobytes(), logprobs))


def _fault(part: Slice, row: RowResult) -> str | None:
    """What is wrong with a row's outcome."""
    at = part.request.output_tokens
    if row.error is not None:
        return row.error
    if row.dropped:
        return f"the worker dropped the row of output {at}, though nothing had ended the request"
    if part.draws and not 0 <= row.token < 1 << 32:
        return f"the worker drew no token for output {at}"
    return None
