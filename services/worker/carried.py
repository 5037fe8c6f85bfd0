"""What is carried from one plan to the next: a plan made while another ran doesn't say what that one drew.

plan n  ─► token of key k ─► plan n+1: k feeds it, unless it ended k: then k's row is dropped, nothing is computed
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from services.worker.rows import BadRow
from shared.messages.base import pack_u32
from shared.messages.engine import Row, RowResult


@dataclass(frozen=True)
class Dropped:
    """A row of a request that the plan before has ended."""


class Carried:
    """Outcomes of the plan before, of one epoch. Belongs to the compute thread."""

    def __init__(self) -> None:
        self._epoch = -1
        self._drawn: dict[int, bytes] = {}
        """By key, the drawn token, packed."""
        self._ended: set[int] = set()

    def begin(self, epoch: int) -> None:
        """A plan of this epoch follows; what older ones drew means nothing to it."""
        if epoch != self._epoch:
            self._epoch, self._drawn, self._ended = epoch, {}, set()

    def complete(self, row: Row) -> Row | Dropped:
        """The row with the ids that it feeds. BadRow when the plan before drew nothing for it to feed."""
        if row.key in self._ended:
            return Dropped()
        if not row.feeds_last:
            return row
        drawn = self._drawn.get(row.key)
        if drawn is None or row.ids:
            raise BadRow(f"it feeds what the plan before drew, which drew {'a token' if drawn else 'nothing'} for it")
        return msgspec.structs.replace(row, ids=drawn, feeds_last=False)

    def end(self, rows: Sequence[Row], results: Sequence[RowResult]) -> None:
        """The plan is over, with these outcomes of its rows."""
        self._drawn, self._ended = {}, set()
        for row, result in zip(rows, results, strict=True):
            if result.error is not None or result.dropped or result.token in row.stop_ids:
                self._ended.add(row.key)
            elif result.token >= 0:
                self._drawn[row.key] = pack_u32([result.token])
