"""A Hugging Face directory as a model: config.json -> spec, safetensors -> tensors, tokenizer.json, digest."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shared.model.checks import check_family, check_spec, check_window
from shared.model.digest import cached_digest, digest_tensors
from shared.model.fp8 import Scales, scales_for
from shared.model.hf_files import JsonFile
from shared.model.hf_tokenizer import TokenizerTexts, load_tokenizer
from shared.model.rope import Rope, llama3_factors
from shared.model.safetensors_header import read_safetensors
from shared.model.spec import BadModel, ModelSource, ModelSpec, SamplingDefaults
from shared.model.tensors import F8, Bytes, Tensor, check_tensors, most_common_kind

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CLASSES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
MAX_INDEX = 64 << 20

FP8_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt")
"""Quantisations under whose names FP8 weights come; others that do, too, are told by their tensors' types."""
FP8_BLOCK = 128
_SCALES = (".weight_scale", ".weight_scale_inv")
_UNUSED = (".input_scale", ".input_scale_ub", ".activation_scale", ".k_scale", ".v_scale")
"""Of activations and of KV, which are kept in formats of our own."""

_TOP = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "lm_head"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}


class HfSource(ModelSource):
    """One directory with config.json, tokenizer.json and safetensors (one file, or shards and their index)."""

    def __init__(self, path: Path, models_dir: Path) -> None:
        self.path = path
        self.models_dir = models_dir
        self.config = JsonFile(path / "config.json")
        arch = self._architecture()
        self.files = self._weight_files()
        self._raw = self._read_weights()
        self.spec = self._spec(arch)
        check_spec(path, self.spec)
        self._tensors = self._named_tensors()

    def tensors(self) -> Mapping[str, Tensor]:
        """See ModelSource."""
        return self._tensors

    def tokenizer(self) -> "Tokenizer":
        """See ModelSource; truncation and padding that the file may ask for are switched off."""
        return load_tokenizer(self.path)

    def digest(self) -> bytes:
        """See ModelSource."""
        entries = ((name, kind, shape, blob) for name, (kind, shape, blob) in self._raw.items())
        return cached_digest(self.models_dir, self.files, lambda: digest_tensors(entries))

    def _architecture(self) -> str:
        classes = self.config.values.get("architectures")
        if not isinstance(classes, list) or not classes:
            arch = self.config.get("model_type", str)
            check_family(self.path, arch)
            return arch
        name = classes[0]
        if not isinstance(name, str) or name not in CLASSES:
            raise BadModel(f"{self.path}: architecture {name!r} is not supported; known are {', '.join(CLASSES)}")
        return CLASSES[name]

    def _weight_files(self) -> list[Path]:
        single = self.path / "model.safetensors"
        index = self.path / "model.safetensors.index.json"
        if single.exists():
            return [single]
        try:
            raw = JsonFile(index, limit=MAX_INDEX)
        except BadModel:
            if index.exists():
                raise
            raise BadModel(
                f"{self.path} has neither {single.name} nor {index.name}; only safetensors are read"
            ) from None
        placed = raw.values.get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise BadModel(f"{index}: weight_map is missing or empty")
        files = []
        for name in sorted({str(file) for file in placed.values()}):
            if "/" in name or not (self.path / name).is_file():
                raise BadModel(f"{self.path}: shard {name} of {index.name} is missing; the directory is incomplete")
            files.append(self.path / name)
        return files

    def _read_weights(self) -> dict[str, tuple[str, tuple[int, ...], Bytes]]:
        out: dict[str, tuple[str, tuple[int, ...], Bytes]] = {}
        for file in self.files:
            for name, entry in read_safetensors(file).items():
                if name in out:
                    raise BadModel(f"{self.path}: tensor {name} is in two shards")
                out[name] = entry
        return out

    def _spec(self, arch: str) -> ModelSpec:
        get = self.config.get
        self._refuse_variants()
        heads, hidden = get("num_attention_heads", int), get("hidden_size", int)
        usual = hidden // max(1, heads) if arch == "llama" else 128  # the configuration classes' own defaults
        head_dim = get("head_dim", int, usual)
        tokens = TokenizerTexts(self.path)
        generation = JsonFile(self.path / "generation_config.json", optional=True)
        stop = {*(generation.ids("eos_token_id") or self.config.ids("eos_token_id"))}
        eos = tokens.id("eos_token")
        stop |= {eos} if eos is not None else set()
        bos = tokens.id("bos_token")
        return ModelSpec(
            name=self.path.resolve().name,
            architecture=arch,
            layers=get("num_hidden_layers", int),
            heads=heads,
            kv_heads=get("num_key_value_heads", int, heads),
            head_dim=head_dim,
            hidden=hidden,
            intermediate=get("intermediate_size", int),
            vocab=get("vocab_size", int),
            max_context=get("max_position_embeddings", int),
            rope=self._rope(head_dim),
            norm_eps=_as_fp32(get("rms_norm_eps", float, 1e-6)),
            tied=get("tie_word_embeddings", bool, False),
            qk_norm=arch == "qwen3",
            stop_ids=tuple(sorted(stop)),
            bos_id=bos if bos is not None else next(iter(self.config.ids("bos_token_id")), None),
            add_bos=tokens.add_bos(),
            chat_template=tokens.chat_template(),
            source_kind="hf",
            source=self.path,
            format=most_common_kind((kind, math.prod(shape)) for kind, shape, _ in self._raw.values()),
            template_tokens=tokens.texts,
            sampling=_sampling(generation),
        )

    def _refuse_variants(self) -> None:
        """What the configuration may switch on and this program doesn't compute."""
        get, values = self.config.get, self.config.values
        if values.get("quantization_config"):
            quant = values["quantization_config"]
            method = quant.get("quant_method", "unknown") if isinstance(quant, dict) else quant
            if method not in FP8_METHODS:
                raise BadModel(
                    f"{self.path}: quantisation {method!r} is not supported; "
                    "known are F32, F16, BF16 and FP8 (e4m3 with scales) weights"
                )
        for key in ("attention_bias", "mlp_bias"):
            if get(key, bool, False):
                raise BadModel(f"{self.path}: {key} is not supported")
        activation = get("hidden_act", str, "silu")
        if activation != "silu":
            raise BadModel(f"{self.path}: activation {activation!r} is not supported; known is silu")
        if get("partial_rotary_factor", float, 1.0) != 1.0:
            raise BadModel(f"{self.path}: partial rotary embedding is not supported")
        kinds = values.get("layer_types") or []
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if kind != "full_attention":
                raise BadModel(f"{self.path}: layers of type {kind!r} are not supported; known is full_attention")
        if get("use_sliding_window", bool, "use_sliding_window" not in values):
            check_window(self.path, values.get("sliding_window"), get("max_position_embeddings", int))

    def _rope(self, head_dim: int) -> Rope:
        given = self.config.values.get("rope_parameters") or self.config.values.get("rope_scaling") or {}
        rope = JsonFile.of(self.config.path, given)
        theta = rope.get("rope_theta", float, self.config.get("rope_theta", float, 10000.0))
        kind = rope.get("rope_type", str, rope.get("type", str, "default"))
        if kind == "default":
            return Rope(theta, head_dim)
        if kind != "llama3":
            raise BadModel(f"{self.path}: rope scaling {kind!r} is not supported; known are default and llama3")
        try:
            factors = llama3_factors(
                theta,
                head_dim,
                factor=rope.get("factor", float),
                low_freq_factor=rope.get("low_freq_factor", float),
                high_freq_factor=rope.get("high_freq_factor", float),
                original_context=rope.get("original_max_position_embeddings", int),
            )
        except (ValueError, OverflowError) as error:
            raise BadModel(f"{self.path}: {error}") from None
        return Rope(theta, head_dim, "llama3", factors)

    def _named_tensors(self) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        for name, (kind, shape, blob) in self._raw.items():
            if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.spec.tied):
                continue  # tables of old exports; a tied head that was written all the same
            if name.endswith(_UNUSED) or (name.endswith(_SCALES) and self._scaled(name) is not None):
                continue
            ours = _TOP.get(name) or _layer_name(name)
            if ours is None:
                raise BadModel(f"{self.path}: tensor {name} has no place in a {self.spec.architecture} model")
            out[ours] = Tensor(ours, kind, shape, blob, scales=self._scales(name) if kind == F8 else None)
        check_tensors(self.path, self.spec, out)
        return out

    def _scaled(self, scale: str) -> str | None:
        """The FP8 weight that a tensor of scales belongs to."""
        name = f"{scale.rpartition('.')[0]}.weight"
        return name if self._raw.get(name, ("",))[0] == F8 else None

    def _scales(self, name: str) -> Scales:
        where, (_, shape, _) = f"{self.path}: tensor {name}", self._raw[name]
        found = [each for suffix in _SCALES if (each := name.removesuffix(".weight") + suffix) in self._raw]
        if len(shape) != 2 or len(found) != 1:
            wanted = " or ".join(name.removesuffix(".weight") + suffix for suffix in _SCALES)
            raise BadModel(f"{where} {list(shape)} is {F8} and has {len(found)} tensors of scales, not one ({wanted})")
        kind, scale_shape, blob = self._raw[found[0]]
        if kind == F8:
            raise BadModel(f"{self.path}: tensor {found[0]} is {kind}; known for scales are F32, F16, BF16")
        values = Tensor(found[0], kind, scale_shape or (1,), blob).fp32()
        return scales_for(where, shape, values, self._block())

    def _block(self) -> tuple[int, int]:
        """Rows and columns of a block of block-wise scales."""
        quant = self.config.values.get("quantization_config")
        block = quant.get("weight_block_size") if isinstance(quant, dict) else None
        if block is None:
            return FP8_BLOCK, FP8_BLOCK
        if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
            raise BadModel(f"{self.path}: weight_block_size is {block!r}, not a pair of sizes")
        return block[0], block[1]


def _sampling(generation: JsonFile) -> SamplingDefaults:
    """Defaults that the model asks for; without `do_sample` or a temperature it is greedy, as the reference is."""
    sampled = generation.get("do_sample", bool, "temperature" in generation.values)
    if not sampled:
        return SamplingDefaults()
    return SamplingDefaults(
        temperature=generation.get("temperature", float, 1.0),
        top_k=generation.get("top_k", int, 0),
        top_p=generation.get("top_p", float, 1.0),
        min_p=generation.get("min_p", float, 0.0),
    )


def _as_fp32(number: float) -> float:
    """The value as GGUF stores it, so that both formats describe one model alike."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))


def _layer_name(name: str) -> str | None:
    parts = name.split(".", 3)
    if len(parts) == 4 and parts[:2] == ["model", "layers"] and parts[3].endswith(".weight"):
        ours = _LAYER.get(parts[3].removesuffix(".weight"))
        return f"layers.{parts[2]}.{ours}" if ours else None
    return None
