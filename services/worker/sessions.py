"""What the worker keeps of each request between two plans: its last row, its block table, what was drawn.

A plan is a delta (see `Plan`). One made while another ran doesn't say what that one drew, and may name requests that
it has ended: those stay here as ended, until the scheduler lets go of them, and nothing is computed for them.

    Row, goes_on ─► complete ─► the row as the model is given it ─► note(outcome) ─► the next plan
    gone, or another epoch: forgotten
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from services.worker.rows import BadRow, checked
from shared.messages.base import pack_u32, unpack_u32, unpack_u64
from shared.messages.engine import Plan, Row, RowResult, WorkerReady


@dataclass(slots=True)
class Session:
    """`row`: the last one, complete; the next one starts at `end`. `last`: the token drawn behind it, packed."""

    row: Row
    end: int
    last: bytes | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A row that can be computed: it feeds `count` tokens up to position `end`."""

    row: Row
    count: int
    end: int

    @property
    def key(self) -> int:
        """Whose it is."""
        return self.row.key


@dataclass(frozen=True, slots=True)
class Unfit:
    """A row that can't: `error` says why, empty when its request has ended already."""

    key: int
    error: str = ""


def keys_of(plan: Plan) -> list[int]:
    """Whose rows a plan has, in the order of its results, as far as it is not torn."""
    return unpack_u64(plan.goes_on[: len(plan.goes_on) // 8 * 8]).tolist() + [row.key for row in plan.rows]


class Sessions:
    """Of one epoch. Belongs to the compute thread."""

    def __init__(self, limits: WorkerReady) -> None:
        self._limits = limits
        self._epoch = -1
        self._open: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def complete(self, plan: Plan) -> list[Part | Unfit]:
        """The plan's rows, in the order of its results, with all that the model needs. ValueError: it is torn."""
        if plan.epoch != self._epoch:
            self._epoch = plan.epoch
            self._open.clear()
        for key in unpack_u64(plan.gone):
            self._open.pop(key, None)
        for grown in plan.grown:
            self._grow(grown.key, grown.blocks)
        goes_on = [self._next(key) for key in unpack_u64(plan.goes_on)]
        return goes_on + [self._whole(row) for row in plan.rows]

    def go_on(self, parts: Iterable[Part | Unfit]) -> list[Part | Unfit]:
        """The rows of a plan's next step: of the same keys."""
        return [self._next(part.key) for part in parts]

    def note(self, part: Part | Unfit, result: RowResult) -> None:
        """The outcome of a row."""
        key = result.key
        session = self._open.get(key)
        if isinstance(part, Unfit):
            if session is None:  # its first row was wrong already
                session = self._open[key] = Session(Row(key, 0, b"", b"", None), 0)
            session.ended = True
            return
        if session is None:
            session = self._open[key] = Session(part.row, part.end)
        session.row, session.end = part.row, part.end
        session.last = pack_u32([result.token]) if result.token >= 0 else None
        session.ended = result.error is not None or result.dropped or result.token in part.row.stop_ids

    def _grow(self, key: int, blocks: bytes) -> None:
        session = self._open.get(key)
        if session is None:
            return
        if len(blocks) % 4 or max(unpack_u32(blocks), default=0) >= self._limits.kv.blocks:
            session.row = msgspec.structs.replace(session.row, blocks=b"")  # covers nothing: said of its next row
        else:
            session.row = msgspec.structs.replace(session.row, blocks=session.row.blocks + blocks)

    def _whole(self, row: Row) -> Part | Unfit:
        session = self._open.get(row.key)
        if session is not None and session.ended:
            return Unfit(row.key)
        try:
            if row.feeds_last:
                last = _last(session, row.ids)
                assert session is not None
                start, drawn = session.end, session.row.drawn + 1
                row = msgspec.structs.replace(row, start=start, drawn=drawn, ids=last, feeds_last=False)
            span = checked(row, self._limits)
        except BadRow as error:
            return Unfit(row.key, f"the plan's row is wrong: {error}")
        return Part(row, len(span.ids), span.end)

    def _next(self, key: int) -> Part | Unfit:
        session = self._open.get(key)
        if session is not None and session.ended:
            return Unfit(key)
        try:
            last = _last(session, b"")
        except BadRow as error:
            return Unfit(key, f"the plan's row is wrong: {error}")
        assert session is not None
        before, end, facts = session.row, session.end + 1, self._limits.kv
        covered = len(before.blocks) // 4 * facts.block_tokens
        if end > min(covered, self._limits.max_context):
            limits = f"a context of {self._limits.max_context}, its blocks {covered}"
            return Unfit(key, f"the plan's row is wrong: position {session.end} is fed, but there are {limits}")
        # Not msgspec's `replace`, which takes four times as long; this is once a token.
        row = Row(key, session.end, last, before.blocks, before.sample, before.drawn + 1, before.stop_ids)
        return Part(row, 1, end)


def _last(session: Session | None, ids: bytes) -> bytes:
    drawn = session.last if session is not None else None
    if drawn is None or ids:
        found = "nothing was" if drawn is None else f"it has {len(ids)} bytes of its own; a token was"
        raise BadRow(f"it feeds what was drawn last for its request, but {found} drawn")
    return drawn
