"""What all layers of one step share: where each token's KV goes, and how tokens are grouped for attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.batch import Batch, Span
from kernels.paged import PagedKV

GROUP_TOKENS = 8192
"""Tokens of KV that one group of decodes gathers at once: its copy of a layer then stays in the L3 cache."""


@dataclass(frozen=True)
class DecodeGroup:
    """Spans of one token, as a ragged list of n blocks; a row's blocks follow one another, nothing is padded.

    `tokens`: int64 [rows], their tokens in the batch. `blocks`, `row_of`: int64 [n], physical block and row of each.
    `last`: int64 [rows], index of each row's last block, and `unwritten`: bool [rows, block_tokens], its slots that
    lie beyond the sequence.
    """

    tokens: torch.Tensor
    blocks: torch.Tensor
    row_of: torch.Tensor
    last: torch.Tensor
    unwritten: torch.Tensor

    @property
    def rows(self) -> int:
        """Sequences in the group."""
        return len(self.tokens)


@dataclass
class ReferenceStep:
    """`cos`, `sin`: fp32 [T, 1, dims], halves doubled, `sin` negated in its first half (see `Reference.rope`).

    `block_of`, `slot_of`: int64 [T], where a token's KV goes. `health`: see `kernels.interface.Step`.
    """

    kv: PagedKV
    cos: torch.Tensor
    sin: torch.Tensor
    block_of: torch.Tensor
    slot_of: torch.Tensor
    groups: list[DecodeGroup]
    chunks: list[Span]
    health: torch.Tensor


def blocks_needed(span: Span, block_tokens: int) -> torch.Tensor:
    """The part of the span's table that covers [0, end)."""
    return span.blocks[: -(-span.end // block_tokens)]


def write_slots(batch: Batch, block_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Physical block and slot in it, int64 [T] each, of every token that is fed."""
    logical = torch.div(batch.positions, block_tokens, rounding_mode="floor")
    parts = [span.blocks[logical[span.first : span.first + span.count]] for span in batch.spans]
    return torch.cat(parts), batch.positions - logical * block_tokens


def decode_groups(spans: Sequence[Span], block_tokens: int) -> list[DecodeGroup]:
    """Cuts spans of one token into groups of at most GROUP_TOKENS of KV, and at least one row."""
    groups: list[DecodeGroup] = []
    pending: list[Span] = []
    tokens = 0
    for span in spans:
        if pending and tokens + span.end > GROUP_TOKENS:
            groups.append(_group(pending, block_tokens))
            pending, tokens = [], 0
        pending.append(span)
        tokens += span.end
    if pending:
        groups.append(_group(pending, block_tokens))
    return groups


def _group(spans: Sequence[Span], block_tokens: int) -> DecodeGroup:
    tables = [blocks_needed(span, block_tokens) for span in spans]
    lengths = torch.tensor([len(table) for table in tables])
    written = torch.tensor([(span.end - 1) % block_tokens + 1 for span in spans])
    return DecodeGroup(
        tokens=torch.tensor([span.first for span in spans]),
        blocks=torch.cat(tables),
        row_of=torch.repeat_interleave(torch.arange(len(spans)), lengths),
        last=lengths.cumsum(0) - 1,
        unwritten=torch.arange(block_tokens) >= written[:, None],
    )
