"""Hugging Face directories: what is read from which file, shards, and what is refused at once."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shared.model.spec import BadModel, ModelSpec, open_model
from tests.tiny_models import Tiny, hf_tokenizer, train_vocabulary, write_directory

VOCABULARY = train_vocabulary()
BOS, EOS, EOT = (VOCABULARY.id(token) for token in ("<|bos|>", "<|eos|>", "<|eot|>"))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def made(path: Path, tiny: Tiny, **given: Any) -> Path:
    return write_directory(path, tiny, tiny.tensors(), vocabulary=VOCABULARY, **given)


def spec_of(path: Path) -> ModelSpec:
    return open_model(str(path), path).spec


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_directory_that_transformers_wrote_is_read_as_transformers_reads_it(family: str, tmp_path: Path) -> None:
    import transformers

    tiny = Tiny(family=family, head_dim=32, tied=family == "qwen3")
    classes = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
    model = transformers.AutoModelForCausalLM.from_config(classes[family](**tiny.config()))
    model.save_pretrained(tmp_path)
    hf_tokenizer(VOCABULARY).save(str(tmp_path / "tokenizer.json"))
    source = open_model(str(tmp_path), tmp_path)
    state = model.state_dict()
    names = {"embed": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
    names |= {"layers.1.q": "model.layers.1.self_attn.q_proj", "layers.0.down": "model.layers.0.mlp.down_proj"}
    if family == "qwen3":
        names |= {"layers.1.k_norm": "model.layers.1.self_attn.k_norm"}
        del names["lm_head"]
    for ours, theirs in names.items():
        assert np.array_equal(source.tensors()[ours].fp32(), state[f"{theirs}.weight"].numpy())
    assert (source.spec.head_dim, source.spec.tied, source.spec.rope.theta) == (32, tiny.tied, tiny.theta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_16_bit_weights_become_the_same_numbers_in_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny = Tiny()
    cast = {name: torch.from_numpy(tensor).to(dtype) for name, tensor in tiny.tensors().items()}
    made(tmp_path, tiny)
    save_file(cast, tmp_path / "model.safetensors")
    tensors = open_model(str(tmp_path), tmp_path).tensors()
    expected = cast["model.layers.1.mlp.up_proj.weight"].float().numpy()
    assert np.array_equal(tensors["layers.1.up"].fp32().view(np.uint32), expected.view(np.uint32))


def test_shards_equal_one_file(tmp_path: Path) -> None:
    tiny = Tiny()
    one, many = made(tmp_path / "one", tiny), made(tmp_path / "many", tiny, shards=3)
    a, b = open_model(str(one), tmp_path), open_model(str(many), tmp_path)
    assert len(list(many.glob("*.safetensors"))) == 3
    assert a.tensors().keys() == b.tensors().keys()
    for name, tensor in a.tensors().items():
        assert np.array_equal(tensor.fp32(), b.tensors()[name].fp32())
    assert a.digest() == b.digest()


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_llama_3_scaling_is_the_references(key: str, tmp_path: Path) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    tiny = Tiny(theta=500000.0, head_dim=64)
    config: dict[str, Any] = {"rope_parameters": None, "rope_theta": tiny.theta, key: dict(LLAMA3)}
    if key == "rope_parameters":
        config = {key: LLAMA3 | {"rope_theta": tiny.theta}}
    rope = spec_of(made(tmp_path, tiny, config=config)).rope
    reference = transformers.LlamaConfig(**tiny.config() | {"rope_parameters": LLAMA3 | {"rope_theta": tiny.theta}})
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](reference, "cpu")
    assert rope.kind == "llama3"
    assert {round(f, 3) for f in rope.factors} > {1.0, 8.0}  # short waves, long waves and the ramp between
    assert np.allclose(rope.inverse_frequencies(), expected.numpy(), rtol=1e-6)


def test_head_dim_follows_the_families_own_rule(tmp_path: Path) -> None:
    tiny = Tiny(head_dim=16)
    assert spec_of(made(tmp_path / "a", tiny, config={"head_dim": None})).head_dim == 16
    wide = Tiny(family="qwen3", head_dim=128)
    assert spec_of(made(tmp_path / "b", wide, config={"head_dim": None})).head_dim == 128


def test_stop_set_joins_generation_config_and_tokenizer(tmp_path: Path) -> None:
    tiny = Tiny()
    tokens = {"eos_token": {"content": "<|eot|>"}, "bos_token": "<|bos|>"}
    path = made(tmp_path / "a", tiny, generation={"eos_token_id": [EOS, 7]}, tokenizer_config=tokens)
    assert spec_of(path).stop_ids == tuple(sorted((7, EOS, EOT)))
    path = made(tmp_path / "b", tiny, config={"eos_token_id": EOS})
    assert spec_of(path).stop_ids == (EOS,)


def test_sampling_defaults_are_the_generation_configs(tmp_path: Path) -> None:
    tiny = Tiny()
    wish = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    sampling = spec_of(made(tmp_path / "a", tiny, generation=wish)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.6, 20, 0.95, 0.0)
    assert spec_of(made(tmp_path / "b", tiny)).sampling.temperature == 0
    assert spec_of(made(tmp_path / "c", tiny, generation=wish | {"do_sample": False})).sampling.temperature == 0


def test_bos_is_added_when_the_tokenizers_own_template_adds_it(tmp_path: Path) -> None:
    tiny = Tiny()
    path = made(tmp_path, tiny, tokenizer_config={"bos_token": "<|bos|>", "eos_token": "<|eos|>"})
    assert (spec_of(path).add_bos, spec_of(path).bos_id) == (False, BOS)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    processor: dict[str, Any] = {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [BOS], "tokens": ["<|bos|>"]}},
    }
    tokenizer["post_processor"] = {"type": "Sequence", "processors": [processor]}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert spec_of(path).add_bos is True
    assert open_model(str(path), path).tokenizer().encode("a").ids[0] == BOS
    processor["single"] = [bos, text, {"SpecialToken": {"id": "<|eos|>", "type_id": 0}}]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(BadModel, match=r"appends <\|eos\|> to every text"):
        spec_of(path)
    processor["single"] = [{"SpecialToken": {"id": "<|eot|>", "type_id": 0}}, text]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(BadModel, match=r"puts <\|eot\|> before every text, its BOS is <\|bos\|>"):
        spec_of(path)


def test_chat_template_comes_from_its_own_file_first(tmp_path: Path) -> None:
    tiny = Tiny()
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    path = made(tmp_path, tiny, tokenizer_config={"chat_template": several})
    assert spec_of(path).chat_template == "D"
    (path / "chat_template.jinja").write_text("own file")
    assert spec_of(path).chat_template == "own file"
    assert spec_of(made(tmp_path / "none", tiny)).chat_template is None


def test_a_tied_head_that_was_written_all_the_same_is_left_aside(tmp_path: Path) -> None:
    source = open_model(str(made(tmp_path, Tiny(), config={"tie_word_embeddings": True})), tmp_path)
    assert source.spec.tied
    assert "lm_head" not in source.tensors()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["MistralForCausalLM"]}, r"'MistralForCausalLM' is not supported; known are LlamaForCausalLM"),
    ({"architectures": None, "model_type": "phi3"}, r"architecture 'phi3' is not supported; known are llama, qwen3"),
    ({"quantization_config": {"quant_method": "awq"}}, r"quantisation 'awq' is not supported; known are F32"),
    ({"attention_bias": True}, r"attention_bias is not supported"),
    ({"mlp_bias": True}, r"mlp_bias is not supported"),
    ({"hidden_act": "gelu"}, r"activation 'gelu' is not supported; known is silu"),
    ({"partial_rotary_factor": 0.5}, r"partial rotary embedding is not supported"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, r"layers of type 'sliding_attention'"),
    ({"sliding_window": 128, "use_sliding_window": True}, r"sliding-window attention of 128 tokens \(context 256\)"),
    ({"rope_scaling": {"type": "yarn", "factor": 4}, "rope_parameters": None}, r"rope scaling 'yarn' is not supported"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, r"low_freq_factor is missing"),
    ({"rope_parameters": LLAMA3 | {"high_freq_factor": 0.5}}, r"makes no sense"),
    ({"rope_parameters": ["x"]}, r"is no JSON object"),
    ({"num_hidden_layers": None}, r"num_hidden_layers is missing"),
    ({"num_hidden_layers": 2.0}, r"num_hidden_layers is 2\.0, not of type int"),
    ({"num_hidden_layers": 3}, r"tensor layers\.2\.attn_norm is missing"),
    ({"vocab_size": 400}, r"embed has shape \[416, 64\], the configuration says \[400, 64\]"),
    ({"eos_token_id": 5000}, r"special token id 5000 is outside the vocabulary of 416"),
    ({"eos_token_id": "x"}, r"eos_token_id is 'x', not a token id"),
    ({"rms_norm_eps": 0.0}, r"rms norm epsilon is 0\.0"),
    ({"rms_norm_eps": 1e300}, r"rms norm epsilon is inf"),
    ({"rope_parameters": {"rope_theta": -1.0}}, r"rope theta is -1\.0"),
    ({"rope_parameters": LLAMA3 | {"rope_theta": -1.0}}, r"makes no sense"),
    ({"head_dim": 10**9, "rope_parameters": LLAMA3}, r"makes no sense"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = made(tmp_path / "model", Tiny(), config=config)
    with pytest.raises(BadModel, match=reason) as caught:
        spec_of(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("config.json", r"has no config\.json; the directory is incomplete"),
        ("tokenizer.json", r"has no tokenizer\.json"),
        ("model-00002-of-00003.safetensors", r"shard model-00002-of-00003\.safetensors of .* is missing"),
        ("model.safetensors.index.json", r"has neither model\.safetensors nor model\.safetensors\.index\.json"),
    ],
)
def test_a_missing_file_is_named_at_once(missing: str, reason: str, tmp_path: Path) -> None:
    path = made(tmp_path, Tiny(), shards=3)
    (path / missing).unlink()
    with pytest.raises(BadModel, match=reason):
        spec_of(path)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [("decoder", {"type": "Metaspace"}, "BPE with decoder Metaspace"), ("model", {"type": "Unigram"}, "model Unigram")],
)
def test_another_kind_of_tokenizer_is_refused_by_name(key: str, value: Any, named: str, tmp_path: Path) -> None:
    path = made(tmp_path, Tiny())
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(tokenizer | {key: value}))
    with pytest.raises(BadModel, match=rf"{named}.* is not supported; known is byte-level BPE"):
        spec_of(path)


def test_a_shard_outside_the_directory_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "model", Tiny(), shards=2)
    (tmp_path / "evil.safetensors").write_bytes((path / "model-00002-of-00002.safetensors").read_bytes())
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002-of-00002", "../evil"))
    with pytest.raises(BadModel, match=r"shard \.\./evil\.safetensors"):
        spec_of(path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    "content", ["{", "[]", "null", '{"a": ' * 5000, "\x00", '{"added_tokens": 3, "eos_token_id": {}}']
)
def test_a_malformed_file_is_named(name: str, content: str, tmp_path: Path) -> None:
    path = made(tmp_path, Tiny(), generation={}, tokenizer_config={"eos_token": "<|eos|>"})
    (path / name).write_text(content)
    if content.startswith('{"added') and name == "tokenizer_config.json":
        assert spec_of(path).stop_ids == ()
        return
    with pytest.raises(BadModel, match=name):
        spec_of(path)


def test_a_safetensors_file_cut_short_is_refused_with_both_sizes(tmp_path: Path) -> None:
    path = made(tmp_path, Tiny())
    weights = path / "model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size - 64)
    with pytest.raises(BadModel, match=r"lies at \[\d+, \d+\), the file has \d+ bytes of data; it is cut short"):
        spec_of(path)


def header_of(entries: object, data: bytes = b"") -> bytes:
    raw = json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"is empty"),
        (b"abc", r"claims \d+ bytes, the file has 3"),
        (struct.pack("<Q", 1 << 60), r"claims 1152921504606846976 bytes, the file has 8"),
        (struct.pack("<Q", 3) + b"{{{", r"header is no JSON"),
        (header_of([]), r"header is no JSON object"),
        (header_of({"a": 1}), r"tensor a: its entry in the header lacks"),
        (
            header_of({"a": ENTRY | {"dtype": "F8_E5M2"}}, bytes(8)),
            r"tensor a has type F8_E5M2; known are F32, F16, BF16, F8_E4M3",
        ),
        (header_of({"a": ENTRY | {"shape": [-2]}}, bytes(8)), r"are no counts"),
        (header_of({"a": ENTRY | {"shape": "x"}}, bytes(8)), r"are no counts"),
        (header_of({"a": ENTRY | {"data_offsets": [0, "x"]}}, bytes(8)), r"are no counts"),
        (header_of({"a": ENTRY | {"shape": [3]}}, bytes(8)), r"of F32 \[3\] can't have 8 bytes"),
        (header_of({"a": ENTRY | {"shape": [1 << 60, 1 << 60]}}, bytes(8)), r"can't have 8 bytes"),
        (header_of({"a": ENTRY | {"data_offsets": [4, 12]}}, bytes(12)), r"starts at byte 4, the one before ends at 0"),
        (header_of({"a": ENTRY, "b": ENTRY}, bytes(8)), r"starts at byte 0, the one before ends at 8"),
        (header_of({"a": ENTRY}, bytes(12)), r"tensors end at byte 8, the file has 12"),
    ],
)
def test_a_malformed_safetensors_header_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = made(tmp_path, Tiny())
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(BadModel, match=reason):
        spec_of(path)
