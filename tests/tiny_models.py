"""Tiny models for tests, written by other people's tools: GGUF by the `gguf` package, directories by `safetensors`.

Weights are random and small; names of tensors here are Hugging Face's. The row permutation that GGUF's llama files
have is the published conversion's, written down independently of the reader under test.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.random_blocks import random_blocks

Array = npt.NDArray[Any]

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1,234 miles, they'll say; we'd walked 56 of them.",
    "def main(argv):\n    for i in range(10):\n        print(f'{i:>4} {argv[i]}')\n\n\n\treturn 0\r\n",
    "Grüße aus Köln, ďábel, naïve café; 한국어 문장과 日本語の文、Привет мир. 👩‍👩‍👧 ✅",
    "    leading spaces,   inner  spaces and trailing   ",
]
SPECIALS = ("<|bos|>", "<|eos|>", "<|eot|>")


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id (specials last), merges by rank ("left right"), token types as in GGUF."""

    tokens: list[str]
    merges: list[str]
    types: list[int]

    def id(self, token: str) -> int:
        return self.tokens.index(token)


def train_vocabulary(size: int = 400) -> Vocabulary:
    """A byte-level BPE trained on CORPUS, with SPECIALS and one user-defined token behind it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=lambda token: int(model["vocab"][token]))
    types = [int(gguf.TokenType.NORMAL)] * len(tokens)
    tokens += [*SPECIALS, "<tool>"]
    types += [int(gguf.TokenType.CONTROL)] * len(SPECIALS) + [int(gguf.TokenType.USER_DEFINED)]
    return Vocabulary(tokens, [" ".join(pair) for pair in model["merges"]], types)


@dataclass(frozen=True)
class Tiny:
    """Sizes of a tiny model; `family` is llama or qwen3."""

    family: str = "llama"
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 64
    intermediate: int = 96
    vocab: int = 416
    max_context: int = 256
    theta: float = 10000.0
    eps: float = 1e-5
    tied: bool = False
    rope_scaling: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """config.json in the form that transformers 5 writes."""
        return {
            "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.family]],
            "model_type": self.family,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_context,
            "rms_norm_eps": self.eps,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "bos_token_id": None,
            "eos_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta} | self.rope_scaling,
        }

    def tensors(self, seed: int = 0) -> dict[str, Array]:
        """Random fp32 weights by Hugging Face name."""
        random = np.random.default_rng(seed)

        def weights(*shape: int) -> Array:
            return (random.standard_normal(shape) * 0.2).astype(np.float32)

        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out = {"model.embed_tokens.weight": weights(self.vocab, self.hidden)}
        for n in range(self.layers):
            layer = {
                "input_layernorm": weights(self.hidden) + 1,
                "self_attn.q_proj": weights(q, self.hidden),
                "self_attn.k_proj": weights(kv, self.hidden),
                "self_attn.v_proj": weights(kv, self.hidden),
                "self_attn.o_proj": weights(self.hidden, q),
                "post_attention_layernorm": weights(self.hidden) + 1,
                "mlp.gate_proj": weights(self.intermediate, self.hidden),
                "mlp.up_proj": weights(self.intermediate, self.hidden),
                "mlp.down_proj": weights(self.hidden, self.intermediate),
            }
            if self.family == "qwen3":
                layer |= {name: weights(self.head_dim) + 1 for name in ("self_attn.q_norm", "self_attn.k_norm")}
            out |= {f"model.layers.{n}.{name}.weight": tensor for name, tensor in layer.items()}
        out["model.norm.weight"] = weights(self.hidden) + 1
        if not self.tied:
            out["lm_head.weight"] = weights(self.vocab, self.hidden)
        return out


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Hugging Face tensor name -> GGUF's."""
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in top:
        return f"{top[stem]}.weight"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[inner]}.weight"


def permuted(tiny: Tiny, name: str, tensor: Array) -> Array:
    """As the published conversion stores q and k of llama models; other tensors as they are."""
    heads = tiny.heads if "q_proj" in name else tiny.kv_heads
    if tiny.family != "llama" or not ("q_proj" in name or "k_proj" in name):
        return tensor
    pairs = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(tensor.shape))


def unpermuted(tiny: Tiny, name: str, tensor: Array) -> Array:
    """The inverse of `permuted`, found by permuting row numbers."""
    order = permuted(tiny, name, np.arange(len(tensor)))
    out = np.empty_like(tensor)
    out[order] = tensor
    return out


def kind_of(name: str, tensor: Array, kind: str, kinds: Mapping[str, str] | None = None) -> str:
    """What `write_gguf` stores a tensor as."""
    if tensor.ndim < 2:
        return "F32"
    return next((other for part, other in (kinds or {}).items() if part in name), kind)


def stored(tiny: Tiny, name: str, tensor: Array, kind: str) -> Array:
    """What `write_gguf` stores: quantised, or where the package can't, random blocks instead of the values."""
    turned = permuted(tiny, name, tensor)
    try:
        return np.asarray(gguf.quants.quantize(turned, gguf.GGMLQuantizationType[kind]))
    except NotImplementedError:
        random = np.random.default_rng(list(name.encode()))
        return random_blocks(kind, *tensor.shape, random, 0.3)


def dequantised(
    tiny: Tiny, tensors: Mapping[str, Array], kind: str, kinds: Mapping[str, str] | None = None
) -> dict[str, Array]:
    """The fp32 values of what `write_gguf` stores, by Hugging Face names and in their row order."""
    out = {}
    for name, tensor in tensors.items():
        as_kind = kind_of(name, tensor, kind, kinds)
        values = gguf.dequantize(stored(tiny, name, tensor, as_kind), gguf.GGMLQuantizationType[as_kind])
        out[name] = unpermuted(tiny, name, np.ascontiguousarray(values, np.float32).reshape(tensor.shape))
    return out


def write_gguf(
    path: Path,
    tiny: Tiny,
    tensors: Mapping[str, Array],
    *,
    kind: str = "F32",
    kinds: Mapping[str, str] | None = None,
    vocabulary: Vocabulary | None = None,
    pre: str = "gpt-2",
    extra: Mapping[str, Any] | None = None,
    factors: Array | None = None,
) -> Path:
    """Writes `tensors` (Hugging Face names and row order) as GGUF; matrices in type `kind`, norms in F32.

    `kinds`: other types for matrices whose names hold the key. `extra`: metadata to set or (None) to leave out.
    """
    vocabulary = vocabulary or train_vocabulary()
    arch = tiny.family
    metadata: dict[str, Any] = {
        f"{arch}.block_count": tiny.layers,
        f"{arch}.context_length": tiny.max_context,
        f"{arch}.embedding_length": tiny.hidden,
        f"{arch}.feed_forward_length": tiny.intermediate,
        f"{arch}.attention.head_count": tiny.heads,
        f"{arch}.attention.head_count_kv": tiny.kv_heads,
        f"{arch}.attention.key_length": tiny.head_dim,
        f"{arch}.attention.value_length": tiny.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": tiny.eps,
        f"{arch}.rope.freq_base": tiny.theta,
        f"{arch}.rope.dimension_count": tiny.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.types,
        "tokenizer.ggml.merges": vocabulary.merges,
        "tokenizer.ggml.bos_token_id": vocabulary.id("<|bos|>"),
        "tokenizer.ggml.eos_token_id": vocabulary.id("<|eos|>"),
        "tokenizer.ggml.eot_token_id": vocabulary.id("<|eot|>"),
    }
    metadata |= extra or {}
    arch = str(metadata.pop("general.architecture", arch))
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        as_kind = kind_of(name, tensor, kind, kinds)
        data = stored(tiny, name, tensor, as_kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType[as_kind])
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, Sequence):
        writer.add_array(key, value)


def split_gguf(path: Path, shards: int) -> list[Path]:
    """Divides a file among `shards` beside it, named and marked as the published tool does; the file goes."""
    reader = gguf.GGUFReader(path)
    names = [path.with_name(f"{path.stem}-{n + 1:05}-of-{shards:05}.gguf") for n in range(shards)]
    arch = reader.fields["general.architecture"].contents()
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(name, arch)
        for key, value in reader.fields.items() if number == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                _add(writer, key, value.contents())
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", shards)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::shards]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    path.unlink()
    return names


def write_directory(
    path: Path,
    tiny: Tiny,
    tensors: Mapping[str, Array],
    *,
    vocabulary: Vocabulary | None = None,
    config: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """Writes a Hugging Face directory; `config` replaces or (None) removes keys of config.json."""
    path.mkdir(parents=True, exist_ok=True)
    merged = tiny.config() | dict(config or {})
    (path / "config.json").write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer_config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    hf_tokenizer(vocabulary or train_vocabulary()).save(str(path / "tokenizer.json"))
    names = sorted(tensors)
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors")
        return path
    placed = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, path / file)
        placed |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": placed}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def hf_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The GPT-2 style tokenizer of a vocabulary, as a tokenizer.json would define it."""
    ids = {token: id for id, token in enumerate(vocabulary.tokens)}
    plain = {token: id for token, id in ids.items() if vocabulary.types[id] == int(gguf.TokenType.NORMAL)}
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": token, "special": token in SPECIALS, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
            for token, id in ids.items()
            if token not in plain
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": plain, "merges": vocabulary.merges},
    }
    return Tokenizer.from_str(json.dumps(definition))
