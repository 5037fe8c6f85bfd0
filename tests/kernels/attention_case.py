"""Runs the CPU library's attention on small cases: pools whose unwritten slots are NaN, and the float64 definition."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu import library

Floats = NDArray[np.float32]

POISON = 0xFF
"""A byte that is a NaN in fp32, fp16 and bf16 where it stands all over."""

GUARD = 64
"""Floats beside outputs and scratch that must stay as they are."""


@dataclass(frozen=True)
class Shape:
    """Of a model's attention and of the pool."""

    kv_heads: int
    group: int
    dim: int
    dtype: str = "fp16"
    block_tokens: int = 16
    scale: float = 0.125

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass(frozen=True)
class Tokens:
    """One whole sequence: q fp32 [n, heads, dim]; k, v [n, kv_heads, dim], fp32 values that the pool's dtype holds."""

    q: Floats
    k: Floats
    v: Floats

    @classmethod
    def random(cls, shape: Shape, tokens: int, seed: int, spread: float = 1.0) -> "Tokens":
        dice = np.random.default_rng(seed)
        q = dice.standard_normal((tokens, shape.heads, shape.dim), np.float32) * np.float32(spread)
        k, v = dice.standard_normal((2, tokens, shape.kv_heads, shape.dim), np.float32)
        return cls(q, from_bits(to_bits(k, shape.dtype), shape.dtype), from_bits(to_bits(v, shape.dtype), shape.dtype))


def to_bits(x: Floats, dtype: str) -> NDArray[Any]:
    """As stored; bf16 by cutting off, which is all that test data need."""
    if dtype == "fp16":
        return x.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(x).view(np.uint32)
    return bits if dtype == "fp32" else (bits >> 16).astype(np.uint16)


def from_bits(x: NDArray[Any], dtype: str) -> Floats:
    if dtype == "fp16":
        return x.view(np.float16).astype(np.float32)
    wide = x if dtype == "fp32" else x.astype(np.uint32) << 16
    return wide.view(np.float32)


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of a sequence, of which [0, end) is in the pool: what a step has of it."""

    of: Tokens
    start: int
    end: int


class Pool:
    """NaN all over but for what `write` puts in; blocks are handed out in a scattered order."""

    LAYERS, LAYER = 2, 1

    def __init__(self, shape: Shape, chunks: Sequence[Chunk], seed: int) -> None:
        self.shape, tokens = shape, shape.block_tokens
        self.kinds = 2 * shape.kv_heads
        needs = [-(-chunk.end // tokens) for chunk in chunks]
        word = np.uint32 if shape.dtype == "fp32" else np.uint16
        size = (sum(needs) + 3, self.LAYERS, self.kinds, shape.dim * tokens)
        self.memory = np.full(size, np.iinfo(word).max, word)
        order = np.random.default_rng(seed).permutation(len(self.memory)).astype(np.int32)
        self.starts = (np.cumsum(needs) - needs).astype(np.int32)
        self.order = order
        for chunk, start, need in zip(chunks, self.starts, needs, strict=True):
            self.write(order[start : start + need], chunk)

    def write(self, table: NDArray[np.int32], chunk: Chunk) -> None:
        shape, tokens = self.shape, self.shape.block_tokens
        poison = np.iinfo(self.memory.dtype).max
        whole = np.full((2, len(table) * tokens, shape.kv_heads, shape.dim), poison, self.memory.dtype)
        for kind, values in enumerate((chunk.of.k, chunk.of.v)):
            whole[kind, : chunk.end] = to_bits(values[: chunk.end], shape.dtype)
        blocks = whole.reshape(2, len(table), tokens, shape.kv_heads, shape.dim)
        k, v = blocks[0].transpose(0, 2, 3, 1), blocks[1].transpose(0, 2, 1, 3)
        flat = (len(table), shape.kv_heads, shape.dim * tokens)
        self.memory[table, self.LAYER] = np.concatenate((k.reshape(flat), v.reshape(flat)), 1)


class Call:
    """One step's attention on one instruction set's library."""

    def __init__(self, cpu: Any, shape: Shape, chunks: Sequence[Chunk], parts: int = 1, seed: int = 1) -> None:
        self.cpu, self.shape, self.parts = cpu, shape, parts
        self.pool = Pool(shape, chunks, seed)
        counts = [chunk.end - chunk.start for chunk in chunks]
        tokens, width = sum(counts), shape.heads * shape.dim
        row = width + 2 * shape.kv_heads * shape.dim
        self.qkv = np.full((tokens, row), np.nan, np.float32)
        if tokens:
            self.qkv[:, :width] = np.concatenate([chunk.of.q[chunk.start : chunk.end] for chunk in chunks]).reshape(
                tokens, width
            )
        self.out = np.full((tokens, width + GUARD), np.nan, np.float32)
        self.first = (np.cumsum(counts) - counts).astype(np.int32)
        self.count = np.array(counts, np.int32)
        self.start = np.array([chunk.start for chunk in chunks], np.int32)
        self.longest = max((chunk.end for chunk in chunks), default=0)
        self.struct = self._struct()
        self.scratch_bytes = cpu.pd_attention_scratch(self.struct, self.longest, parts)
        # Aligned to 64 as the library asks for; what is in it must not matter.
        room = np.full(self.scratch_bytes + 64 + 4 * GUARD, POISON, np.uint8)
        self.scratch = room[-room.ctypes.data % 64 :]

    def _struct(self) -> Any:
        shape, pool, ffi = self.shape, self.pool, library.declarations()
        a = ffi.new("pd_attention *")
        memory = pool.memory
        a.pool = library.pointer(memory, "void *")
        a.block_bytes, a.layer_offset = memory.strides[0], memory.strides[1] * pool.LAYER
        a.dtype = {"fp32": self.cpu.PD_KV_F32, "fp16": self.cpu.PD_KV_F16, "bf16": self.cpu.PD_KV_BF16}[shape.dtype]
        a.block_tokens, a.heads, a.kv_heads, a.dim = shape.block_tokens, shape.heads, shape.kv_heads, shape.dim
        a.scale = shape.scale
        a.qkv, a.qkv_row = library.pointer(self.qkv, "float *"), self.qkv.shape[1]
        a.out, a.out_row = library.pointer(self.out, "float *"), self.out.shape[1]
        a.spans = len(self.count)
        for name, array in (("first", self.first), ("count", self.count), ("start", self.start)):
            setattr(a, name, library.pointer(array, "int32_t *"))
        a.table, a.blocks = library.pointer(pool.starts, "int32_t *"), library.pointer(pool.order, "int32_t *")
        return a

    def plan(self) -> None:
        self.cpu.pd_attention_plan(self.struct, library.pointer(self.scratch, "void *"), self.parts)

    def part(self, part: int) -> None:
        self.cpu.pd_attention_run(self.struct, library.pointer(self.scratch, "void *"), part)

    def result(self) -> Floats:
        """[tokens, heads, dim], after a look at what must not have been written."""
        width = self.shape.heads * self.shape.dim
        assert np.isnan(self.out[:, width:]).all(), "written beside the output"
        assert (self.scratch[self.scratch_bytes :] == POISON).all(), "written beyond the scratch"
        return self.out[:, :width].reshape(-1, self.shape.heads, self.shape.dim)


def attend(cpu: Any, shape: Shape, chunks: Sequence[Chunk], parts: int = 1, seed: int = 1) -> Floats:
    """All parts, one after another: fp32 [tokens, heads, dim]."""
    call = Call(cpu, shape, chunks, parts, seed)
    call.plan()
    for part in range(parts):
        call.part(part)
    return call.result()


def defined(shape: Shape, chunk: Chunk) -> NDArray[np.float64]:
    """Causal attention in float64, straight from the paper: [end - start, heads, dim]."""
    q, k, v = (x.astype(np.float64) for x in (chunk.of.q, chunk.of.k, chunk.of.v))
    out = np.empty((chunk.end - chunk.start, shape.heads, shape.dim))
    for row, position in enumerate(range(chunk.start, chunk.end)):
        for head in range(shape.heads):
            scores = k[: position + 1, head // shape.group] @ q[position, head] * shape.scale
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v[: position + 1, head // shape.group] / weights.sum()
    return out
