"""What one ragged step consists of: tokens of several sequences, concatenated, each sequence with its block table.

A decode is a span of one token, a prefill chunk a longer one; nothing else tells them apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Span:
    """Tokens [first, first + count) of the batch are positions [start, start + count) of one sequence.

    `blocks`: int32 [>= ceil((start + count) / block_tokens)], physical block of each logical one. KV of [0, start)
    is in the pool; slots from start + count on have never been written and must not be multiplied, not even by 0.
    """

    first: int
    count: int
    start: int
    blocks: Ints

    @property
    def end(self) -> int:
        """Tokens of the sequence once this step is done."""
        return self.start + self.count


@dataclass(frozen=True)
class Batch:
    """`ids`, `positions`: int32 [T] over all spans, in their order.

    `sampled`: int32 [S], the tokens that want logits: the last ones of some spans, in the spans' order.
    """

    ids: Ints
    positions: Ints
    spans: tuple[Span, ...]
    sampled: Ints

    def only_sampled(self) -> "Batch":
        """The sampled tokens alone, each as a decode whose own KV is already in the pool."""
        if len(self.sampled) == len(self.ids):
            return self
        wanted = set(self.sampled.tolist())
        spans = [span for span in self.spans if span.first + span.count - 1 in wanted]
        return Batch(
            ids=self.ids[self.sampled],
            positions=self.positions[self.sampled],
            spans=tuple(Span(row, 1, span.end - 1, span.blocks) for row, span in enumerate(spans)),
            sampled=np.arange(len(spans), dtype=np.int32),
        )


def make_batch(rows: Sequence[tuple[int, Ints, Ints, bool]]) -> Batch:
    """Concatenates (start, ids int32 [n], blocks int32 [m], whether the last token wants logits) into a batch."""
    spans: list[Span] = []
    sampled: list[int] = []
    first = 0
    for start, ids, blocks, wants_logits in rows:
        spans.append(Span(first, len(ids), start, blocks))
        first += len(ids)
        if wants_logits:
            sampled.append(first - 1)
    return Batch(
        ids=np.concatenate([ids for _, ids, _, _ in rows]),
        positions=np.concatenate([np.arange(span.start, span.end, dtype=np.int32) for span in spans]),
        spans=tuple(spans),
        sampled=np.array(sampled, dtype=np.int32),
    )
