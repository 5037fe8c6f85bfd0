"""Paged attention of the reference backend: gather the sequence's blocks, then multiply.

Decodes of about equal length run as one rectangle of blocks; a prefill chunk runs as two flash attentions, over the
cached prefix (nothing masked) and over itself (causal square), joined by their log-sum-exps. Gathering costs a copy
that a kernel of our own will not need, but it stays in the cache: a decode at 6,000 tokens spends a third of its
attention time on it.
"""

import torch

from kernels.reference.pool import Views
from kernels.reference.step import Chunk, DecodeGroup, ReferenceStep

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

SPLIT_SQUARE = 256
"""Tokens from which on a causal square is cut in two."""


class Attention:
    """Owns the buffer that pieces of blocks are gathered into: every layer uses it again."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def _gather(self, kv: Views, layer: int, pieces: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K [..., n, dim, slots] and V [..., n * slots, dim] in fp32, of pieces [2, ..., n]; valid until the next call.

        Gathered by head, so that a head's V is one matrix whatever the blocks.
        """
        width = kv.pieces.shape[1]
        size = pieces.numel() * width
        if kv.dtype not in self._buffers or self._buffers[kv.dtype].numel() < size:
            self._buffers[kv.dtype] = torch.empty(size + size // 4, dtype=kv.dtype)
        out = self._buffers[kv.dtype][:size].view(-1, width)
        torch.index_select(kv.pieces, 0, (pieces + layer * kv.piece_step).flatten(), out=out)
        k, v = out.float().view(2, *pieces.shape[1:-1], -1)
        dim, slots = kv.layout.head_dim_k, kv.layout.block_tokens
        return torch.unflatten(k, -1, (-1, dim, slots)), torch.unflatten(v, -1, (-1, dim))

    def step(self, q: torch.Tensor, layer: int, step: ReferenceStep, scale: float) -> torch.Tensor:
        """Each token over its own sequence in the pool: [T, heads, dim] -> [T, heads, dim]."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in step.groups:
            mine = q if len(group.tokens) == len(q) == 1 else q[group.tokens]
            out.index_copy_(0, group.tokens, self.decode(mine, step.kv, layer, group, scale))
        for chunk in step.chunks:
            tokens = slice(chunk.span.first, chunk.span.first + chunk.span.count)
            out[tokens] = self.chunk(q[tokens], step.kv, layer, chunk, scale)
        return out

    def decode(self, q: torch.Tensor, kv: Views, layer: int, group: DecodeGroup, scale: float) -> torch.Tensor:
        """One token of each row over all of its sequence: [rows, heads, dim] -> [rows, heads, dim]."""
        k, v = self._gather(kv, layer, group.pieces)  # [rows, kv_heads, ...]
        row, slot = group.unwritten
        if len(row):
            v[row, :, slot] = 0.0  # 0 * NaN is NaN: what was never written must not be multiplied
        q = torch.unflatten(q * scale, 1, (k.shape[1], 1, -1))  # [rows, kv_heads, 1, per_kv, dim]
        scores = torch.matmul(q, k).transpose(2, 3).flatten(3)  # [rows, kv_heads, per_kv, width * slots]
        weights = scores.masked_fill_(group.masked, -torch.inf).softmax(-1)
        return torch.matmul(weights, v).flatten(1, 2)

    def chunk(self, q: torch.Tensor, kv: Views, layer: int, chunk: Chunk, scale: float) -> torch.Tensor:
        """A span's tokens over its sequence: [count, heads, dim] -> [count, heads, dim]."""
        span = chunk.span
        k, v = self._gather(kv, layer, chunk.pieces)
        # contiguous() first: flash reads rows of a head, and of a single block flatten() alone would be a view.
        k = k.transpose(-1, -2).contiguous().flatten(1, 2)[:, : span.end]  # [kv_heads, end, dim]
        v = v[:, : span.end]
        q = q.transpose(0, 1).contiguous()  # [heads, count, dim]; heads of one KV head are neighbours
        part = _causal(q, k[:, span.start :], v[:, span.start :], scale)
        if span.start:
            part = _joined(part, _full(q, k[:, : span.start], v[:, : span.start], scale))
        return part[0].transpose(0, 1)


Part = tuple[torch.Tensor, torch.Tensor]
"""Attention over some positions: output [heads, count, dim] and log-sum-exp of its scores [heads, count]."""


def _full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Part:
    """Every token of q [heads, count, dim] over every position of k and v [kv_heads, n, dim]."""
    # Nothing is masked, so the heads that share a KV head may be one matrix.
    folded = q.reshape(1, len(k), -1, q.shape[-1])
    out, lse = _flash(folded, k[None], v[None], 0.0, False, scale=scale)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Part:
    """Token i of q over positions 0..i of as many; a long square as two half as long and the rectangle between.

    The rectangle runs at twice the square's rate (no mask, larger products): a quarter less time at 512.
    """
    heads, count, dim = q.shape
    k_all, v_all = (x.repeat_interleave(heads // len(k), 0) for x in (k, v))
    squares = 2 if count >= SPLIT_SQUARE and count % 2 == 0 else 1
    q_parts, k_parts, v_parts = (x.view(heads, squares, -1, dim) for x in (q, k_all, v_all))
    out, lse = _flash(q_parts, k_parts, v_parts, 0.0, True, scale=scale)
    if squares == 1:
        return out[:, 0], lse[:, 0]
    half = count // 2
    later = _joined((out[:, 1], lse[:, 1]), _full(q[:, half:], k[:, :half], v[:, :half], scale))
    return torch.cat((out[:, 0], later[0]), 1), torch.cat((lse[:, 0], later[1]), 1)


def _joined(one: Part, other: Part) -> Part:
    """Softmax over the positions of both: each weighs as the sigmoid of the difference of the log-sum-exps."""
    weight = torch.sigmoid(other[1] - one[1])
    return torch.lerp(one[0], other[0], weight[:, :, None]), torch.logaddexp(one[1], other[1])
