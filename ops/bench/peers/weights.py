"""A Hugging Face directory in bf16 from a GGUF file, for an engine that reads nothing else.

Our loader dequantises, and gives q and k in the order that Hugging Face wants (GGUF files of this family hold their
rows for interleaved RoPE). Rounding to bf16 is the only loss.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from ops.bench.reference_model import renamed
from shared.model.spec import open_model


def hugging_face(gguf: Path, target: Path) -> None:
    """Writes it whole, or leaves nothing; does nothing where it is."""
    if target.exists():
        return
    source = open_model(str(gguf), Path())
    spec, tokenizer = source.spec, source.tokenizer()
    made = target.with_name(target.name + ".part")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    tensors = {renamed(name): torch.from_numpy(one.fp32()).bfloat16() for name, one in source.tensors().items()}
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": spec.bos_id,
        "eos_token_id": list(spec.stop_ids),
    }
    (made / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer.save(str(made / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": spec.chat_template}
    (made / "tokenizer_config.json").write_text(json.dumps(words | dict(spec.template_tokens)))
    os.replace(made, target)
