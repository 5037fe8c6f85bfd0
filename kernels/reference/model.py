"""A program, interpreted: one torch operation after the other."""

import torch
import torch.nn.functional as F

from kernels.batch import Batch
from kernels.interface import Forward, Progress
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
    tensors_of,
)
from kernels.reference import attention, ops
from kernels.reference.linear import Matrix, stacked
from kernels.reference.pool import Views
from kernels.reference.sampler import sample_each
from kernels.reference.step import ReferenceStep, begin, indices
from kernels.sampling import Sampler
from shared.model.tensors import Tensor


class ReferenceModel:
    """Implements `kernels.interface.Model`. Weights are fp32; equal tensors are read once."""

    def __init__(self, program: Program, progress: Progress, *, onednn: bool) -> None:
        self.sample: Sampler = sample_each
        self._program = program
        self._onednn = onednn
        self._attend = attention.Attention()
        self._cos, self._sin = torch.from_numpy(program.rope.cos), torch.from_numpy(program.rope.sin)
        self._weights: list[torch.Tensor | Matrix | None] = []
        self._views: Views | None = None
        self._pool: PagedKV | None = None
        for number, op in enumerate(program.ops):
            self._weights.append(self._loaded(op))
            progress(number + 1, len(program.ops))

    def _loaded(self, op: Op) -> torch.Tensor | Matrix | None:
        tensors = tensors_of(op)
        match op:
            case Linear() | Logits():
                return Matrix(stacked([tensor.fp32() for tensor in tensors]), onednn=self._onednn)
            case Embed() | RmsNorm() | HeadNorm():
                return _plain(tensors[0])
            case _:
                return None

    def _view(self, kv: PagedKV) -> Views:
        if self._views is None or self._pool is not kv:
            self._pool, self._views = kv, Views(kv)
        return self._views

    @torch.inference_mode()
    def step(self, batch: Batch, kv: PagedKV, *, layers: int | None = None) -> Forward:
        """See `Model.step`."""
        views = self._view(kv)
        step = begin(batch, views, self._cos, self._sin)
        health = step.health
        values: dict[Buffer, torch.Tensor] = {}
        for index in self._program.shortened(layers):
            op = self._program.ops[index]
            if isinstance(op, Select):
                sampled = batch.only_sampled()
                if sampled is not batch:
                    rows = indices(batch.sampled)
                    values = {buffer: values[buffer][rows] for buffer in op.buffers}
                    if not len(rows):
                        break
                    step = begin(sampled, views, self._cos, self._sin)
            elif isinstance(op, Logits):
                head = self._weights[index]
                assert isinstance(head, Matrix)
                return Forward(head.times(values[op.x]).numpy(), health.numpy())
            else:
                self._run(op, self._weights[index], values, step)
        return Forward(torch.empty((0, self._program.vocab)).numpy(), health.numpy())

    def _run(
        self, op: Op, weight: torch.Tensor | Matrix | None, values: dict[Buffer, torch.Tensor], step: ReferenceStep
    ) -> None:
        match op:
            case Embed():
                assert isinstance(weight, torch.Tensor)
                x = F.embedding(step.ids, weight)
                values[op.out] = x if op.scale == 1.0 else x.mul_(op.scale)
            case RmsNorm():
                assert isinstance(weight, torch.Tensor)
                values[op.out] = ops.rms_norm(values[op.x], weight, op.eps)
            case HeadNorm():
                assert isinstance(weight, torch.Tensor)
                width = op.heads * len(weight)
                heads = torch.unflatten(values[op.x][:, op.first : op.first + width], 1, (op.heads, -1))
                heads.copy_(ops.rms_norm(heads, weight, op.eps))
            case Linear():
                assert isinstance(weight, Matrix)
                residual = None if op.residual is None else values[op.residual]
                values[op.out] = weight.times(values[op.x], residual)
            case RopeWriteKV():
                q_and_k, v = self._heads(values[op.qkv], self._program.heads + self._program.kv_heads)
                turned = ops.rope(q_and_k, step)
                q_and_k.copy_(turned)
                ops.write_kv(turned[:, self._program.heads :], v, op.layer, step)
            case Attention():
                q, _ = self._heads(values[op.qkv], self._program.heads)
                values[op.out] = self._attend.step(q, op.layer, step, op.scale).flatten(1)
            case SwiGLU():
                gate, up = values[op.x].chunk(2, -1)
                values[op.out] = F.silu(gate).mul_(up)
            case _:
                raise TypeError(f"no such op here: {op}")

    def _heads(self, qkv: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, n, head_dim]: the first so many heads, and the others."""
        heads = torch.unflatten(qkv, 1, (-1, self._program.head_dim))
        return heads[:, :first], heads[:, first:]


def _plain(tensor: Tensor) -> torch.Tensor:
    return torch.from_numpy(tensor.fp32())
