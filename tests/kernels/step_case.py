"""Runs small models through the CPU library's one call a step: a pool of NaN, working memory of NaN with a guard."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from kernels.cpu import library, packing
from kernels.cpu.library import pointer
from kernels.paged import PagedKV
from kernels.reference.pool import Views
from kernels.rope import rope_tables
from shared.kv import KVLayout
from shared.model.tensors import Tensor
from tests.kernels import oracle

Floats = NDArray[np.float32]

KINDS = [
    "EMBED",
    "RMS_NORM",
    "HEAD_NORM",
    "LINEAR",
    "ROPE_WRITE_KV",
    "ATTENTION",
    "SWIGLU",
    "SELECT",
    "LOGITS",
    "SCALE",
    "ADD",
]
KV_DTYPES = {"fp32": 0, "fp16": 1, "bf16": 2}
EPS = 1e-5
POSITIONS = 700


@dataclass(frozen=True)
class Shape:
    """Of a model. Gate and up run inside their product when `wide` is a multiple of 32."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    wide: int = 96
    vocab: int = 101
    rope_dims: int = 16
    weights: str = "F32"
    qk_norm: bool = False
    int8: bool = False
    overwrites: bool = False
    """Ends each layer by ops that write what their neighbours' norm has read; hidden and wide must be equal."""


def weight(kind: str, values: Floats) -> Tensor:
    """A file's tensor [out, in] near the values, of type F32, BF16 or Q8_0."""
    if kind == "Q8_0":
        groups = values.reshape(len(values), -1, 32)
        scale = (np.abs(groups).max(-1, keepdims=True) / 127).astype(np.float16)
        quants = np.rint(groups / scale.astype(np.float32)).astype(np.int8)
        blocks = np.concatenate((scale.view(np.uint8), quants.view(np.uint8)), -1)
        return Tensor("test", kind, values.shape, blocks.reshape(-1))
    if kind == "BF16":
        return Tensor(
            "test", kind, values.shape, (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
        )
    return oracle.tensor(torch.from_numpy(values))


class Model:
    """Random weights, as tensors and as the program of a decoder in C. Buffers: x, normed, qkv, mixed, both, gated."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = s = shape
        self._random = np.random.default_rng(seed)
        self._kept: list[Any] = []
        heads = (s.heads + 2 * s.kv_heads) * s.dim
        self.widths = [s.hidden, s.hidden, heads, s.heads * s.dim, 2 * s.wide, s.wide]
        frequencies = 100.0 ** (-np.arange(0, s.rope_dims, 2, dtype=np.float64) / max(s.rope_dims, 1))
        self.frequencies = torch.from_numpy(frequencies)
        self.rope = rope_tables(frequencies, POSITIONS)
        self.embed, self.head = self._matrix(s.vocab, s.hidden), self._matrix(s.vocab, s.hidden)
        self.norm = self._vector(s.hidden)
        self.layers = [
            {
                "attn_norm": self._vector(s.hidden),
                "ffn_norm": self._vector(s.hidden),
                "q_norm": self._vector(s.dim),
                "k_norm": self._vector(s.dim),
                "qkv_bias": self._vector(heads),
                "qkv": self._matrix(heads, s.hidden),
                "o": self._matrix(s.hidden, s.heads * s.dim),
                "both": self._matrix(2 * s.wide, s.hidden),
                "down": self._matrix(s.hidden, s.wide),
                "square": self._matrix(s.hidden, s.hidden),
            }
            for _ in range(s.layers)
        ]
        self.ops = list(self._program())

    def _matrix(self, out: int, width: int) -> Tensor:
        values = self._random.standard_normal((out, width)).astype(np.float32)
        return weight(self.shape.weights, values / np.float32(width**0.5))

    def _vector(self, width: int) -> Floats:
        room = np.full(512, np.nan, np.float32)  # for ops that a test has bent to read more of it
        room[:width] = 1 + 0.1 * self._random.standard_normal(width)
        return room[:width]

    def _packed(self, tensor: Tensor) -> Any:
        self._kept.append(packing.pack([tensor]))
        return self._kept[-1].c

    def _program(self) -> Any:
        s, x, normed, qkv, mixed, both, gated = self.shape, *range(6)
        packed = self._packed
        yield op("EMBED", out=x, matrix=packed(self.embed), number=1.5)
        for n, layer in enumerate(self.layers):
            yield op("RMS_NORM", out=normed, of=x, weight=layer["attn_norm"], number=EPS)
            yield op("LINEAR", out=qkv, of=normed, matrix=packed(layer["qkv"]), weight=layer["qkv_bias"])
            if s.qk_norm:
                for name, first, heads in (("q_norm", 0, s.heads), ("k_norm", s.heads * s.dim, s.kv_heads)):
                    columns = {"first": first, "heads": heads, "dim": s.dim}
                    yield op("HEAD_NORM", of=qkv, weight=layer[name], number=EPS, **columns)
            yield op("ROPE_WRITE_KV", of=qkv, layer=n)
            if n == s.layers - 1:
                yield from (op("SELECT", out=buffer, of=buffer) for buffer in (x, qkv))
            yield op("ATTENTION", out=mixed, of=qkv, layer=n, number=s.dim**-0.5)
            yield op("LINEAR", out=x, of=mixed, matrix=packed(layer["o"]), residual=x)
            yield op("RMS_NORM", out=normed, of=x, weight=layer["ffn_norm"], number=EPS)
            yield op("LINEAR", out=both, of=normed, matrix=packed(layer["both"]))
            yield op("SWIGLU", out=gated, of=both)
            yield op("LINEAR", out=x, of=gated, matrix=packed(layer["down"]), residual=x)
            if s.overwrites:
                yield op("RMS_NORM", out=normed, of=x, weight=layer["ffn_norm"], number=EPS)
                yield op("LINEAR", out=x, of=normed, matrix=packed(layer["square"]))
                yield op("RMS_NORM", out=normed, of=x, weight=layer["ffn_norm"], number=EPS)
                yield op("LINEAR", out=both, of=normed, matrix=packed(layer["both"]))
                yield op("SWIGLU", out=x, of=both)
                yield op("LINEAR", out=both, of=x, matrix=packed(layer["both"]))
                yield op("SWIGLU", out=x, of=both)
        yield op("RMS_NORM", out=normed, of=x, weight=self.norm, number=EPS)
        yield op("LOGITS", of=normed, matrix=packed(self.head))

    def truth(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """Logits [n, vocab] of one sequence in float64, KV not rounded."""
        s, n = self.shape, len(ids)
        positions = np.arange(n)
        heads = s.heads + 2 * s.kv_heads

        def times(x: torch.Tensor, tensor: Tensor) -> torch.Tensor:
            return x @ torch.from_numpy(tensor.fp32()).double().T

        def normed(x: torch.Tensor, values: Floats) -> torch.Tensor:
            return oracle.rms_norm(x, torch.from_numpy(values), EPS)

        x = torch.from_numpy(self.embed.fp32()).double()[list(ids)] * 1.5
        for layer in self.layers:
            qkv = times(normed(x, layer["attn_norm"]), layer["qkv"]) + torch.from_numpy(layer["qkv_bias"])
            q, k, v = qkv.view(n, heads, s.dim).split([s.heads, s.kv_heads, s.kv_heads], 1)
            if s.qk_norm:
                q, k = normed(q, layer["q_norm"]), normed(k, layer["k_norm"])
            q, k = (oracle.rope(y, positions, self.frequencies) for y in (q, k))
            x = x + times(oracle.attention(q, k, v, 0, s.dim**-0.5).flatten(1), layer["o"])
            gate, up = times(normed(x, layer["ffn_norm"]), layer["both"]).chunk(2, -1)
            x = x + times(F.silu(gate) * up, layer["down"])
            if s.overwrites:
                x = times(normed(x, layer["ffn_norm"]), layer["square"])
                for y in (normed(x, layer["ffn_norm"]), None):
                    gate, up = times(x if y is None else y, layer["both"]).chunk(2, -1)
                    x = F.silu(gate) * up
        return times(normed(x, self.norm), self.head).numpy()


def op(kind: str, *, of: int = -1, weight: Floats | None = None, **fields: Any) -> dict[str, Any]:
    """Fields of a pd_op; `of` is its `in`. The weight must outlive the program."""
    return {
        "kind": KINDS.index(kind),
        "out": -1,
        "in": of,
        "residual": -1,
        "weight": pointer(weight, "float *"),
        **fields,
    }


@dataclass
class Sequence_:
    """A sequence in the pool: its block table, and how many of its tokens have KV."""

    table: list[int]
    tokens: int = 0


@dataclass
class Fed:
    """Part of a step: ids that follow in a sequence, and which of them (by index) want logits."""

    sequence: Sequence_
    ids: Sequence[int]
    sample: Sequence[int] = field(default_factory=tuple)


class Engine:
    """A model, a crew, a pool of NaN."""

    def __init__(
        self,
        cpu: Any,
        model: Model,
        *,
        threads: int = 1,
        dtype: str = "fp16",
        block_tokens: int = 16,
        blocks: int = 200,
    ) -> None:
        self.cpu, self.model, self.ffi, s = cpu, model, library.declarations(), model.shape
        self.layout = KVLayout(s.layers, s.kv_heads, s.dim, s.dim, dtype, block_tokens)
        self.memory = bytearray(b"\xff" * (self.layout.block_bytes * blocks))
        self.views = Views(PagedKV(self.memory, self.layout))
        self.free = np.random.default_rng(blocks).permutation(blocks).tolist()
        self.ops = self.ffi.new("pd_op[]", model.ops)
        self.widths = self.ffi.new("int32_t[]", model.widths)
        self.program = self.ffi.new(
            "pd_program *",
            {
                "op": self.ops, "widths": self.widths, "ops": len(model.ops), "buffers": len(model.widths),
                "cos": pointer(model.rope.cos, "float *"), "sin": pointer(model.rope.sin, "float *"),
                "vocab": s.vocab, "heads": s.heads, "kv_heads": s.kv_heads, "head_dim": s.dim, "layers": s.layers,
                "positions": POSITIONS, "rope_dims": s.rope_dims,
                "kv_dtype": KV_DTYPES[dtype], "block_tokens": block_tokens, "int8_activations": s.int8,
            },
        )  # fmt: skip
        opened = self.ffi.new("pd_crew **")
        assert cpu.pd_crew_open(threads, opened) == 0
        self.threads = threads
        self.crew = self.ffi.gc(opened[0], cpu.pd_crew_close)
        self.spent = np.zeros(len(KINDS), np.int64)
        self.wrong_op = self.ffi.new("int32_t *")

    def sequence(self, room: int) -> Sequence_:
        """A new one with blocks for `room` tokens."""
        return Sequence_([self.free.pop() for _ in range(-(-room // self.layout.block_tokens))])

    def step(self, fed: Sequence[Fed], **changes: Any) -> tuple[Floats, Floats]:
        """Logits [sampled, vocab] and health [tokens]; `changes` replace fields of pd_step (see `StepError`)."""
        tokens, vocab = sum(len(each.ids) for each in fed), self.model.shape.vocab
        firsts = np.cumsum([0, *(len(each.ids) for each in fed)])
        sample = [first + i for first, each in zip(firsts, fed, strict=False) for i in each.sample]
        tables = [block for each in fed for block in each.sequence.table]
        arrays = {
            "ids": [i for each in fed for i in each.ids],
            "count": [len(each.ids) for each in fed],
            "start": [each.sequence.tokens for each in fed],
            "table": np.cumsum([0, *(len(each.sequence.table) for each in fed)])[:-1],
            "tables": tables,
            "sample": sample,
        }
        kept = {name: np.array(values, np.int32) for name, values in arrays.items()}
        longest = max(each.sequence.tokens + len(each.ids) for each in fed)
        size = self.cpu.pd_step_bytes(self.program, tokens, longest, self.threads)
        work = np.full(size + 128, 0xFF, np.uint8)
        work = work[-work.ctypes.data % 64 :][: size + 64]
        health, logits = np.full(tokens + 1, np.nan, np.float32), np.full((len(sample) + 1, vocab), np.nan, np.float32)
        step = self.ffi.new(
            "pd_step *",
            {
                **{name: pointer(array, "int32_t *") for name, array in kept.items()},
                "tokens": tokens, "spans": len(fed), "sampled": len(sample), "table_entries": len(tables),
                "pool": pointer(np.frombuffer(self.memory, np.uint8), "void *"),
                "pool_blocks": len(self.memory) // self.layout.block_bytes,
                "health": pointer(health, "float *"), "logits": pointer(logits, "float *"),
                "work": pointer(work, "void *"), "work_bytes": size, "spent": pointer(self.spent, "int64_t *"),
                **changes,
            },
        )  # fmt: skip
        wrong = self.cpu.pd_crew_step(self.crew, self.program, step, self.wrong_op)
        assert (work[size:] == 0xFF).all(), "written beyond the working memory"
        assert np.isnan(health[tokens:]).all(), "written beyond the health"
        assert np.isnan(logits[len(sample) :]).all(), "written beyond the logits"
        if wrong:
            assert np.isnan(health).all()
            raise StepError(wrong, self.wrong_op[0])
        for each in fed:
            each.sequence.tokens += len(each.ids)
        return logits[: len(sample)], health[:tokens]

    def kv(self, sequence: Sequence_) -> bytes:
        """All that is in the pool for the sequence's tokens."""
        tokens, bt = sequence.tokens, self.layout.block_tokens
        used = torch.tensor(sequence.table)
        parts = []
        for layer in range(self.layout.layers):
            k, v = self.views.k(layer)[used], self.views.v(layer)[used]  # [n, heads, dim, slot], [n, heads, slot, dim]
            parts.append(k.permute(0, 3, 1, 2).reshape(len(used) * bt, -1)[:tokens])
            parts.append(v.permute(0, 2, 1, 3).reshape(len(used) * bt, -1)[:tokens])
        return torch.stack(parts).contiguous().view(torch.uint8).numpy().tobytes()


class StepError(Exception):
    """The library refused: code and op."""
