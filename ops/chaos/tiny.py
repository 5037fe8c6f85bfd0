"""A random Llama of two layers as a Hugging Face directory: real arithmetic and batches, loaded in a moment."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 2, 4, 2, 16, 64, 96
CONTEXT = 2048


def write_tiny(folder: Path, seed: int = 5) -> Path:
    """Writes config, weights and a tokenizer of single bytes; `folder`."""
    folder.mkdir(parents=True)
    alphabet = {token: id for id, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "vocab_size": len(alphabet),
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens": (len(alphabet), HIDDEN),
        "lm_head": (len(alphabet), HIDDEN),
        "model.norm": (HIDDEN,),
    }
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm": (HIDDEN,), at + "post_attention_layernorm": (HIDDEN,)}
        shapes |= {at + "self_attn.q_proj": (queries, HIDDEN), at + "self_attn.o_proj": (HIDDEN, queries)}
        shapes |= {at + f"self_attn.{name}_proj": (keys, HIDDEN) for name in "kv"}
        shapes |= {at + f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {at + "mlp.down_proj": (HIDDEN, INNER)}
    draw = np.random.default_rng(seed)
    tensors = {
        f"{name}.weight": (draw.standard_normal(shape) * 0.2 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
