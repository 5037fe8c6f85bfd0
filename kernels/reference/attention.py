"""Paged attention of the reference backend: gather the sequence's blocks, then multiply.

Decodes of about equal length run as one rectangle of blocks; a prefill chunk runs as two flash attentions, over the
cached prefix (nothing masked) and over itself (causal square), joined by their log-sum-exps. Gathering costs a copy
that a kernel of our own will not need, but it stays in the cache: a decode at 6,000 tokens spends a third of its
attention time on it.
"""

import torch

from kernels.paged import PagedKV
from kernels.reference.step import Chunk, DecodeGroup

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Attention:
    """Owns the buffer that pieces of blocks are gathered into: every layer uses it again."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def _gather(self, kv: PagedKV, layer: int, pieces: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
        return k.unflatten(-1, (-1, dim, slots)), v.unflatten(-1, (-1, dim))

    def decode(self, q: torch.Tensor, kv: PagedKV, layer: int, group: DecodeGroup, scale: float) -> torch.Tensor:
        """One token of each row over all of its sequence: [rows, heads, dim] -> [rows, heads, dim]."""
        k, v = self._gather(kv, layer, group.pieces)  # [rows, kv_heads, ...]
        row, slot = group.unwritten
        if len(row):
            v[row, :, slot] = 0.0  # 0 * NaN is NaN: what was never written must not be multiplied
        q = (q * scale).unflatten(1, (k.shape[1], 1, -1))  # [rows, kv_heads, 1, per_kv, dim]
        scores = torch.matmul(q, k).transpose(2, 3).flatten(3)  # [rows, kv_heads, per_kv, width * slots]
        weights = scores.masked_fill_(group.masked, -torch.inf).softmax(-1)
        return torch.matmul(weights, v).flatten(1, 2)

    def chunk(self, q: torch.Tensor, kv: PagedKV, layer: int, chunk: Chunk, scale: float) -> torch.Tensor:
        """A span's tokens over its sequence: [count, heads, dim] -> [count, heads, dim]."""
        span = chunk.span
        k, v = self._gather(kv, layer, chunk.pieces)
        # contiguous() first: flash reads rows of a head, and of a single block flatten() alone would be a view.
        k = k.transpose(-1, -2).contiguous().flatten(1, 2)[:, : span.end]  # [kv_heads, end, dim]
        v = v[:, : span.end]
        kv_heads, _, dim = k.shape
        q = q.transpose(0, 1).contiguous()  # [heads, count, dim]; heads of one KV head are neighbours
        per_kv = q.shape[0] // kv_heads
        own_k, own_v = (x[:, span.start :].repeat_interleave(per_kv, 0) for x in (k, v))
        out: torch.Tensor
        out, lse = _flash(q[None], own_k[None], own_v[None], 0.0, True, scale=scale)
        out, lse = out[0], lse.view(-1, span.count)
        if span.start:
            folded = q.view(1, kv_heads, per_kv * span.count, dim)  # nothing is masked, so heads may share a matrix
            past, past_lse = _flash(folded, k[None, :, : span.start], v[None, :, : span.start], 0.0, False, scale=scale)
            # Softmax over both parts: each part's weight is the sigmoid of the difference of the log-sum-exps.
            past_weight = torch.sigmoid(past_lse.reshape(-1, span.count) - lse)
            out = torch.lerp(out, past.reshape(-1, span.count, dim), past_weight[:, :, None])
        return out.transpose(0, 1)
