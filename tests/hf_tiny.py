"""Tiny random models of each served family, made by the reference implementation and saved as it saves them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VOCAB = 300
CONTEXT = 512

KINDS = ("llama-tied", "llama3-untied", "llama-mha", "qwen3-tied", "qwen3-untied")


@dataclass(frozen=True)
class TinyModel:
    """`path`: a Hugging Face directory. `reference`: the model it was made from."""

    path: Path
    reference: Any

    def logits(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), VOCAB] of one forward pass over all ids."""
        with torch.inference_mode():
            out: torch.Tensor = self.reference(torch.tensor([ids])).logits[0]
        return out


def make_tiny(kind: str, directory: Path, seed: int = 0) -> TinyModel:
    """Writes the model called `kind` below `directory`. Norm weights are random too, or nobody would miss them."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 6 if kind == "llama-mha" else 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.14,
        "tie_word_embeddings": kind.endswith("-tied"),
    }
    torch.manual_seed(seed)
    if kind.startswith("qwen3"):
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16))
    else:
        rope = LLAMA3_ROPE if kind.startswith("llama3") else {"rope_type": "default", "rope_theta": 10000.0}
        model = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    path = directory / kind
    model.eval().save_pretrained(path)
    _byte_tokenizer().save(str(path / "tokenizer.json"))
    return TinyModel(path, model)


def _byte_tokenizer() -> Tokenizer:
    """One token a byte: 256 ids of the model's 300."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
