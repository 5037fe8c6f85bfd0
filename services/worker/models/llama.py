"""Llama (also SmolLM2, Mistral, ...): grouped-query attention with RoPE, SwiGLU, pre-norm by RMS."""

from services.worker.models.layers import LayerBuilder


def llama(layer: LayerBuilder) -> None:
    """Adds one layer."""
    layer.attention()
    layer.swiglu()
