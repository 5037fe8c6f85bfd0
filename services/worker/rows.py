"""Rows of a plan as integers, and what can be wrong with one."""

from dataclasses import dataclass

from shared.messages.base import unpack_u32
from shared.messages.engine import Row, WorkerReady


class BadRow(ValueError):
    """A row contradicts itself or the worker's limits; the text gives the numbers that clash."""


@dataclass(frozen=True)
class Span:
    """A row, unpacked: feed `ids` at positions [start, end) of a request whose KV lies in `blocks`."""

    ids: list[int]
    blocks: list[int]
    start: int

    @property
    def end(self) -> int:
        """Position after the last one fed: tokens of KV once the row is done, and where a drawn token goes."""
        return self.start + len(self.ids)


def checked(row: Row, limits: WorkerReady) -> Span:
    """Unpacks a row whose every id and position is within `limits`; BadRow otherwise. Touches nothing."""
    try:
        span = Span(unpack_u32(row.ids).tolist(), unpack_u32(row.blocks).tolist(), row.start)
    except ValueError as error:
        raise BadRow(f"packed ids or blocks are torn: {error}") from error
    facts = limits.kv
    if span.start < 0 or not span.ids:
        raise BadRow(f"a row feeds at least one token at a position >= 0, not {len(span.ids)} at {span.start}")
    if span.end > limits.max_context:
        raise BadRow(f"positions up to {span.end} are beyond the context of {limits.max_context}")
    if len(span.blocks) * facts.block_tokens < span.end:
        raise BadRow(f"{len(span.blocks)} blocks of {facts.block_tokens} tokens do not cover {span.end} positions")
    if max(span.blocks) >= facts.blocks:
        raise BadRow(f"block {max(span.blocks)} is outside the pool of {facts.blocks}")
    if max(span.ids) >= limits.vocab:
        raise BadRow(f"token {max(span.ids)} is outside the vocabulary of {limits.vocab}")
    return span
