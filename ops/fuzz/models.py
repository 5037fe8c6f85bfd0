"""Model files from anywhere: GGUF and safetensors headers, a directory's JSON files."""

import json
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from ops.fuzz.mutate import bent
from ops.fuzz.target import Target, joined, parted, same
from ops.fuzz.templates import TEMPLATES
from ops.fuzz.values import bent_value
from shared.model.errors import BadModel
from shared.model.gguf_header import MAGIC
from shared.model.safetensors_header import read_safetensors
from shared.model.spec import open_model

HIDDEN, HEADS, HEAD_DIM, VOCAB = 32, 2, 16, 260
_ROOM = 1 << 17
"""Bytes of zeros behind a header, where its weights would lie."""


@cache
def _alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _tokens() -> list[str]:
    return [*_alphabet(), "th", "<|bos|>", "<|eos|>", "<tool>"][:VOCAB]


def _shapes() -> dict[str, tuple[int, ...]]:
    """Tensors of a llama of one layer, by their Hugging Face name, slowest dimension first."""
    layer = "model.layers.0"
    return {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (HEAD_DIM, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (HEAD_DIM, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}.mlp.gate_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, HIDDEN),
    }


# --- GGUF: the header alone is the input; weights are zeros -----------------------------------------------------------

_GGUF_NAMES = [
    "token_embd",
    "output_norm",
    "blk.0.attn_norm",
    "blk.0.attn_q",
    "blk.0.attn_k",
    "blk.0.attn_v",
    "blk.0.attn_output",
    "blk.0.ffn_norm",
    "blk.0.ffn_gate",
    "blk.0.ffn_up",
    "blk.0.ffn_down",
]


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    kind, items = (8, map(_text, value)) if isinstance(value[0], str) else (4, (struct.pack("<I", n) for n in value))
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(items)


def _gguf(metadata: dict[str, Any]) -> bytes:
    out = MAGIC + struct.pack("<IQQ", 3, len(_GGUF_NAMES), len(metadata))
    out += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    at = 0
    for name, shape in zip(_GGUF_NAMES, _shapes().values(), strict=True):
        out += _text(f"{name}.weight") + struct.pack("<I", len(shape))
        out += b"".join(struct.pack("<Q", side) for side in reversed(shape)) + struct.pack("<IQ", 0, at)
        size = 4
        for side in shape:
            size *= side
        at += -(-size // 32) * 32
    return out


def _metadata() -> dict[str, Any]:
    tokens = _tokens()
    return {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": HIDDEN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": 1,
        "llama.attention.key_length": HEAD_DIM,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "general.sampling.temp": 0.7,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3, 3, 4],
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.bos_token_id": tokens.index("<|bos|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|eos|>"),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TEMPLATES[0],
    }


def _gguf_seeds(rng: Random) -> list[bytes]:
    plain = _metadata()
    few = {key: value for key, value in plain.items() if not key.startswith("tokenizer")}
    return [_gguf(plain), _gguf(few), _gguf(plain | {"tokenizer.ggml.merges": ["t h", "th e"]})]


def _gguf_check(data: bytes, place: Path) -> bool:
    path = place / "m.gguf"
    with path.open("wb") as file:
        file.write(data)
        file.truncate(len(data) + _ROOM)
    return _opens(str(path), place)


def _opens(source: str, models: Path) -> bool:
    """A model that can be used to the end, or one line that says why not."""
    try:
        model = open_model(source, models)
        tokenizer = model.tokenizer()
    except BadModel as error:
        same(bool(str(error)) and "\n" not in str(error), "a refusal of no line, or of several")
        return False
    same(set(model.tensors()) == set(model.spec.shapes()), "tensors that are not those of its description")
    tokenizer.decode(tokenizer.encode("the cat 猫").ids)
    return True


# --- safetensors ------------------------------------------------------------------------------------------------------


def _tensors_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = 4
        for side in shape:
            size *= side
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return entries


def _safetensors(entries: Any, data: bytes) -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + data


def _safetensors_seeds(rng: Random) -> list[bytes]:
    few = _tensors_of({"a": (2, 3), "b": (4,), "c": ()})
    return [_safetensors(few, bytes(44)), _safetensors({}, b""), _safetensors({"x": few["a"]}, bytes(24))]


def _safetensors_check(data: bytes, place: Path) -> bool:
    path = place / "m.safetensors"
    path.write_bytes(data)
    try:
        tensors = read_safetensors(path)
    except BadModel:
        return False
    length = int.from_bytes(data[:8], "little")
    same(
        sum(blob.nbytes for _, _, blob in tensors.values()) == len(data) - 8 - length,
        "tensors that don't tile the file",
    )
    return True


def _safetensors_bend(data: bytes, rng: Random, corpus: Sequence[bytes]) -> bytes:
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.5:
        return bent(data, rng, corpus)
    return _safetensors(bent_value(json.loads(data[8 : 8 + length]), rng), data[8 + length :])


# --- a Hugging Face directory -----------------------------------------------------------------------------------------

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def _directory() -> list[Any]:
    tokens = _tokens()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [
        {"id": id, "content": tokens[id], "special": id < 259, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for id in (257, 258, 259)
    ]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 32},
        "tie_word_embeddings": True,
        "eos_token_id": [258],
        "bos_token_id": 257,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": {"max_length": 9, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: id for id, token in enumerate(tokens[:257])}, "merges": ["t h"]},
    }
    settings = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}, "chat_template": TEMPLATES[1]}
    return [config, tokenizer, settings, {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "eos_token_id": [258]}]


def _directory_seeds(rng: Random) -> list[bytes]:
    return [joined([json.dumps(part).encode() for part in _directory()])]


def _directory_check(data: bytes, place: Path) -> bool:
    for name, content in zip(FILES, parted(data, len(FILES)), strict=True):
        if content:
            (place / name).write_bytes(content)
    entries = _tensors_of(_shapes())
    size = max(entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__")
    (place / "model.safetensors").write_bytes(_safetensors(entries, bytes(size)))
    return _opens(str(place), place)


def _directory_bend(data: bytes, rng: Random, corpus: Sequence[bytes]) -> bytes:
    parts = parted(data, len(FILES))
    which = rng.randrange(len(FILES))
    if rng.random() < 0.3:
        parts[which] = bent(parts[which], rng, parts)
    else:
        value = json.loads(parts[which])
        if which == 1 and rng.random() < 0.7:  # not its vocabulary, which is most of it
            name = rng.choice([name for name in value if name != "model"])
            value[name] = bent_value([value[name]], rng)
        else:
            value = bent_value(value, rng)
        parts[which] = json.dumps(value).encode()
    return joined(parts)


TARGETS = [
    Target("gguf", _gguf_seeds, _gguf_check),
    Target("safetensors", _safetensors_seeds, _safetensors_check, _safetensors_bend),
    Target("model-directory", _directory_seeds, _directory_check, _directory_bend),
]
