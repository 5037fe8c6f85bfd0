"""What families are made of: the blocks of a layer as ops. Buffers go from layer to layer by name."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from kernels.program import Attention, Buffer, Builder, Linear, RmsNorm, RopeWriteKV, Select, SwiGLU
from shared.model.spec import ModelSpec
from shared.model.tensors import Tensor

Weights: TypeAlias = Mapping[str, Tensor]
"""A layer's tensors by the last part of their canonical names."""


class LayerBuilder:
    """One layer of a model under construction: its number, its weights, the buffers that all layers share."""

    def __init__(self, builder: Builder, spec: ModelSpec, weights: Weights, n: int) -> None:
        self.builder, self.spec, self.weights, self.n = builder, spec, weights, n
        heads = spec.heads + 2 * spec.kv_heads
        self.x = builder.buffer("residual", spec.hidden)
        self.normed = builder.buffer("normed", spec.hidden)
        self.qkv = builder.buffer("qkv", heads * spec.head_dim)
        self.mixed = builder.buffer("mixed", spec.heads * spec.head_dim)

    @property
    def last(self) -> bool:
        """Whether no layer follows."""
        return self.n == self.spec.layers - 1

    def norm(self, name: str) -> Buffer:
        """RMS norm of the residual stream."""
        self.builder.add(RmsNorm(self.normed, self.x, self.weights[name], self.spec.norm_eps))
        return self.normed

    def attention(self, before_rope: Callable[[], None] = lambda: None) -> None:
        """Pre-normed grouped-query attention with RoPE, added to the stream.

        `before_rope` may add ops on the heads of `qkv`. Of the last layer, only the KV is wanted of every token.
        """
        w, add = self.weights, self.builder.add
        add(Linear(self.qkv, self.norm("attn_norm"), (w["q"], w["k"], w["v"])))
        before_rope()
        add(RopeWriteKV(self.qkv, self.n))
        if self.last:
            add(Select((self.x, self.qkv)))
        add(Attention(self.mixed, self.qkv, self.n, self.spec.head_dim**-0.5))
        add(Linear(self.x, self.mixed, (w["o"],), residual=self.x))

    def swiglu(self) -> None:
        """Pre-normed gated feed-forward, added to the stream."""
        w, width = self.weights, self.spec.intermediate
        both, gated = self.builder.buffer("gate and up", 2 * width), self.builder.buffer("gated", width)
        self.builder.add(
            Linear(both, self.norm("ffn_norm"), (w["gate"], w["up"])),
            SwiGLU(gated, both),
            Linear(self.x, gated, (w["down"],), residual=self.x),
        )
