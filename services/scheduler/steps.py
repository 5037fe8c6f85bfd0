"""One step at a time: make the plan, take its result.

next_plan:  force a retraction (tests) ─► blocks for each decode, oldest first, retracting the newest
            ─► decodes, then running prefills, into the budget ─► admissions into the rest
            ─► who was in a lost step alone ─► rows
result:     tokens appended, full blocks published ─► journal Admit, Step ─► ended requests ─► told
"""

from collections.abc import Callable
from dataclasses import dataclass

from services.scheduler.batch import Batch, decodes_first
from services.scheduler.desk import Desk
from services.scheduler.events import Advanced
from services.scheduler.limits import MOST_LOAD_LOSSES
from services.scheduler.policy import WaitingQueue
from services.scheduler.records import Admit, Step, StepRow
from services.scheduler.request import Request
from services.scheduler.residence import Residence
from shared.messages.base import pack_u32
from shared.messages.engine import Plan, Result, RowResult
from shared.messages.front import FinishReason, TokenLogprob

Finisher = Callable[[float, Request, FinishReason, tuple[str, str] | None], None]


@dataclass(frozen=True)
class _Out:
    """The outstanding plan: its seq, and how many tokens each request has in it."""

    seq: int
    slices: dict[int, tuple[Request, int]]


class Steps:
    """Plans and results. `finish` ends a request; `retracted` is told who has to wait again."""

    def __init__(self, desk: Desk, home: Residence, waiting: WaitingQueue, finish: Finisher) -> None:
        self._desk = desk
        self._home = home
        self._waiting = waiting
        self._finish = finish
        self._out: _Out | None = None
        self._steps_unforced = 0
        self._turns = 0

    @property
    def in_flight(self) -> int:
        """Rows of the outstanding plan."""
        return len(self._out.slices) if self._out else 0

    def worker_down(self) -> list[Request]:
        """The outstanding plan will never be answered; returns whose it was."""
        out, self._out = self._out, None
        return [request for request, _ in out.slices.values()] if out else []

    # --- planning -----------------------------------------------------------------------------------------------

    def next_plan(self, now: float) -> Plan | None:
        """The next step, or None when one is out, there is no pool, or nothing can run."""
        kv = self._home.kv
        if kv is None or self._out is not None:
            return None
        self._retract_by_force(now)
        for request in sorted(self._home.running.values(), key=lambda request: request.key):
            if request.load is None and request.key in self._home.running:
                self._wait_again(self._home.make_room(now, request))
        batch = Batch(self._desk.settings.step_tokens)
        for request in decodes_first(self._home.running.values()):
            if self._home.has_room(request, len(request.tokens)):
                batch.add(request)
        self._admit(now, batch)
        batch = batch.isolated()
        self._home.saver.go_on(now)
        if not batch.slices:
            return None
        self._desk.counters.steps += 1
        for request, count in batch.slices.values():
            request.in_flight = count
            self._turns += 1
            request.last_turn = self._turns
            if request.admit is None:
                device, host, disk = request.from_tier
                request.admit = Admit(request.key, now, device, host, disk)
                self._desk.counters.prompt_tokens += request.prompt_tokens
                self._desk.counters.cached_device += device
                self._desk.counters.cached_host += host
                self._desk.counters.cached_disk += disk
        self._out = _Out(self._desk.next_seq(), batch.slices)
        return Plan(epoch=self._desk.epoch, seq=self._out.seq, rows=batch.rows(kv.block_tokens))

    def _wait_again(self, retracted: list[Request]) -> None:
        for request in retracted:
            self._waiting.add(request)

    def _retract_by_force(self, now: float) -> None:
        """Fault hook: every `retract_every` steps the newest request that got anywhere gives its blocks up."""
        every = self._desk.settings.retract_every
        if not every or not self._home.running:
            return
        self._steps_unforced += 1
        if self._steps_unforced <= every:
            return
        for request in sorted(self._home.running.values(), key=lambda request: -request.key):
            if self._home.may_be_forced(request):
                self._steps_unforced = 0
                request.forced_at = request.output_tokens
                self._desk.counters.retracted_by_force += 1
                self._home.retract(now, request)
                self._waiting.add(request)
                return

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
        """Outcome of the outstanding plan; any other is ignored."""
        out = self._out
        if out is None or result.epoch != self._desk.epoch or result.seq != out.seq:
            self._desk.counters.stale_results += 1
            return
        self._out = None
        rows = {row.key: row for row in result.rows}
        records = list[StepRow]()
        ended = list[tuple[Request, FinishReason, tuple[str, str] | None]]()
        for request, count in out.slices.values():
            if request.finish is not None:
                self._desk.counters.dropped_rows += 1
                self._home.left(request)
                continue
            request.in_flight = 0
            row = rows.get(request.key, RowResult(request.key, error="the worker sent no result for this row"))
            error = self._take(now, request, count, row, records)
            if error is not None:
                ended.append((request, "error", ("internal", error)))
            elif reason := request.natural_end():
                ended.append((request, reason, None))
        if records:
            self._desk.journal(Step(at=now, rows=tuple(records)))
        finished = {request.key for request, _, _ in ended}
        for record in records:
            if record.key not in finished:
                self._desk.effects.append(Advanced(out.slices[record.key][0].id))
        for request, why, what in ended:
            self._finish(now, request, why, what)

    def _take(self, now: float, request: Request, count: int, row: RowResult, records: list[StepRow]) -> str | None:
        """One row's outcome; returns what went wrong."""
        if row.error is not None:
            return row.error
        sampled = request.pending == count
        if sampled and not 0 <= row.token < 1 << 32:
            return f"the worker drew no token for output {request.output_tokens}"
        if request.admit is not None and not request.admit_journaled:
            request.admit_journaled = True
            self._desk.journal(request.admit)
        self._desk.counters.computed_tokens += count
        self._home.computed(request, count)
        request.came_to(request.computed)
        if sampled:
            logprobs = None if request.logprobs is None else (row.logprob or TokenLogprob(0.0, b"", ()),)
            records.append(StepRow(request.key, request.output_tokens, pack_u32([row.token]), logprobs))
            request.add(now, row.token, logprobs[0] if logprobs else None)
            self._desk.counters.output_tokens += 1
        return None
