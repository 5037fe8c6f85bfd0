"""What all layers of one step share: where each token's KV goes, and how tokens are grouped for attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.batch import Batch, Ints, Span
from kernels.reference.pool import Views

GROUP_TOKENS = 8192
"""Tokens of KV that one group of decodes gathers at once: its copy of a layer then stays in the L3 cache."""


@dataclass(frozen=True)
class DecodeGroup:
    """Spans of one token with about as many blocks, as a rectangle: `rows` sequences of `width` blocks.

    `tokens`: int64 [rows], their tokens in the batch. `blocks`: int64 [rows, width]; a row that has fewer repeats its
    first one. `masked`: bool [rows, 1, 1, width * slots], what lies beyond the sequence. `unwritten`: the slots of
    these blocks that were never written, as int64 indices into (rows, width * slots). `pieces`: see `Views`.
    """

    tokens: torch.Tensor
    blocks: torch.Tensor
    masked: torch.Tensor
    unwritten: tuple[torch.Tensor, torch.Tensor]
    pieces: torch.Tensor


@dataclass(frozen=True)
class Chunk:
    """A span of several tokens. `pieces`: int64 [2, kv_heads, n], see `Views`."""

    span: Span
    pieces: torch.Tensor


@dataclass
class ReferenceStep:
    """`cos`, `sin`: fp32 [T, 1, dims], halves doubled, `sin` negated in its first half (see `ops.rope`).

    `ids`: int64 [T]. `block_of`, `slot_of`: int64 [T], where a token's KV goes. `health`: see `interface.Forward`.
    """

    kv: Views
    ids: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    block_of: torch.Tensor
    slot_of: torch.Tensor
    groups: list[DecodeGroup]
    chunks: list[Chunk]
    health: torch.Tensor


def indices(numbers: Ints) -> torch.Tensor:
    """As torch wants them: int64, in memory of its own."""
    return torch.from_numpy(numbers.astype(np.int64))


def begin(batch: Batch, kv: Views, cos: torch.Tensor, sin: torch.Tensor) -> ReferenceStep:
    """The metadata of a step. `cos`, `sin`: fp32 [positions, dims / 2], see `RopeTables`."""
    block_of, slot_of = write_slots(batch, kv.layout.block_tokens)
    at = indices(batch.positions)
    cos, sin = cos[at], sin[at]
    return ReferenceStep(
        kv=kv,
        ids=indices(batch.ids),
        cos=torch.cat((cos, cos), -1)[:, None],
        sin=torch.cat((-sin, sin), -1)[:, None],
        block_of=block_of,
        slot_of=slot_of,
        groups=decode_groups([span for span in batch.spans if span.count == 1], kv),
        chunks=[chunk_of(span, kv) for span in batch.spans if span.count > 1],
        health=torch.zeros(len(batch.ids)),
    )


def blocks_needed(span: Span, block_tokens: int) -> torch.Tensor:
    """The part of the span's table that covers [0, end)."""
    return indices(span.blocks[: -(-span.end // block_tokens)])


def write_slots(batch: Batch, block_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Physical block and slot in it, int64 [T] each, of every token that is fed."""
    logical = batch.positions // block_tokens
    parts = [span.blocks[logical[span.first : span.first + span.count]] for span in batch.spans]
    return indices(np.concatenate(parts)), indices(batch.positions % block_tokens)


def chunk_of(span: Span, kv: Views) -> Chunk:
    """What attention needs to know of a span of several tokens."""
    return Chunk(span, kv.piece_index(blocks_needed(span, kv.layout.block_tokens)))


def decode_groups(spans: Sequence[Span], kv: Views) -> list[DecodeGroup]:
    """Groups spans of one token by length, so that padding is at most a quarter and a group at most GROUP_TOKENS."""
    groups: list[DecodeGroup] = []
    pending: list[Span] = []
    for span in sorted(spans, key=lambda span: span.end, reverse=True):  # stable: equal lengths keep their order
        widest = pending[0].end if pending else 0
        short = 4 * (span.end + kv.layout.block_tokens) < 3 * widest
        if pending and (short or (len(pending) + 1) * widest > GROUP_TOKENS):
            groups.append(_group(pending, kv))
            pending = []
        pending.append(span)
    if pending:
        groups.append(_group(pending, kv))
    return groups


def _group(spans: Sequence[Span], kv: Views) -> DecodeGroup:
    slots = kv.layout.block_tokens
    tables = [blocks_needed(span, slots) for span in spans]
    width = max(len(table) for table in tables)
    blocks = torch.stack([torch.cat((table, table[:1].expand(width - len(table)))) for table in tables])
    ends = torch.tensor([span.end for span in spans])[:, None]
    position = torch.arange(width * slots)
    # A block that pads is a row's first: as far written as that one, wherever it stands.
    own = torch.tensor([len(table) for table in tables])[:, None] * slots
    unwritten = torch.where(position < own, position, position % slots) >= ends
    row, slot = unwritten.nonzero(as_tuple=True)
    return DecodeGroup(
        tokens=torch.tensor([span.first for span in spans]),
        blocks=blocks,
        masked=(position >= ends)[:, None, None],
        unwritten=(row, slot),
        pieces=kv.piece_index(blocks),
    )
