"""Qwen3: Llama's layer with an RMS norm of each q and k head before RoPE; head_dim is free of hidden / heads."""

from kernels.program import HeadNorm
from services.worker.models.layers import LayerBuilder


def qwen3(layer: LayerBuilder) -> None:
    """Adds one layer."""
    spec, weights = layer.spec, layer.weights

    def qk_norm() -> None:
        layer.builder.add(
            HeadNorm(layer.qkv, 0, spec.heads, weights["q_norm"], spec.norm_eps),
            HeadNorm(layer.qkv, spec.heads * spec.head_dim, spec.kv_heads, weights["k_norm"], spec.norm_eps),
        )

    layer.attention(before_rope=qk_norm)
    layer.swiglu()
