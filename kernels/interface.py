"""What a model asks of a backend. Models are written against this alone, so a backend is replaced as a whole.

    weights   pack, vector, embedding     once, from a file's tensors: a backend keeps the format it computes in
    a step    begin                       what all layers of a ragged step share (write slots, block groups)
    a layer   rms_norm, linear, head_norm, rope, write_kv, attention, swiglu
    the end   logits                      only of tokens that sample

Activations are fp32 [T, width], T = tokens of the batch. KV is rounded once, by write_kv; attention always reads K
and V from the pool, also those of the tokens being fed, and never multiplies a slot that was not written. A request's
result must not depend on what else is in the batch beyond the backend's stated tolerance (`exact` backends: at all).
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch

from kernels.batch import Batch
from kernels.paged import PagedKV
from kernels.rope import RopeTables
from shared.model.tensors import Tensor

Matrix: TypeAlias = Any
"""A backend's own form of a weight matrix, made by `pack`; models only hand it back."""

Step: TypeAlias = Any
"""A backend's own metadata of one step, made by `begin`. It has one attribute for everybody, `health`: fp32 [T],
finite as long as everything that was written to the pool for that token is finite, infinite or NaN otherwise."""


class Backend(Protocol):
    """One way to compute. Not thread-safe: it owns work buffers; use it from one thread."""

    @property
    def name(self) -> str:
        """`reference`, `cpu` or `triton`."""

    @property
    def exact(self) -> bool:
        """Whether results are equal bit for bit whatever the batch, the chunks and the cache."""

    @property
    def numerics(self) -> str:
        """Changes whenever rounding may change; part of the KV fingerprint."""

    def pack(self, tensors: Sequence[Tensor]) -> Matrix:
        """One matrix of several weights [out_i, in], stacked along `out`."""

    def vector(self, tensor: Tensor) -> torch.Tensor:
        """A norm's weight, fp32 [width]."""

    def embedding(self, tensor: Tensor) -> torch.Tensor:
        """A table [vocab, hidden] for `embed`."""

    def begin(self, batch: Batch, kv: PagedKV, rope: RopeTables) -> Step:
        """Metadata for all layers of one step. `batch` and `kv` are kept until the step is over."""

    def embed(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden]."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Over the last dimension: x / sqrt(mean(x^2) + eps) * weight."""

    def head_norm(self, heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """QK-norm: `rms_norm` of each head, [T, n, head_dim]."""

    def linear(self, x: torch.Tensor, weight: Matrix, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Product x @ weight^T (+ residual, whose memory may be reused for the result): [T, in] -> [T, out]."""

    def rope(self, heads: torch.Tensor, step: Step) -> torch.Tensor:
        """Rotates [T, n, head_dim] to the tokens' positions."""

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, layer: int, step: Step) -> None:
        """Stores [T, kv_heads, head_dim] at the tokens' slots, rounded to the pool's dtype; adds to `step.health`."""

    def attention(self, q: torch.Tensor, layer: int, step: Step, scale: float) -> torch.Tensor:
        """Causal, each token over its own sequence in the pool: [T, heads, head_dim] -> [T, heads * head_dim]."""

    def swiglu(self, x: torch.Tensor, gate_up: Matrix) -> torch.Tensor:
        """Gated unit silu(x @ gate^T) * (x @ up^T), `gate_up` packed of both: [T, hidden] -> [T, intermediate]."""

    def logits(self, x: torch.Tensor, head: Matrix) -> torch.Tensor:
        """[S, hidden] -> [S, vocab]; may return a buffer that the next call overwrites."""
