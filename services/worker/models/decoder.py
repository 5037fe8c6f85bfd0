"""A decoder-only transformer: embedding, layers of one family, final norm, head. Holds weights, never KV."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from kernels.batch import Batch
from kernels.interface import Backend, Step
from kernels.paged import PagedKV
from kernels.rope import rope_tables
from shared.model.spec import ModelSpec
from shared.model.tensors import Tensor

Weights: TypeAlias = Mapping[str, Tensor]
Progress: TypeAlias = Callable[[int, int], None]
"""Called with (layers loaded, layers in all)."""


class Layer(Protocol):
    """One layer of a family, in two halves: what is kept for later tokens, and what these tokens become."""

    def project(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Writes the KV of the residual stream [T, hidden] and returns its queries [T, heads, head_dim]."""

    def mix(self, x: torch.Tensor, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention and feed-forward: the residual stream [T, hidden] behind this layer. `x` may be overwritten."""


LayerType: TypeAlias = Callable[[ModelSpec, Weights, Backend, int], Layer]
"""Makes layer n of a model."""


@dataclass(frozen=True)
class Forward:
    """`logits`: fp32 [S, vocab] of the sampled tokens. `health`: fp32 [T], not finite where a token's KV isn't."""

    logits: torch.Tensor
    health: torch.Tensor


class Decoder:
    """A model of one family, loaded through `backend`: the first `layers` of it, by default all."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        backend: Backend,
        layer_type: LayerType,
        *,
        max_context: int,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self.spec = spec
        self._backend = backend
        self._embedding = backend.embedding(weights["embed"])
        self._norm = backend.vector(weights["norm"])
        self._head = backend.pack([weights["embed" if spec.tied else "lm_head"]])
        self._rope = rope_tables(spec.rope.inverse_frequencies(), max_context)
        self._layers: list[Layer] = []
        for n in range(spec.layers):
            self._layers.append(layer_type(spec, weights, backend, n))
            progress(n + 1, spec.layers)

    def forward(self, batch: Batch, kv: PagedKV, *, layers: int | None = None) -> Forward:
        """Feeds a batch and writes its KV into the pool. `layers`: only that many first ones (a sizing run).

        Of the last layer's output only sampled tokens are read, so only they are computed: of a prompt's chunk, that
        saves all but the KV of that layer.
        """
        step = self._backend.begin(batch, kv, self._rope)
        x = self._backend.embed(batch.ids, self._embedding)
        *others, last = self._layers[:layers]
        for layer in others:
            x = layer.mix(x, layer.project(x, step), step)
        q = last.project(x, step)
        sampled = batch.only_sampled()
        if sampled is not batch:
            x, q = x[batch.sampled], q[batch.sampled]
        if len(x):
            x = last.mix(x, q, step if sampled is batch else self._backend.begin(sampled, kv, self._rope))
        x = self._backend.rms_norm(x, self._norm, self.spec.norm_eps)
        return Forward(self._backend.logits(x, self._head), step.health)
