"""The reference backend: torch, readable, the definition that other backends are compared with.

Not exact: oneDNN and MKL choose an order of summation by shape, so the same request may differ in its last bits when
its batch or its chunks differ. The numerics id names all that may change the rounding.
"""

import math
import platform

import torch

from kernels.interface import Footprint, Progress, Weights
from kernels.program import Embed, Program, tensors_of
from kernels.reference.linear import has_onednn
from kernels.reference.model import ReferenceModel

VERSION = 1
"""Raised when a change here changes rounding."""


class Reference:
    """Implements `kernels.interface.Backend`."""

    name = "reference"
    exact = False
    kv_dtype = "fp32"

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._onednn = has_onednn()
        products = "onednn" if self._onednn else "blas"
        capability = torch.backends.cpu.get_cpu_capability()
        facts = (f"torch-{torch.__version__}", platform.machine(), capability, products, f"threads-{threads}")
        self.numerics = "/".join((f"reference-{VERSION}", *facts))

    def footprint(self, program: Program, tokens: int, rows: int, context: int) -> Footprint:
        """See `Backend.footprint`. A tied embedding is held twice: looked up as rows, multiplied in another layout."""
        weights = sum(math.prod(tensor.shape) for op in program.ops for tensor in tensors_of(op))
        weights += program.rope.cos.size + program.rope.sin.size
        width = sum(buffer.width for buffer in program.buffers)
        hidden = next(op.out.width for op in program.ops if isinstance(op, Embed))
        gathered = 6 * program.kv_heads * program.head_dim * context  # K and V as they lie, in fp32, and as rows
        step = tokens * 2 * (width + hidden) + gathered + 2 * rows * program.vocab
        return Footprint(4 * weights, 4 * step)

    def load(self, program: Program, kept: Weights | None, progress: Progress) -> ReferenceModel:
        """See `Backend.load`; nothing is kept."""
        return ReferenceModel(program, progress, onednn=self._onednn)
