"""A decoder-only transformer as a program: embedding, layers of one family, final norm, head."""

from collections.abc import Mapping

from kernels.program import Builder, Embed, Logits, Program, RmsNorm
from kernels.rope import rope_tables
from services.worker.models.layers import LayerBuilder
from services.worker.models.registry import FAMILIES
from shared.config import ConfigError
from shared.model.spec import ModelSpec
from shared.model.tensors import Tensor


def decoder(spec: ModelSpec, tensors: Mapping[str, Tensor], max_context: int) -> Program:
    """The program of a model for contexts up to `max_context` tokens; reads no weight.

    ConfigError when its architecture is none of ours.
    """
    if spec.architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"model {spec.name} is a {spec.architecture}; served are {known} and toy")
    add_layer = FAMILIES[spec.architecture]
    builder = Builder(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocab=spec.vocab,
        rope=rope_tables(spec.rope.inverse_frequencies(), max_context),
    )
    x = builder.buffer("residual", spec.hidden)
    builder.add(Embed(x, tensors["embed"]))
    for n in range(spec.layers):
        prefix = f"layers.{n}."
        mine = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        builder.begin_layer()
        add_layer(LayerBuilder(builder, spec, mine, n))
    normed = builder.buffer("normed", spec.hidden)
    builder.add(RmsNorm(normed, x, tensors["norm"], spec.norm_eps))
    builder.add(Logits(normed, tensors["embed" if spec.tied else "lm_head"]))
    return builder.program()
