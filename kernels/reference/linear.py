"""Weight matrices of the reference backend: fp32, laid out once for oneDNN when torch has it.

oneDNN's packed product beats F.linear (MKL) at every size that serving has: 1.1x at 512 rows, 1.6x at 8, 1.9x at 1
(SmolLM2's matrices, two AVX2 threads). The operators are those that torch's own compiler emits; torch is pinned.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

PACK_ROWS = 512
"""Rows of activations that oneDNN lays a matrix out for; measured equal or better for fewer rows too."""


def has_onednn() -> bool:
    """Whether this build of torch can pack a matrix for oneDNN."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class Matrix:
    """fp32 [out, in]; `onednn` False keeps it as it is and multiplies by F.linear."""

    def __init__(self, weight: NDArray[np.float32], *, onednn: bool) -> None:
        self.shape = weight.shape
        self.onednn = onednn
        plain = torch.from_numpy(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(plain, PACK_ROWS) if onednn else plain

    def times(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Product x @ weight^T (+ residual): [T, in] -> [T, out]."""
        out: torch.Tensor
        if not self.onednn:
            out = F.linear(x, self._weight)
            return out if residual is None else out.add_(residual)
        if residual is None:
            out = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        else:
            out = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, None, "add")
        return out


def stacked(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Parts [out_i, in] as one matrix, without a copy of a single one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
