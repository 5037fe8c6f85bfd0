"""SmolLM2 in the reference implementation, from the very fp32 weights that our loader dequantises."""

from pathlib import Path
from typing import Any

import torch

from shared.model.spec import ModelSource

ROOT = Path(__file__).parent.parent


def reference_llama(source: ModelSource, attention: str = "sdpa") -> Any:
    """A `LlamaForCausalLM` in fp32 that shares our tensors' values (tied head; no file of its own is read)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    spec, tensors = source.spec, source.tensors()
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
        attn_implementation=attention,
    )
    names = {
        "model.embed_tokens": "embed",
        "model.norm": "norm",
        "lm_head": "lm_head",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    with torch.device("meta"):  # no time for a random start
        model = LlamaForCausalLM(config)
    state = {}
    for key in model.state_dict():
        part = key.removesuffix(".weight")
        if part.startswith("model.layers."):
            _, _, n, *_, last = part.split(".")
            name = f"layers.{n}.{names.get(last, last.removesuffix('_proj'))}"
        else:
            name = names[part]
        if name != "lm_head" or not spec.tied:
            state[key] = torch.from_numpy(tensors[name].fp32())
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    # The rotary frequencies are no parameter: made anew outside the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def own_texts() -> str:
    """The project's own documents and sources, in a fixed order: text for prompts that needs no download."""
    files = [ROOT / "README.md", ROOT / "LICENSE", *sorted((ROOT / "shared").rglob("*.py"))]
    return "\n".join(path.read_text() for path in files if path.exists())
