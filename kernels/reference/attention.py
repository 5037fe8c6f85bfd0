"""Paged attention of the reference backend: gather the sequence's blocks, then multiply.

Decodes of many sequences run as one ragged batch of blocks; a prefill chunk runs as two flash attentions, over the
cached prefix (nothing masked) and over itself (causal square), joined by their log-sum-exps. Gathering costs a copy
that a kernel of our own will not need, but it stays in the cache: a decode at 6,000 tokens spends a third of its
attention time on it.
"""

import torch

from kernels.batch import Span
from kernels.paged import PagedKV
from kernels.reference.step import DecodeGroup, blocks_needed

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Attention:
    """Owns the buffers that blocks are gathered into: every layer uses them again."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def _gather(self, name: str, view: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """fp32 copies of the blocks of `view`, in the order of `blocks`; overwritten by the next of that name."""
        shape = (len(blocks), *view.shape[1:])
        size = len(blocks) * view[0].numel()
        key = (name, view.dtype)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size + size // 4, dtype=view.dtype)
        out = self._buffers[key][:size].view(shape)
        return torch.index_select(view, 0, blocks, out=out).float()

    def decode(self, q: torch.Tensor, kv: PagedKV, layer: int, group: DecodeGroup, scale: float) -> torch.Tensor:
        """One token of each row over all of its sequence: [rows, heads, dim] -> [rows, heads, dim].

        Softmax is taken over a row's blocks without padding them: maximum and sums go from blocks to rows.
        """
        k = self._gather("k", kv.k(layer), group.blocks)  # [n, kv_heads, dim, slots]
        v = self._gather("v", kv.v(layer), group.blocks)  # [n, kv_heads, slots, dim]
        n, kv_heads, dim, _ = k.shape
        unwritten = group.unwritten[:, None, None, :]
        # 0 * NaN is NaN: what was never written must not be multiplied, so those few blocks are cleaned first.
        v.index_copy_(0, group.last, v[group.last].masked_fill_(unwritten.transpose(-1, -2), 0.0))
        q = (q * scale).view(group.rows, kv_heads, -1, dim)
        scores = torch.matmul(q[group.row_of], k)  # [n, kv_heads, group, slots]
        scores.index_copy_(0, group.last, scores[group.last].masked_fill_(unwritten, -torch.inf))
        highs = scores.amax(-1).view(n, -1)
        index = group.row_of[:, None].expand_as(highs)
        high = torch.full((group.rows, highs.shape[1]), -torch.inf).scatter_reduce_(0, index, highs, "amax")
        weights = scores.sub_(high[group.row_of].view(n, kv_heads, -1, 1)).exp_()
        parts = torch.matmul(weights, v)  # [n, kv_heads, group, dim]
        total = torch.zeros_like(high).index_add_(0, group.row_of, weights.sum(-1).view(n, -1))
        out = torch.zeros(group.rows, high.shape[1], dim).index_add_(0, group.row_of, parts.view(n, -1, dim))
        return out.div_(total[:, :, None])

    def chunk(self, q: torch.Tensor, kv: PagedKV, layer: int, span: Span, scale: float) -> torch.Tensor:
        """A span's tokens over its sequence: [count, heads, dim] -> [count, heads, dim]."""
        blocks = blocks_needed(span, kv.layout.block_tokens)
        # contiguous() first: flash reads rows of a head, and of a single block flatten() alone would be a view.
        k = self._gather("k", kv.k(layer), blocks).permute(1, 0, 3, 2).contiguous().flatten(1, 2)[:, : span.end]
        v = self._gather("v", kv.v(layer), blocks).permute(1, 0, 2, 3).contiguous().flatten(1, 2)[:, : span.end]
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
