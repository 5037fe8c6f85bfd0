"""The reference backend: torch, readable, the definition that other backends are compared with.

Not exact: oneDNN and MKL choose an order of summation by shape, so the same request may differ in its last bits when
its batch or its chunks differ. The numerics id names all that may change the rounding.
"""

import platform
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kernels.batch import Batch
from kernels.paged import PagedKV
from kernels.reference.attention import Attention
from kernels.reference.linear import Matrix, has_onednn, stacked
from kernels.reference.step import ReferenceStep, chunk_of, decode_groups, write_slots
from kernels.rope import RopeTables
from shared.model.tensors import Tensor

VERSION = 1
"""Raised when a change here changes rounding."""


class Reference:
    """Implements `kernels.interface.Backend`."""

    name = "reference"
    exact = False

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._onednn = has_onednn()
        self._attention = Attention()
        products = "onednn" if self._onednn else "blas"
        capability = torch.backends.cpu.get_cpu_capability()
        facts = (f"torch-{torch.__version__}", platform.machine(), capability, products, f"threads-{threads}")
        self.numerics = "/".join((f"reference-{VERSION}", *facts))

    def pack(self, tensors: Sequence[Tensor]) -> Matrix:
        """See `Backend.pack`."""
        return Matrix(stacked([tensor.fp32() for tensor in tensors]), onednn=self._onednn)

    def vector(self, tensor: Tensor) -> torch.Tensor:
        """See `Backend.vector`."""
        return torch.from_numpy(tensor.fp32())

    def embedding(self, tensor: Tensor) -> torch.Tensor:
        """See `Backend.embedding`."""
        return torch.from_numpy(tensor.fp32())

    def begin(self, batch: Batch, kv: PagedKV, rope: RopeTables) -> ReferenceStep:
        """See `Backend.begin`."""
        tokens = kv.layout.block_tokens
        block_of, slot_of = write_slots(batch, tokens)
        cos, sin = rope.cos[batch.positions], rope.sin[batch.positions]
        return ReferenceStep(
            kv=kv,
            cos=torch.cat((cos, cos), -1)[:, None],
            sin=torch.cat((-sin, sin), -1)[:, None],
            block_of=block_of,
            slot_of=slot_of,
            groups=decode_groups([span for span in batch.spans if span.count == 1], kv),
            chunks=[chunk_of(span, kv) for span in batch.spans if span.count > 1],
            health=torch.zeros(len(batch.ids)),
        )

    def embed(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """See `Backend.embed`."""
        return F.embedding(ids, table)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Backend.rms_norm`.

        Four passes, sqrt(mean(x^2) + eps) being the hypotenuse of the RMS and sqrt(eps), where F.rms_norm makes six
        on a CPU: half the time, and there are two a layer.
        """
        rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5)
        return torch.div(x, torch.hypot(rms, rms.new_tensor(eps**0.5))).mul_(weight)

    def head_norm(self, heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Backend.head_norm`."""
        return self.rms_norm(heads, weight, eps)

    def linear(self, x: torch.Tensor, weight: Matrix, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See `Backend.linear`."""
        return weight.times(x, residual)

    def rope(self, heads: torch.Tensor, step: ReferenceStep) -> torch.Tensor:
        """See `Backend.rope`: (a, b) -> (a cos - b sin, b cos + a sin) for the halves a and b of what is rotated."""
        dims = step.cos.shape[-1]
        turned = heads[..., :dims].roll(dims // 2, -1).mul_(step.sin).addcmul_(heads[..., :dims], step.cos)
        return turned if dims == heads.shape[-1] else torch.cat((turned, heads[..., dims:]), -1)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, layer: int, step: ReferenceStep) -> None:
        """See `Backend.write_kv`."""
        k, v = k.to(step.kv.dtype), v.to(step.kv.dtype)
        # A sum is NaN or infinite if anything in it is: one reduction instead of a mask.
        step.health.add_(k.sum((1, 2), dtype=torch.float32)).add_(v.sum((1, 2), dtype=torch.float32))
        step.kv.k(layer)[step.block_of, :, :, step.slot_of] = k
        step.kv.v(layer)[step.block_of, :, step.slot_of] = v

    def attention(self, q: torch.Tensor, layer: int, step: ReferenceStep, scale: float) -> torch.Tensor:
        """See `Backend.attention`."""
        attend = self._attention
        out = torch.empty_like(q)
        for group in step.groups:
            mine = q if len(group.tokens) == len(q) == 1 else q[group.tokens]
            out.index_copy_(0, group.tokens, attend.decode(mine, step.kv, layer, group, scale))
        for chunk in step.chunks:
            tokens = slice(chunk.span.first, chunk.span.first + chunk.span.count)
            out[tokens] = attend.chunk(q[tokens], step.kv, layer, chunk, scale)
        return out.flatten(1)

    def swiglu(self, x: torch.Tensor, gate_up: Matrix) -> torch.Tensor:
        """See `Backend.swiglu`."""
        gate, up = gate_up.times(x).chunk(2, -1)
        return F.silu(gate).mul_(up)

    def logits(self, x: torch.Tensor, head: Matrix) -> torch.Tensor:
        """See `Backend.logits`."""
        return head.times(x)
