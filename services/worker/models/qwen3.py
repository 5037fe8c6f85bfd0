"""Qwen3: Llama's layer with an RMS norm of each q and k head before RoPE; head_dim is free of hidden / heads."""

import torch

from kernels.interface import Backend
from services.worker.models.decoder import Weights
from services.worker.models.llama import LlamaLayer
from shared.model.spec import ModelSpec


class Qwen3Layer(LlamaLayer):
    """Layer `n`."""

    def __init__(self, spec: ModelSpec, weights: Weights, backend: Backend, n: int) -> None:
        super().__init__(spec, weights, backend, n)
        self.q_norm = backend.vector(weights[f"layers.{n}.q_norm"])
        self.k_norm = backend.vector(weights[f"layers.{n}.k_norm"])

    def before_rope(self, qk: torch.Tensor) -> torch.Tensor:
        """QK-norm."""
        q, k = qk[:, : self.spec.heads], qk[:, self.spec.heads :]
        q = self.backend.head_norm(q, self.q_norm, self.spec.norm_eps)
        k = self.backend.head_norm(k, self.k_norm, self.spec.norm_eps)
        return torch.cat((q, k), 1)
