"""Attention of one SmolLM2 layer: the CPU library over scattered fp16 blocks against torch's SDPA in fp32.

`python -m ops.bench.attention [--threads N] [--rounds N] [--only NAME ...]`. torch gets what it likes best: fp32 K and
V of each sequence in one piece, [kv_heads, n, dim], and its own threads. Both walk over as many layers as make the KV
larger than the caches, as the layers of a model do; rounds are interleaved; microseconds a layer, medians. `--cpu`
counts CPU time of one thread instead of wall time: the only figure worth having on a busy machine.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from kernels.cpu import library
from ops.bench.measure import Spread

HEADS, KV_HEADS, DIM, BLOCK_TOKENS = 9, 3, 64, 32
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
WALK_BYTES = 96 << 20
"""KV that one round walks over, at least: three times the last cache of a large CPU."""
MOST_LAYERS = 120


@dataclass(frozen=True)
class Case:
    """`sequences` that each have `cached` tokens in the pool and get `new` ones."""

    name: str
    sequences: int
    cached: int
    new: int

    @property
    def tokens(self) -> int:
        """Positions of all sequences."""
        return self.sequences * (self.cached + self.new)

    @property
    def layers(self) -> int:
        """Of one round: enough to leave the caches, fewer where a layer takes long anyway."""
        work = self.sequences * self.new * (self.cached + self.new)
        if work > 1_000_000:
            return 2
        return min(max(-(-WALK_BYTES // (self.tokens * TOKEN_BYTES)), 4), MOST_LAYERS)


CASES = (
    Case("decode 1 x 512", 1, 511, 1),
    Case("decode 1 x 6000", 1, 5999, 1),
    Case("decode 8 x 2048", 8, 2047, 1),
    Case("decode 8 x 6000", 8, 5999, 1),
    Case("decode 32 x 512", 32, 511, 1),
    Case("prefill 512", 1, 0, 512),
    Case("prefill 2048", 1, 0, 2048),
    Case("prefill 7500", 1, 0, 7500),
    Case("32 new on 6000", 1, 6000, 32),
)


class Ours:
    """The library's attention; each layer has a scratch of its own, so that threads need no barrier between layers."""

    def __init__(self, case: Case, threads: int) -> None:
        self.case, self.threads = case, threads
        self.cpu, ffi = library.library(), library.declarations()
        dice = np.random.default_rng(1)
        blocks = -(-(case.cached + case.new) // BLOCK_TOKENS)
        total = blocks * case.sequences
        piece = 2 * KV_HEADS * DIM * BLOCK_TOKENS
        self.pool = np.empty((total, case.layers, piece), np.float16)
        self.pool[:] = dice.standard_normal(piece).astype(np.float16)
        self.order = dice.permutation(total).astype(np.int32)
        rows = case.sequences * case.new
        self.qkv = dice.standard_normal((rows, (HEADS + 2 * KV_HEADS) * DIM), np.float32)
        self.out = np.zeros((rows, HEADS * DIM), np.float32)
        steps = np.arange(case.sequences, dtype=np.int32)
        self.spans = [steps * case.new, np.full_like(steps, case.new), np.full_like(steps, case.cached), steps * blocks]
        self.structs, self.scratches = [], []
        for layer in range(case.layers):
            a = ffi.new("pd_attention *")
            a.pool, a.block_bytes = library.pointer(self.pool, "void *"), self.pool.strides[0]
            a.layer_offset, a.dtype = layer * self.pool.strides[1], self.cpu.PD_KV_F16
            a.block_tokens, a.heads, a.kv_heads, a.dim = BLOCK_TOKENS, HEADS, KV_HEADS, DIM
            a.scale = DIM**-0.5
            a.qkv, a.qkv_row = library.pointer(self.qkv, "float *"), self.qkv.shape[1]
            a.out, a.out_row = library.pointer(self.out, "float *"), self.out.shape[1]
            a.spans = case.sequences
            for name, array in zip(("first", "count", "start", "table"), self.spans, strict=True):
                setattr(a, name, library.pointer(array, "int32_t *"))
            a.blocks = library.pointer(self.order, "int32_t *")
            scratch = np.zeros(self.cpu.pd_attention_scratch(a, case.cached + case.new, threads) + 64, np.uint8)
            scratch = scratch[-scratch.ctypes.data % 64 :]
            self.cpu.pd_attention_plan(a, library.pointer(scratch, "void *"), threads)
            self.structs.append(a)
            self.scratches.append(scratch)
        self.pointers = [library.pointer(scratch, "void *") for scratch in self.scratches]

    @cached_property
    def _others(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max(self.threads - 1, 1))

    def _part(self, part: int) -> None:
        for a, scratch in zip(self.structs, self.pointers, strict=True):
            self.cpu.pd_attention_run(a, scratch, part)

    def run(self) -> None:
        """All layers."""
        others = [self._others.submit(self._part, part) for part in range(1, self.threads)]
        self._part(0)
        for other in others:
            other.result()


class Theirs:
    """torch, one call a layer; sequences of one length are one batch."""

    def __init__(self, case: Case) -> None:
        self.case = case
        length = case.cached + case.new
        self.q = torch.randn(case.sequences, HEADS, case.new, DIM)
        self.kv = torch.randn(2, 1, 1, length, DIM).expand(2, case.sequences, KV_HEADS, length, DIM)
        self.layers = [self.kv.contiguous() for _ in range(case.layers)]
        future = torch.arange(length)[None] > torch.arange(case.cached, length)[:, None]
        self.mask = (
            torch.zeros(case.new, length).masked_fill(future, -torch.inf) if case.cached and case.new > 1 else None
        )

    @torch.inference_mode()
    def run(self) -> None:
        """All layers."""
        for k, v in self.layers:
            scaled_dot_product_attention(
                self.q, k, v, attn_mask=self.mask, is_causal=self.case.cached == 0, enable_gqa=True
            )


def microseconds(run: Callable[[], Any], layers: int, clock: Callable[[], float]) -> float:
    """Of one layer."""
    begun = clock()
    run()
    return (clock() - begun) / layers * 1e6


def shown(spread: Spread) -> str:
    """Median (least-greatest), in whole microseconds."""
    return f"{spread.median:,.0f} ({spread.low:,.0f}-{spread.high:,.0f})"


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names hold one of these")
    parser.add_argument("--cpu", action="store_true", help="CPU time of one thread")
    arguments = parser.parse_args()
    threads, clock = (1, time.process_time) if arguments.cpu else (arguments.threads, time.perf_counter)
    torch.set_num_threads(threads)
    table = Table("us a layer", "ours", "SDPA fp32", "ours is faster by")
    for case in CASES:
        if arguments.only and not any(word in case.name for word in arguments.only):
            continue
        ours, theirs = Ours(case, threads), Theirs(case)
        mine, torchs = [], []
        for turn in range(arguments.rounds + 1):
            took = microseconds(ours.run, case.layers, clock), microseconds(theirs.run, case.layers, clock)
            if turn:  # the first warms up
                mine.append(took[0])
                torchs.append(took[1])
        a, b = Spread.of(mine), Spread.of(torchs)
        table.add_row(case.name, shown(a), shown(b), f"{b.median / a.median:.2f}x")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
