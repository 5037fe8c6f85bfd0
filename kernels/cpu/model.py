"""A loaded program of the CPU backend: op structs made once, one C call a step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.batch import Batch
from kernels.cpu.crew import Crew, KernelError
from kernels.cpu.library import aligned, declarations, pointer
from kernels.cpu.packing import Matrix
from kernels.cpu.sampler import CpuSampler
from kernels.interface import Forward
from kernels.paged import PagedKV
from kernels.program import (
    Attention,
    Buffer,
    Embed,
    HeadNorm,
    Linear,
    Logits,
    Op,
    Program,
    RmsNorm,
    RopeWriteKV,
    Select,
    SwiGLU,
)
from kernels.sampling import Sampler

OP_NAMES = {
    "PD_EMBED": "embedding",
    "PD_RMS_NORM": "norms",
    "PD_HEAD_NORM": "norms of heads",
    "PD_LINEAR": "products",
    "PD_ROPE_WRITE_KV": "rotation, KV written",
    "PD_ATTENTION": "attention",
    "PD_SWIGLU": "SwiGLU",
    "PD_SELECT": "sampled tokens kept",
    "PD_LOGITS": "logits",
    "PD_SCALE": "scaling",
    "PD_ADD": "sums",
}
"""What people read."""


class CpuModel:
    """Implements `kernels.interface.Model`. `matrices`: for each op, its packed weight or None. `int8`: see `Cpu`."""

    def __init__(
        self, library: Any, program: Program, matrices: Sequence[Matrix | None], threads: int, int8: bool
    ) -> None:
        self._library = library
        self._program = program
        self._matrices = matrices
        self._crew = Crew(library, threads)
        self.sample: Sampler = CpuSampler(library, self._crew, program.vocab)
        self._threads = threads
        self._int8 = int8
        self._compiled: dict[tuple[int, str, int], _Compiled] = {}
        self._work = aligned(0)
        self._logits = np.empty(0, np.float32)
        self._spent: NDArray[np.int64] | None = None

    def watch_ops(self) -> dict[str, NDArray[np.int64]]:
        """From now on each step adds to these: kind of op -> int64 [1], nanoseconds of the first thread, waits in it.

        What is computed in one pass (a norm with its product, a product with its SwiGLU) counts as the op that ends it.
        """
        self._spent = spent = np.zeros(self._library.PD_OP_KINDS, np.int64)
        return {said: spent[getattr(self._library, name) :][:1] for name, said in OP_NAMES.items()}

    @staticmethod
    def step_bytes(library: Any, program: Program, tokens: int, context: int, threads: int, int8: bool) -> int:
        """Bytes of work buffers of the largest step; asks no weight."""
        compiled = _Compiled(library, program, None, range(len(program.ops)), "fp16", 16, int8)
        return int(library.pd_step_bytes(compiled.c, tokens, context, threads))

    def step(self, batch: Batch, kv: PagedKV, *, layers: int | None = None) -> Forward:
        """See `Model.step`; KernelError for what the kernels refuse."""
        compiled = self._compiled_for(kv, layers)
        tokens, sampled = len(batch.ids), len(batch.sampled)
        ids, sample = (np.ascontiguousarray(each, np.int32) for each in (batch.ids, batch.sampled))
        count = np.array([span.count for span in batch.spans], np.int32)
        start = np.array([span.start for span in batch.spans], np.int32)
        wanted = -(-(start + count) // kv.layout.block_tokens)
        tables = np.concatenate([span.blocks[:n] for span, n in zip(batch.spans, wanted, strict=True)])
        tables = np.ascontiguousarray(tables, np.int32)
        table = np.zeros(len(wanted), np.int32)
        np.cumsum(wanted[:-1], out=table[1:])
        health = np.zeros(tokens, np.float32)
        longest = int((start + count).max())
        size = self._library.pd_step_bytes(compiled.c, tokens, longest, self._threads)
        if size > self._work.nbytes:
            self._work = aligned(size + size // 8)
        if sampled * self._program.vocab > self._logits.size:
            self._logits = np.empty(sampled * self._program.vocab, np.float32)
        step = declarations().new(
            "pd_step *",
            {
                "tokens": tokens,
                "spans": len(count),
                "sampled": sampled,
                "table_entries": len(tables),
                "ids": pointer(ids, "int32_t *"),
                "count": pointer(count, "int32_t *"),
                "start": pointer(start, "int32_t *"),
                "table": pointer(table, "int32_t *"),
                "tables": pointer(tables, "int32_t *"),
                "sample": pointer(sample, "int32_t *"),
                "pool": pointer(kv.bytes, "void *"),
                "pool_blocks": kv.blocks,
                "health": pointer(health, "float *"),
                "logits": pointer(self._logits, "float *"),
                "work": pointer(self._work, "void *"),
                "work_bytes": self._work.nbytes,
                "spent": declarations().NULL if self._spent is None else pointer(self._spent, "int64_t *"),
            },
        )
        compiled.check(self._library.pd_crew_step(self._crew.c, compiled.c, step, compiled.op))
        logits = self._logits[: sampled * self._program.vocab].reshape(sampled, self._program.vocab)
        return Forward(logits, health)

    def _compiled_for(self, kv: PagedKV, layers: int | None) -> "_Compiled":
        key = (layers or 0, kv.layout.dtype, kv.layout.block_tokens)
        if key not in self._compiled:
            indices = self._program.shortened(layers)
            self._compiled[key] = _Compiled(self._library, self._program, self._matrices, indices, *key[1:], self._int8)
        return self._compiled[key]


class _Compiled:
    """A `pd_program` and all that it points to."""

    def __init__(
        self,
        library: Any,
        program: Program,
        matrices: Sequence[Matrix | None] | None,
        indices: Sequence[int],
        dtype: str,
        block_tokens: int,
        int8: bool,
    ) -> None:
        ffi = declarations()
        self._library, self._program, self._indices = library, program, indices
        self.op = ffi.new("int32_t *")
        self._keep: list[Any] = []
        ops: list[dict[str, Any]] = []
        for index in indices:
            op = program.ops[index]
            made = [_fields(library, op)] if not isinstance(op, Select) else _selects(library, op)
            if matrices is not None:
                self._give_weights(made[0], op, matrices[index])
            ops += made
        widths = np.array([buffer.width for buffer in program.buffers], np.int32)
        cos, sin = (np.ascontiguousarray(table, np.float32) for table in (program.rope.cos, program.rope.sin))
        listed = ffi.new("pd_op[]", ops)
        self._keep += [matrices, listed, widths, cos, sin]
        self.c = ffi.new(
            "pd_program *",
            {
                "op": listed,
                "widths": pointer(widths, "int32_t *"),
                "cos": pointer(cos, "float *"),
                "sin": pointer(sin, "float *"),
                "ops": len(ops),
                "buffers": len(widths),
                "vocab": program.vocab,
                "heads": program.heads,
                "kv_heads": program.kv_heads,
                "head_dim": program.head_dim,
                "layers": program.layers,
                "positions": cos.shape[0],
                "rope_dims": program.rope.dims,
                "kv_dtype": {"fp32": library.PD_KV_F32, "fp16": library.PD_KV_F16, "bf16": library.PD_KV_BF16}[dtype],
                "block_tokens": block_tokens,
                "int8_activations": int8,
            },
        )
        if matrices is not None:
            self.check(library.pd_program_check(self.c, self.op))

    def _give_weights(self, fields: dict[str, Any], op: Op, matrix: Matrix | None) -> None:
        if matrix is not None:
            self._keep.append(matrix.c)
            fields["matrix"] = matrix.c
        elif isinstance(op, (RmsNorm, HeadNorm)):
            weight = np.ascontiguousarray(op.weight.fp32())
            self._keep.append(weight)
            fields["weight"] = pointer(weight, "float *")

    def check(self, code: int) -> None:
        """KernelError for a code that is one."""
        if code:
            text = declarations().string(self._library.pd_error_text(code)).decode()
            at = self.op[0]
            where = f"op {at}: " if at >= 0 else ""
            raise KernelError(f"{where}{text}")


def _index(buffer: Buffer | None) -> int:
    return -1 if buffer is None else buffer.index


def _fields(library: Any, op: Op) -> dict[str, Any]:
    """The fields of a `pd_op` but its weights."""
    made: dict[str, Any] = {"out": -1, "in": -1, "residual": -1}
    match op:
        case Embed():
            return made | {"kind": library.PD_EMBED, "out": op.out.index, "number": op.scale}
        case RmsNorm():
            return made | {"kind": library.PD_RMS_NORM, "out": op.out.index, "in": op.x.index, "number": op.eps}
        case HeadNorm():
            place = {"first": op.first, "heads": op.heads, "dim": op.weight.shape[0]}
            return made | place | {"kind": library.PD_HEAD_NORM, "in": op.x.index, "number": op.eps}
        case Linear():
            buffers = {"out": op.out.index, "in": op.x.index, "residual": _index(op.residual)}
            return made | buffers | {"kind": library.PD_LINEAR}
        case RopeWriteKV():
            return made | {"kind": library.PD_ROPE_WRITE_KV, "in": op.qkv.index, "layer": op.layer}
        case Attention():
            buffers = {"out": op.out.index, "in": op.qkv.index}
            return made | buffers | {"kind": library.PD_ATTENTION, "layer": op.layer, "number": op.scale}
        case SwiGLU():
            return made | {"kind": library.PD_SWIGLU, "out": op.out.index, "in": op.x.index}
        case Logits():
            return made | {"kind": library.PD_LOGITS, "in": op.x.index}
        case _:
            raise TypeError(f"no such op here: {op}")


def _selects(library: Any, op: Select) -> list[dict[str, Any]]:
    kind = library.PD_SELECT
    return [{"kind": kind, "out": buffer.index, "in": buffer.index, "residual": -1} for buffer in op.buffers]
