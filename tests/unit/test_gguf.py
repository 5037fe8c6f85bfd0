"""GGUF files: the reader against the `gguf` package, a safetensors twin, `transformers`, and what it must refuse."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from shared.model.gguf_header import KINDS as GGUF_KINDS
from shared.model.gguf_header import Strings, read_header
from shared.model.spec import BadModel, ModelMissing, open_model
from shared.model.tensors import BLOCK_BYTES, BLOCK_VALUES, dequantise, row_bytes
from tests.models import smollm2_path
from tests.tiny_models import Tiny, dequantised, gguf_name, train_vocabulary, write_directory, write_gguf

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]
FAMILIES = ["llama", "qwen3"]
VOCABULARY = train_vocabulary()


@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_values_equal_the_packages_bit_for_bit(kind: str) -> None:
    random = np.random.default_rng(5)
    values = (random.standard_normal((37, 96)) * 10.0 ** random.integers(-6, 4, (37, 1))).astype(np.float32)
    values[3] = 0
    quantised = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(values, quantised)
    expected = gguf.dequantize(packed, quantised)
    got = np.empty(values.shape, np.float32)
    rows = np.ascontiguousarray(packed).view(np.uint8).reshape(37, row_bytes(kind, 96))
    dequantise(kind, rows, got)
    assert np.array_equal(got.view(np.uint32), np.ascontiguousarray(expected, np.float32).view(np.uint32))


@pytest.mark.parametrize("kind", [kind for kind in GGUF_KINDS if BLOCK_VALUES[kind] > 1])
def test_any_bytes_dequantise_as_in_the_package(kind: str) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    rows = np.random.default_rng(1).integers(0, 256, (64, row_bytes(kind, 256)), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales: infinities and NaNs are among them
        expected = gguf.dequantize(rows, quantised)
    got = np.empty((64, 256), np.float32)
    dequantise(kind, rows, got)
    assert not np.isfinite(got).all()
    assert np.array_equal(got, expected, equal_nan=True)


@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_equals_its_dequantised_safetensors_twin_bit_for_bit(family: str, kind: str, tmp_path: Path) -> None:
    tiny = Tiny(family=family, hidden=256, intermediate=256, heads=16)
    tensors = tiny.tensors()
    file = write_gguf(tmp_path / "m.gguf", tiny, tensors, kind=kind, vocabulary=VOCABULARY)
    write_directory(tmp_path / "twin", tiny, dequantised(tiny, tensors, kind), vocabulary=VOCABULARY)
    ours = open_model(str(file), tmp_path)
    theirs = open_model(str(tmp_path / "twin"), tmp_path)
    assert ours.tensors().keys() == theirs.tensors().keys()
    for name, tensor in ours.tensors().items():
        assert np.array_equal(tensor.fp32().view(np.uint32), theirs.tensors()[name].fp32().view(np.uint32)), name
    assert ours.spec.fingerprint_fields() == theirs.spec.fingerprint_fields()
    assert ours.spec.format == kind


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_put_back_as_transformers_puts_them(family: str, tmp_path: Path) -> None:
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tiny = Tiny(family=family, heads=6, kv_heads=3, hidden=96)
    file = write_gguf(tmp_path / "m.gguf", tiny, tiny.tensors(), vocabulary=VOCABULARY)
    classes = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
    model = transformers.AutoModelForCausalLM.from_config(classes[family](**tiny.config()))
    theirs = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    ours = open_model(str(file), tmp_path).tensors()
    for canonical, name in (("layers.1.q", "q_proj"), ("layers.1.k", "k_proj"), ("layers.1.v", "v_proj")):
        expected = theirs[f"model.layers.1.self_attn.{name}.weight"].numpy()
        assert np.array_equal(ours[canonical].fp32(), expected)


def test_raw_rows_are_the_files_own_in_the_tensors_order(tmp_path: Path) -> None:
    tiny = Tiny()
    tensors = tiny.tensors()
    source = open_model(str(write_gguf(tmp_path / "m.gguf", tiny, tensors, kind="Q8_0")), tmp_path)
    q = source.tensors()["layers.0.q"]
    expected = gguf.quants.quantize(tensors["model.layers.0.self_attn.q_proj.weight"], gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(q.raw(), expected)  # whole rows moved: quantising before or after is the same
    values = np.empty(q.shape, np.float32)
    dequantise(q.kind, q.raw(), values)
    assert np.array_equal(values, q.fp32())


def test_large_tensors_are_dequantised_in_pieces_without_seams(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = Tiny()
    source = open_model(str(write_gguf(tmp_path / "m.gguf", tiny, tiny.tensors(), kind="Q4_1")), tmp_path)
    whole = {name: tensor.fp32() for name, tensor in source.tensors().items()}
    monkeypatch.setattr("shared.model.tensors._PIECE", 200)
    for name, tensor in source.tensors().items():
        assert np.array_equal(tensor.fp32(), whole[name])


def test_header_agrees_with_the_packages_reader(tmp_path: Path) -> None:
    tiny = Tiny()
    file = write_gguf(tmp_path / "m.gguf", tiny, tiny.tensors(), kind="Q4_0", extra={"some.flag": True})
    header = read_header(file)
    reader = gguf.GGUFReader(file)
    assert set(header.metadata) == {key for key in reader.fields if not key.startswith("GGUF.")}
    for key, value in header.metadata.items():
        plain = value.tolist() if isinstance(value, np.ndarray) else value
        plain = plain.read() if isinstance(plain, Strings) else plain
        assert plain == reader.fields[key].contents(), key
    assert {t.name: (t.tensor_type.name, t.data_offset) for t in reader.tensors} == {
        info.name: (info.kind, info.start) for info in header.tensors.values()
    }


def test_facts_come_from_the_file(tmp_path: Path) -> None:
    tiny = Tiny(family="qwen3", head_dim=32, tied=True, theta=1e6)
    extra = {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    file = write_gguf(tmp_path / "m.gguf", tiny, tiny.tensors(), vocabulary=VOCABULARY, extra=extra)
    spec = open_model(str(file), tmp_path).spec
    assert (spec.name, spec.architecture, spec.head_dim, spec.tied, spec.qk_norm) == ("m", "qwen3", 32, True, True)
    assert (spec.rope.theta, spec.rope.dims, spec.rope.factors) == (1e6, 32, ())
    assert spec.stop_ids == tuple(sorted({VOCABULARY.id("<|eos|>"), VOCABULARY.id("<|eot|>")}))
    assert (spec.bos_id, spec.add_bos) == (VOCABULARY.id("<|bos|>"), True)
    assert (spec.sampling.temperature, spec.sampling.top_k) == (0.5, 20)
    assert spec.chat_template == "{{ messages }}"
    assert spec.template_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


def test_llama_bpe_adds_bos_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    tiny = Tiny()
    for pre, extra, expected in (
        ("llama-bpe", {}, True),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False),
        ("smollm", {}, False),
    ):
        file = write_gguf(tmp_path / "m.gguf", tiny, tiny.tensors(), vocabulary=VOCABULARY, pre=pre, extra=extra)
        assert open_model(str(file), tmp_path).spec.add_bos is expected


def test_rope_factors_of_llama_3_are_read(tmp_path: Path) -> None:
    tiny = Tiny()
    factors = np.linspace(1, 8, tiny.head_dim // 2).astype(np.float32)
    file = write_gguf(tmp_path / "m.gguf", tiny, tiny.tensors(), vocabulary=VOCABULARY, factors=factors)
    rope = open_model(str(file), tmp_path).spec.rope
    assert rope.kind == "factors"
    plain = 10000.0 ** (-np.arange(0, tiny.head_dim, 2) / tiny.head_dim)
    assert np.allclose(rope.inverse_frequencies(), plain / factors, rtol=1e-15)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "gemma3"}, r"architecture 'gemma3' is not supported; known are llama, qwen3"),
    ({"tokenizer.ggml.pre": "deepseek-llm"}, r"unknown pre-tokenizer 'deepseek-llm'; known are gpt-2, llama-bpe"),
    ({"tokenizer.ggml.pre": None}, r"tokenizer\.ggml\.pre is missing"),
    ({"tokenizer.ggml.model": "llama"}, r"tokenizer 'llama' is not supported; known is gpt2"),
    ({"tokenizer.ggml.eos_token_id": 9999}, r"eos_token_id is 9999, the vocabulary has \d+ tokens"),
    ({"tokenizer.ggml.token_type": [1, 2]}, r"token_type is missing or has not one entry for each token"),
    ({"llama.rope.scaling.type": "yarn"}, r"rope scaling 'yarn' is not supported; known are none and Llama 3's"),
    ({"llama.rope.dimension_count": 8}, r"over 8 of 16 head dimensions"),
    ({"llama.attention.value_length": 8}, r"K and V heads of different size"),
    ({"llama.expert_count": 8}, r"experts \(MoE\) is not supported"),
    ({"llama.attention.sliding_window": 64}, r"sliding-window attention of 64 tokens \(context 256\)"),
    ({"llama.block_count": 3}, r"tensor layers\.2\.attn_norm is missing"),
    ({"llama.block_count": 1}, r"tensor layers\.1\.\w+ has no place in a llama model"),
    ({"llama.block_count": None}, r"metadata llama\.block_count is missing"),
    ({"llama.block_count": "two"}, r"metadata llama\.block_count is a str, not a int"),
    ({"llama.block_count": 4_000_000_000}, r"layers is 4000000000, which no model has"),
    ({"llama.attention.head_count": 3}, r"3 query heads can't share 2 KV heads"),
    ({"llama.attention.head_count": 0}, r"heads is 0"),
    ({"llama.attention.head_count_kv": 1}, r"layers\.0\.k has shape \[32, 64\], the configuration says \[16, 64\]"),
    ({"llama.rope.freq_base": float("nan")}, r"rope theta is nan"),
    ({"split.count": 2}, r"m\.gguf is one of 2 files; they are found by names that end in -00001-of-00002\.gguf"),
    ({"split.count": 1 << 20}, r"split\.count is 1048576, no number of files"),
]


@pytest.mark.parametrize(("extra", "reason"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(extra: dict[str, Any], reason: str, tmp_path: Path) -> None:
    tiny = Tiny()
    file = write_gguf(tmp_path / "m.gguf", tiny, tiny.tensors(), vocabulary=VOCABULARY, extra=extra)
    with pytest.raises(BadModel, match=reason) as caught:
        open_model(str(file), tmp_path)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_blocks_are_the_packages() -> None:
    for kind in GGUF_KINDS:
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert sizes == (BLOCK_VALUES[kind], BLOCK_BYTES[kind]), kind


def test_unknown_tensor_types_are_refused_by_name(tmp_path: Path) -> None:
    tiny = Tiny(hidden=256, heads=16, intermediate=256)
    file = write_gguf(tmp_path / "m.gguf", tiny, tiny.tensors(), vocabulary=VOCABULARY, kind="Q8_0")
    content = bytearray(file.read_bytes())
    at = content.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 16
    assert content[at : at + 4] == (8).to_bytes(4, "little")
    content[at : at + 4] = (16).to_bytes(4, "little")
    file.write_bytes(content)
    with pytest.raises(
        BadModel, match=r"blk\.0\.attn_q\.weight has type IQ2_XXS; known are F32, F16, BF16, Q8_0, Q4_0"
    ):
        open_model(str(file), tmp_path)


def test_a_file_that_is_cut_short_is_refused_with_both_sizes(tmp_path: Path) -> None:
    tiny = Tiny()
    file = write_gguf(tmp_path / "m.gguf", tiny, tiny.tensors(), vocabulary=VOCABULARY)
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(size - 1000)
    with pytest.raises(BadModel, match=rf"ends at byte \d+, the file has {size - 1000}; it is cut short"):
        open_model(str(file), tmp_path)


def test_no_model_and_no_gguf_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match=r"neither a path nor in .*perdure models pull nosuch"):
        open_model("nosuch", tmp_path)
    with pytest.raises(ModelMissing, match="no such file"):
        open_model(str(tmp_path / "nosuch.gguf"), tmp_path)
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(BadModel, match="is empty"):
        open_model(str(tmp_path / "empty.gguf"), tmp_path)
    (tmp_path / "other.gguf").write_bytes(b"PK" + bytes(100))
    with pytest.raises(BadModel, match="is no GGUF file"):
        open_model(str(tmp_path / "other.gguf"), tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(BadModel, match=r"no \.gguf file and no Hugging Face directory"):
        open_model(str(tmp_path / "weights.bin"), tmp_path)


def test_a_known_name_is_found_in_the_models_directory(tmp_path: Path) -> None:
    tiny = Tiny()
    write_gguf(tmp_path / "tiny-name.gguf", tiny, tiny.tensors(), vocabulary=VOCABULARY)
    assert open_model("tiny-name", tmp_path).spec.name == "tiny-name"


def test_gguf_names_of_the_test_kit_are_those_of_the_package() -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    for name in Tiny(family="qwen3").tensors():
        assert names.get_name(name, try_suffixes=(".weight",)) == gguf_name(name)


def test_smollm2_is_what_its_authors_published() -> None:
    source = open_model(str(smollm2_path()), smollm2_path().parent)
    spec = source.spec
    sizes = (spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.hidden, spec.intermediate, spec.vocab)
    assert sizes == (30, 9, 3, 64, 576, 1536, 49152)
    assert (spec.architecture, spec.tied, spec.max_context, spec.rope.theta) == ("llama", True, 8192, 100000.0)
    assert (spec.bos_id, spec.add_bos, spec.stop_ids, spec.format) == (1, False, (2,), "Q4_1")
    assert spec.kv_layout("bf16").block_tokens == 32  # 22.5 KiB a token: the block nearest 1 MiB
    kinds = [tensor.kind for tensor in source.tensors().values()]
    assert (kinds.count("Q4_1"), kinds.count("Q8_0"), kinds.count("F32")) == (210, 1, 61)


def test_smollm2_dequantises_as_the_package_does() -> None:
    source = open_model(str(smollm2_path()), smollm2_path().parent)
    for name in ("embed", "layers.0.q", "layers.17.k", "layers.29.down", "norm"):
        tensor = source.tensors()[name]
        expected = gguf.dequantize(tensor.raw(), gguf.GGMLQuantizationType[tensor.kind])
        assert np.array_equal(tensor.fp32().view(np.uint32), expected.reshape(tensor.shape).view(np.uint32)), name
