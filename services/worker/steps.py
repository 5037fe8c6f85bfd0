"""One plan to one result: check the rows, run the model, draw the tokens, once or several times. Runs in the compute
lane.

A row that is wrong, or that the model can't serve, ends its own request; the other rows go on. Only an exception that
nobody foresaw costs every row of its plan, and even then the worker serves the next one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from kernels.sampling import Draw, Drawn
from services.worker.page_store import PageStore
from services.worker.recorder import Recorder
from services.worker.runner import RowOutput, Runner, StepOutput
from services.worker.sessions import Part, Sessions, Unfit
from shared.config import ConfigError
from shared.faults import Faults
from shared.messages.base import pack_u32
from shared.messages.engine import MOST_STEPS, Plan, Result, Row, RowResult
from shared.messages.front import TokenLogprob


@dataclass(frozen=True)
class StepStatistics:
    """Totals since start: steps, tokens fed, tokens drawn, rows that ended in an error, rows dropped as their request
    had ended in a step before, seconds in steps.
    """

    steps: int
    tokens: int
    drawn: int
    errors: int
    dropped: int
    seconds: float


class Steps:
    """Executes plans. `execute` belongs to the compute thread; the counters may be read from any."""

    def __init__(self, runner: Runner, pool: PageStore, faults: Faults) -> None:
        self._runner = runner
        self._pool = pool
        self._faults = faults
        self._fixed = parse_fixed_ids(faults.config.fixed_ids, runner.ready.vocab)
        self._recorder = Recorder(Path(faults.config.record_plans)) if faults.config.record_plans else None
        self._log = structlog.get_logger(part="steps")
        self._sessions = Sessions(runner.ready)
        self._steps = self._tokens = self._drawn = self._errors = self._dropped = 0
        self._seconds = 0.0

    def execute(
        self, plan: Plan, wanted: Callable[[], bool], curtailed: Callable[[], bool] = lambda: False
    ) -> Result | None:
        """The plan's outcome, or None when it was no longer `wanted()` before it began. Never raises.

        Once it is `curtailed()`, a plan of several steps ends with the one that it is in.
        """
        if not wanted():
            return None
        started = time.perf_counter()
        try:
            parts = self._sessions.complete(plan)
            rows = self._rows(parts, plan)
        except ValueError as error:  # packed keys are torn: nobody knows whose rows these were
            self._log.error("plan_torn", epoch=plan.epoch, seq=plan.seq, reason=str(error))
            rows = [RowResult(key=row.key, error=f"the plan is torn: {error}") for row in plan.rows]
            parts = []
        self._steps += 1
        for _ in range(1, min(plan.steps, MOST_STEPS) if parts else 1):
            if curtailed() or not wanted():
                break
            parts = self._sessions.go_on(parts)
            rows += self._rows(parts, plan)
            self._steps += 1
        seconds = time.perf_counter() - started
        self._seconds += seconds
        self._drawn += sum(row.token >= 0 for row in rows)
        self._errors += sum(row.error is not None for row in rows)
        self._dropped += sum(row.dropped for row in rows)
        return Result(epoch=plan.epoch, seq=plan.seq, rows=tuple(rows), forward_s=seconds)

    def _rows(self, parts: list[Part | Unfit], plan: Plan) -> list[RowResult]:
        good = [part.row for part in parts if isinstance(part, Part)]
        if self._recorder is not None:
            self._recorder.append(Plan(epoch=plan.epoch, seq=plan.seq, rows=tuple(good)))
        try:
            output = self._runner.step(good, self._pool) if good else StepOutput()
            self._faults.at("worker_in_step")
            results = self._results(parts, output)
        except Exception as error:
            self._log.error("step_failed", epoch=plan.epoch, seq=plan.seq, rows=len(parts), exc_info=error)
            reason = f"the step failed: {type(error).__name__}: {error}"
            results = [RowResult(key=part.key, error=reason) for part in parts]
        for part, result in zip(parts, results, strict=True):
            self._sessions.note(part, result)
        return results

    def _results(self, parts: list[Part | Unfit], output: StepOutput) -> list[RowResult]:
        outputs = iter(output.rows)
        results: list[RowResult] = []
        drawing: dict[int, Draw] = {}
        for number, part in enumerate(parts):
            if isinstance(part, Unfit):
                results.append(RowResult(key=part.key, error=part.error or None, dropped=not part.error))
                continue
            self._tokens += part.count
            row, found = part.row, next(outputs)
            if row.sample is not None and found.error is None and found.logits is not None:
                drawing[number] = Draw(found.logits, row.sample, part.end, self._forced(row))
            results.append(self._undrawn(row, found))
        for number, drawn in zip(drawing, output.sample(list(drawing.values())), strict=True):
            results[number] = drawn_result(results[number].key, drawn, drawing[number].spec.logprobs >= 0)
        return results

    def _forced(self, row: Row) -> int:
        """The token that the fault hook wants of this row; -1: none."""
        return self._fixed[row.drawn] if row.drawn < len(self._fixed) else -1

    def _undrawn(self, row: Row, found: RowOutput) -> RowResult:
        """Of a row that draws nothing, nothing yet, or whose token the model itself fixed."""
        if found.error is not None or row.sample is None or found.logits is not None:
            return RowResult(key=row.key, error=found.error)
        if found.token is None:
            return RowResult(key=row.key, error="the model gave neither logits nor a token")
        forced = self._forced(row)
        token = found.token if forced < 0 else forced
        return RowResult(key=row.key, token=token, logprob=certain(token) if row.sample.logprobs >= 0 else None)

    def statistics(self) -> StepStatistics:
        """Totals, for status."""
        return StepStatistics(self._steps, self._tokens, self._drawn, self._errors, self._dropped, self._seconds)


def drawn_result(key: int, drawn: Drawn, wants_logprobs: bool) -> RowResult:
    """What was drawn, in the words of the protocol."""
    logprob = None
    if wants_logprobs and drawn.error is None:
        ids, values = [id for id, _ in drawn.top], tuple(value for _, value in drawn.top)
        logprob = TokenLogprob(chosen=drawn.logprob, top_ids=pack_u32(ids), top=values)
    return RowResult(key=key, token=drawn.token, logprob=logprob, error=drawn.error)


def certain(token: int) -> TokenLogprob:
    """The log-probability of a token that the model itself fixed: probability 1, no alternative."""
    return TokenLogprob(chosen=0.0, top_ids=pack_u32([token]), top=(0.0,))


def parse_fixed_ids(text: str, vocab: int) -> tuple[int, ...]:
    """The fault hook's "1,2,3" -> ids; () for none. ConfigError for anything else or an id outside `vocab`."""
    try:
        ids = tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise ConfigError(f"faults.fixed_ids {text!r} is no comma-separated list of token ids") from None
    for token in ids:
        if not 0 <= token < vocab:
            raise ConfigError(f"faults.fixed_ids names token {token}; the vocabulary has {vocab}")
    return ids
