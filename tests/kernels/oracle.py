"""Definitions in float64, straight from the papers, and pools that punish what a backend must not do.

A pool starts as NaN: whoever multiplies a slot that was never written, even by zero, gets NaN.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from kernels.batch import Batch, Ints, make_batch
from kernels.paged import PagedKV
from kernels.reference.pool import Views
from shared.kv import KVLayout
from shared.model.tensors import Tensor

_numbers = itertools.count()


def tensor(values: torch.Tensor) -> Tensor:
    """A file's tensor of these fp32 values, with a name of its own."""
    array = np.ascontiguousarray(values.float().numpy())
    return Tensor(f"test {next(_numbers)}", "F32", tuple(array.shape), array.view(np.uint8).reshape(-1))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rope(heads: torch.Tensor, positions: Ints, inverse_frequencies: torch.Tensor) -> torch.Tensor:
    """Rotates pairs (i, i + dims/2) of the first dims elements; [T, n, head_dim]."""
    pairs = len(inverse_frequencies)
    angles = torch.from_numpy(positions).double()[:, None, None] * inverse_frequencies.double()
    x = heads.double()
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, rest), -1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float) -> torch.Tensor:
    """Causal: q [T, heads, dim] at positions start.. over k, v [start + T, kv_heads, dim]; [T, heads, dim]."""
    q, k, v = q.double(), k.double(), v.double()
    per_kv = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for token in range(len(q)):
        seen = start + token + 1
        for head in range(q.shape[1]):
            scores = k[:seen, head // per_kv] @ q[token, head] * scale
            out[token, head] = torch.softmax(scores, 0) @ v[:seen, head // per_kv]
    return out


class PoisonedPool:
    """A pool of NaN whose blocks are handed out in a scattered order, and what sequences have in it."""

    def __init__(self, layout: KVLayout, blocks: int, seed: int) -> None:
        self.layout = layout
        self.memory = bytearray(b"\xff" * (layout.block_bytes * blocks))
        self.paged = PagedKV(self.memory, layout)
        self.kv = Views(self.paged)
        self._random = torch.Generator().manual_seed(seed)
        self._free = torch.randperm(blocks, generator=self._random).tolist()

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random)

    def sequence(self, written: int, room: int, layer: int = 0) -> tuple[Ints, torch.Tensor, torch.Tensor]:
        """A block table for `room` positions, and K, V [written, kv_heads, dim] that lie at the first of them.

        They are rounded to the pool's dtype, as stored. One spare block stands at the table's end.
        """
        layout = self.layout
        table = [self._free.pop() for _ in range(-(-room // layout.block_tokens) + 1)]
        k = self.randn(written, layout.kv_heads, layout.head_dim_k).to(self.kv.dtype)
        v = self.randn(written, layout.kv_heads, layout.head_dim_v).to(self.kv.dtype)
        for position in range(written):
            block, slot = table[position // layout.block_tokens], position % layout.block_tokens
            self.kv.k(layer)[block, :, :, slot] = k[position]
            self.kv.v(layer)[block, :, slot] = v[position]
        return np.array(table), k, v


def batch_of(rows: Sequence[tuple[int, int, Ints]], sampled: bool = True) -> Batch:
    """A batch of (start, count, table) rows; the ids don't matter."""
    return make_batch([(start, np.zeros(count, dtype=np.int64), table, sampled) for start, count, table in rows])
