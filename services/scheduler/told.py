"""What the worker knows of each request, so that a plan says only what is new.

    first row of a request, a prefill chunk, a table that was rewritten ─► a whole Row
    a decode that only goes on                                          ─► its key
    a further block                                                     ─► its id, once
    ended, retracted                                                    ─► its key, to be forgotten

So the bytes of a decode step grow with its rows, not with their context. The plans are applied in their order by one
worker in one epoch; a new epoch knows nothing.
"""

from array import array
from collections.abc import Container, Iterable
from dataclasses import dataclass

from services.scheduler.kv.sequence import Sequence
from services.scheduler.request import Request
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
        slices: Iterable[tuple[Request, int]],
        block_tokens: int,
        living: Container[int],
    ) -> Plan:
        """The message for a step of these requests' next tokens, so many each; `living`: keys that may come again.

        To be called before the requests are told that they are in it.
        """
        gone = [key for key in self._known if key not in living]
        for key in gone:
            del self._known[key]
        rows, goes_on, grown = list[Row](), array("Q"), list[Grown]()
        for request, count in slices:
            assert request.seq is not None
            start = request.planned
            blocks = -(-(start + count) // block_tokens)
            draws = count == request.pending
            known = self._known.get(request.key)
            if (
                known is not None
                and known.draws
                and draws
                and known.end == start == request.reach - 1
                and known.seq is request.seq
                and known.rewrites == request.seq.rewrites
            ):
                goes_on.append(request.key)
                if blocks > known.blocks:
                    grown.append(Grown(request.key, pack_u32(request.seq.blocks[known.blocks : blocks])))
                    known.blocks = blocks
                known.end = start + 1
            else:
                rows.append(_row(request, start, count, blocks, draws=draws))
                self._known[request.key] = _Known(request.seq, request.seq.rewrites, blocks, start + count, draws)
        return Plan(
            epoch=epoch,
            seq=seq,
            rows=tuple(rows),
            goes_on=goes_on.tobytes(),
            grown=tuple(grown),
            gone=pack_u64(gone) if gone else b"",
        )


def _row(request: Request, start: int, count: int, blocks: int, *, draws: bool) -> Row:
    assert request.seq is not None
    return Row(
        key=request.key,
        start=start,
        ids=request.tokens[start : start + count].tobytes(),
        blocks=pack_u32(request.seq.blocks[:blocks]),
        sample=request.accept.sample if draws else None,
        drawn=request.output_tokens + request.drawing,
        stop_ids=request.accept.stop_ids,
        feeds_last=start == len(request.tokens),
    )
