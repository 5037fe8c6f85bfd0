"""A model in the reference implementation (`transformers`), from the very fp32 weights that our loader dequantises.

The alternative of the benchmark and the oracle of the tests. `transformers` is no run-time dependency.
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shared.model.spec import ModelSource

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def build(source: ModelSource, attention: str = "sdpa") -> Any:
    """A `LlamaForCausalLM` in fp32 that shares our tensors' values (tied head; no file of its own is read).

    Raises ValueError when the tensors of `source` are not those of a Llama.
    """
    spec = source.spec
    settings: dict[str, Any] = {"attn_implementation": attention}
    config = LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_context,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=spec.tied,
        **settings,
    )
    with torch.device("meta"):  # no time for a random start
        model: Any = LlamaForCausalLM(config)
    weights = {renamed(name): torch.from_numpy(tensor.fp32()) for name, tensor in source.tensors().items()}
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    # The rotary frequencies are no parameter: made anew outside the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def renamed(name: str) -> str:
    """Our canonical name -> the name in transformers."""
    if name == "embed":
        return "model.embed_tokens.weight"
    if name in ("norm", "lm_head"):
        return "model.norm.weight" if name == "norm" else "lm_head.weight"
    _, layer, tensor = name.split(".")
    return f"model.layers.{layer}.{NAMES[tensor]}.weight"
