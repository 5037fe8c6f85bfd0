"""Llama (also SmolLM2, Mistral, ...): grouped-query attention with RoPE, SwiGLU, pre-norm by RMS."""

import torch

from kernels.interface import Backend, Step
from services.worker.models.decoder import Weights
from shared.model.spec import ModelSpec


class LlamaLayer:
    """Layer `n`."""

    def __init__(self, spec: ModelSpec, weights: Weights, backend: Backend, n: int) -> None:
        self.spec, self.backend, self.n = spec, backend, n
        mine = {name: weights[f"layers.{n}.{name}"] for name in ("q", "k", "v", "o", "gate", "up", "down")}
        self.attn_norm = backend.vector(weights[f"layers.{n}.attn_norm"])
        self.ffn_norm = backend.vector(weights[f"layers.{n}.ffn_norm"])
        self.qkv = backend.pack([mine["q"], mine["k"], mine["v"]])
        self.o = backend.pack([mine["o"]])
        self.gate_up = backend.pack([mine["gate"], mine["up"]])
        self.down = backend.pack([mine["down"]])
        self.scale = spec.head_dim**-0.5

    def project(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """See `decoder.Layer`."""
        backend, heads, kv_heads = self.backend, self.spec.heads, self.spec.kv_heads
        qkv = backend.linear(backend.rms_norm(x, self.attn_norm, self.spec.norm_eps), self.qkv)
        qkv = qkv.view(len(x), heads + 2 * kv_heads, self.spec.head_dim)
        qk = backend.rope(self.before_rope(qkv[:, : heads + kv_heads]), step)  # q and k turn alike: one call
        backend.write_kv(qk[:, heads:], qkv[:, heads + kv_heads :], self.n, step)
        return qk[:, :heads]

    def mix(self, x: torch.Tensor, q: torch.Tensor, step: Step) -> torch.Tensor:
        """See `decoder.Layer`."""
        backend = self.backend
        x = backend.linear(backend.attention(q, self.n, step, self.scale), self.o, x)
        wide = backend.swiglu(backend.rms_norm(x, self.ffn_norm, self.spec.norm_eps), self.gate_up)
        return backend.linear(wide, self.down, x)

    def before_rope(self, qk: torch.Tensor) -> torch.Tensor:
        """What a family does to the heads of q and k, [T, heads + kv_heads, head_dim], before they are rotated."""
        return qk
