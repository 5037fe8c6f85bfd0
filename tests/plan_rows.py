"""What the deltas of plans mean, told again in the plainest way: the worlds of the tests see whole rows only."""

from collections import deque

import msgspec

from services.worker.sessions import Part, Sessions
from shared.messages.base import unpack_u32, unpack_u64
from shared.messages.engine import MOST_STEPS, KVFacts, Plan, Result, Row, WorkerReady


def fed(row: Row) -> int:
    """Tokens that a row feeds."""
    return 1 if row.feeds_last else len(unpack_u32(row.ids))


def after(row: Row, steps: int) -> Row:
    """The row of the same request so many decode steps later."""
    if not steps:
        return row
    start = row.start + steps if steps < 0 else row.start + fed(row) + steps - 1
    return msgspec.structs.replace(row, start=start, ids=b"", drawn=row.drawn + steps, feeds_last=True)


class PlanRows:
    """Of one worker in one epoch; plans in their order."""

    def __init__(self) -> None:
        self.last: dict[int, Row] = {}

    def whole(self, plan: Plan) -> Plan:
        """The same plan with every row of its first step whole. AssertionError when it names what was never told."""
        for key in unpack_u64(plan.gone):
            del self.last[key]
        for grown in plan.grown:
            row = self.last[grown.key]
            self.last[grown.key] = msgspec.structs.replace(row, blocks=row.blocks + grown.blocks)
        rows = list[Row]()
        for key in unpack_u64(plan.goes_on):
            row = self.last[key]
            assert row.sample is not None
            rows.append(after(row, 1))
        rows += plan.rows
        self.last |= {row.key: after(row, plan.steps - 1) for row in rows}
        assert len({row.key for row in rows}) == len(rows) > 0
        assert 1 <= plan.steps <= MOST_STEPS
        assert plan.steps == 1 or all(fed(row) == 1 and row.sample is not None for row in rows)
        return Plan(epoch=plan.epoch, seq=plan.seq, rows=tuple(rows), steps=plan.steps)

    def fell_short(self, plan: Plan, by: int) -> None:
        """A plan was curtailed by so many steps."""
        self.last |= {row.key: after(self.last[row.key], -by) for row in plan.rows if row.key in self.last}


class Checked:
    """The worker's own account beside the naive one: both read the same plans, and must come to the same rows."""

    def __init__(self, facts: KVFacts, vocab: int, max_context: int) -> None:
        ready = WorkerReady(
            model="",
            architecture="",
            vocab=vocab,
            max_context=max_context,
            backend="",
            numerics="",
            kv=facts,
            limits={},
        )
        self._sessions = Sessions(ready)
        self._plans = deque[tuple[Plan, int]]()
        """With how many requests the worker knows then."""
        self._rows = PlanRows()

    def whole(self, plan: Plan) -> Plan:
        """A plan that was just made."""
        whole = self._rows.whole(plan)
        self._plans.append((plan, len(self._rows.last)))
        return whole

    def ran(self, whole: Plan, result: Result) -> None:
        """A plan was computed, in its turn, maybe curtailed."""
        plan, known = self._plans.popleft()
        assert plan.seq == whole.seq
        parts = self._sessions.complete(plan)
        count = len(whole.rows)
        for step in range(len(result.rows) // count):
            if step:
                parts = self._sessions.go_on(parts)
            outcomes = result.rows[step * count : (step + 1) * count]
            for part, first, outcome in zip(parts, whole.rows, outcomes, strict=True):
                row = after(first, step)
                assert part.key == row.key
                if isinstance(part, Part):
                    assert part.count == fed(row)
                    assert part.end == row.start + part.count
                    assert row.feeds_last or part.row.ids == row.ids
                    assert part.row == msgspec.structs.replace(row, ids=part.row.ids, feeds_last=False)
                else:
                    assert outcome.dropped
                    assert part.error == ""
                self._sessions.note(part, outcome)
        assert len(self._sessions) == known

    def fell_short(self, plan: Plan, by: int) -> None:
        """See `PlanRows`."""
        self._rows.fell_short(plan, by)
