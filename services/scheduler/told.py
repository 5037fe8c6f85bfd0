"""What the worker knows of each request, so that a plan says only what is new.

    first row of a request, a prefill chunk, a table that was rewritten ─► a whole Row
    a decode that only goes on                                          ─► its key
    a further block                                                     ─► its id, once
    ended, retracted                                                    ─► its key, to be forgotten
    several decode steps in a row                                       ─► their number; blocks for all of them

So the bytes of a decode step grow with its rows, not with their context. The plans are applied in their order by one
worker in one epoch; a new epoch knows nothing.
"""

from array import array
from collections.abc import Container, Iterable
from dataclasses import dataclass

from services.scheduler.batch import Slice
from services.scheduler.kv.sequence import Sequence
from shared.messages.base import pack_u32, pack_u64
from shared.messages.engine import Grown, Plan, Row


@dataclass
class _Known:
    """As of the last plan that named it: `blocks` of its table, whose ids were `rewrites` times replaced, `end` tokens
    fed, and whether a token was drawn behind them.
    """

    seq: Sequence
    rewrites: int
    blocks: int
    end: int
    draws: bool

    def leads_to(self, start: int, table: Sequence) -> bool:
        """Whether the token that it drew is the one at `start`, and its table is this one's beginning."""
        return self.draws and self.end == start and self.seq is table and self.rewrites == table.rewrites


class Told:
    """One epoch's account."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def forget(self) -> None:
        """Another epoch begins."""
        self._known.clear()

    def plan(
        self,
        epoch: int,
        seq: int,
        slices: Iterable[Slice],
        block_tokens: int,
        living: Container[int],
        steps: int = 1,
    ) -> Plan:
        """The message for so many steps; `living`: keys that may come again.

        To be called before the requests are told that they are in it.
        """
        gone = [key for key in self._known if key not in living]
        for key in gone:
            del self._known[key]
        rows, goes_on, grown = list[Row](), array("Q"), list[Grown]()
        for part in slices:
            request, count, draws = part
            key, table, start = request.key, request.seq, request.planned
            assert table is not None
            end = start + count + steps - 1
            blocks = -(-end // block_tokens)
            known = self._known.get(key)
            if known is not None and draws and count == 1 and known.leads_to(start, table):
                goes_on.append(key)
                if blocks > known.blocks:
                    grown.append(Grown(key, pack_u32(table.blocks[known.blocks : blocks])))
                    known.blocks = blocks
                known.end = end
            else:
                rows.append(_row(part, start, table.blocks[:blocks]))
                self._known[key] = _Known(table, table.rewrites, blocks, end, draws)
        return Plan(
            epoch=epoch,
            seq=seq,
            rows=tuple(rows),
            goes_on=goes_on.tobytes(),
            grown=tuple(grown),
            gone=pack_u64(gone) if gone else b"",
            steps=steps,
        )

    def fell_short(self, key: int, by: int) -> None:
        """A plan that named it was curtailed by so many steps: all that was told since begins as much earlier."""
        known = self._known.get(key)
        if known is not None:
            known.end -= by


def _row(part: Slice, start: int, blocks: list[int]) -> Row:
    request = part.request
    return Row(
        key=request.key,
        start=start,
        ids=request.tokens[start : start + part.tokens].tobytes(),
        blocks=pack_u32(blocks),
        sample=request.accept.sample if part.draws else None,
        drawn=request.output_tokens + request.drawing,
        stop_ids=request.accept.stop_ids,
        feeds_last=start >= len(request.tokens),
    )
