"""A GGUF file as a model: metadata -> spec, tensors by canonical name, tokenizer, digest.

Files of architecture `llama` hold q and k rows interleaved for another rotary layout; they are put back in order when
read (whole rows move, so quantised ones lose nothing). Qwen3's are stored as they are.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shared.model import bpe
from shared.model.checks import check_family, check_spec, check_window
from shared.model.digest import cached_digest, digest_tensors
from shared.model.gguf_header import Strings
from shared.model.gguf_shards import GgufModel, read_gguf
from shared.model.rope import Rope
from shared.model.spec import BadModel, ModelSource, ModelSpec, SamplingDefaults
from shared.model.tensors import Tensor, check_tensors, most_common_kind

if TYPE_CHECKING:
    import numpy.typing as npt
    from tokenizers import Tokenizer

T = TypeVar("T", int, float, str, bool)

_TOP = {"token_embd.weight": "embed", "output_norm.weight": "norm", "output.weight": "lm_head"}
_LAYER = {
    "attn_norm": "attn_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
ROPE_FACTORS = "rope_freqs.weight"


class Metadata:
    """Typed access to a header's metadata; BadModel names the key that is missing or has another type."""

    def __init__(self, header: GgufModel) -> None:
        self.where = header.path
        self.values = header.metadata

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Value of `key`; integers pass as floats."""
        value = self.values.get(key, default)
        if value is None:
            raise BadModel(f"{self.where}: metadata {key} is missing")
        if kind is float and type(value) is int:
            return kind(value)
        if type(value) is not kind:
            raise BadModel(f"{self.where}: metadata {key} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def strings(self, key: str) -> Strings:
        """A list of strings, not read yet."""
        value = self.values.get(key)
        if not isinstance(value, Strings):
            raise BadModel(f"{self.where}: metadata {key} (a list of strings) is missing")
        return value


class GgufSource(ModelSource):
    """One .gguf file, or the shards of one model."""

    def __init__(self, path: Path, models_dir: Path) -> None:
        self.models_dir = models_dir
        self.header = read_gguf(path)
        self.path = path = self.header.path
        self.meta = Metadata(self.header)
        arch = self.meta.get("general.architecture", str)
        check_family(path, arch)
        self.pre = self._check_tokenizer()
        self.spec = self._spec(arch)
        check_spec(path, self.spec)
        self._tensors = self._named_tensors()

    def tensors(self) -> Mapping[str, Tensor]:
        """See ModelSource."""
        return self._tensors

    def tokenizer(self) -> "Tokenizer":
        """See ModelSource."""
        tokens, merges = (self.meta.strings(f"tokenizer.ggml.{name}").read() for name in ("tokens", "merges"))
        types = self.header.metadata["tokenizer.ggml.token_type"].tolist()
        return bpe.build(self.path, self.pre, tokens, types, merges)

    def digest(self) -> bytes:
        """See ModelSource."""
        infos = self.header.tensors.values()
        entries = ((info.name, info.kind, info.shape, self.header.blob(info)) for info in infos)
        return cached_digest(self.models_dir, self.header.files, lambda: digest_tensors(entries))

    def _check_tokenizer(self) -> str:
        """Name of the pre-tokenizer; BadModel when the tokenizer is none of ours."""
        model = self.meta.get("tokenizer.ggml.model", str)
        if model != "gpt2":
            raise BadModel(f"{self.path}: tokenizer {model!r} is not supported; known is gpt2 (byte-level BPE)")
        pre = self.meta.get("tokenizer.ggml.pre", str)
        bpe.check_pre(self.path, pre)
        types = self.header.metadata.get("tokenizer.ggml.token_type")
        tokens = self.meta.strings("tokenizer.ggml.tokens")
        if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu" or len(types) != len(tokens):
            raise BadModel(f"{self.path}: tokenizer.ggml.token_type is missing or has not one entry for each token")
        self.meta.strings("tokenizer.ggml.merges")
        return pre

    def _spec(self, arch: str) -> ModelSpec:
        get = self.meta.get
        heads = get(f"{arch}.attention.head_count", int)
        hidden = get(f"{arch}.embedding_length", int)
        head_dim = get(f"{arch}.attention.key_length", int, hidden // max(1, heads))
        max_context = get(f"{arch}.context_length", int)
        if get(f"{arch}.attention.value_length", int, head_dim) != head_dim:
            raise BadModel(f"{self.path}: K and V heads of different size are not supported")
        if get(f"{arch}.expert_count", int, 0):
            raise BadModel(f"{self.path}: {arch} with experts (MoE) is not supported; known are dense models")
        check_window(self.path, self.header.metadata.get(f"{arch}.attention.sliding_window"), max_context)
        embed = self.header.tensors.get("token_embd.weight")
        if embed is None:
            raise BadModel(f"{self.path}: tensor token_embd.weight is missing")
        tokens = self.meta.strings("tokenizer.ggml.tokens")
        if len(tokens) > embed.shape[0]:
            raise BadModel(f"{self.path}: {len(tokens)} tokens, but the embedding has {embed.shape[0]} rows")
        special = self._special_ids(len(tokens))
        template = self.header.metadata.get("tokenizer.chat_template")
        sampling = SamplingDefaults()
        return ModelSpec(
            name=self.header.name,
            architecture=arch,
            layers=get(f"{arch}.block_count", int),
            heads=heads,
            kv_heads=get(f"{arch}.attention.head_count_kv", int, heads),
            head_dim=head_dim,
            hidden=hidden,
            intermediate=get(f"{arch}.feed_forward_length", int),
            vocab=embed.shape[0],
            max_context=max_context,
            rope=self._rope(arch, head_dim),
            norm_eps=get(f"{arch}.attention.layer_norm_rms_epsilon", float),
            tied="output.weight" not in self.header.tensors,
            qk_norm=arch == "qwen3",
            stop_ids=tuple(sorted({special[name] for name in ("eos", "eot", "eom") if name in special})),
            bos_id=special.get("bos"),
            add_bos="bos" in special and get("tokenizer.ggml.add_bos_token", bool, self.pre == "llama-bpe"),
            chat_template=template if isinstance(template, str) else None,
            source_kind="gguf",
            source=self.path,
            format=most_common_kind((info.kind, math.prod(info.shape)) for info in self.header.tensors.values()),
            template_tokens={
                f"{long}_token": tokens[special[short]]
                for short, long in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad"))
                if short in special
            },
            sampling=SamplingDefaults(
                temperature=get("general.sampling.temp", float, sampling.temperature),
                top_k=get("general.sampling.top_k", int, sampling.top_k),
                top_p=get("general.sampling.top_p", float, sampling.top_p),
                min_p=get("general.sampling.min_p", float, sampling.min_p),
            ),
        )

    def _special_ids(self, tokens: int) -> dict[str, int]:
        out = {}
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
            key = f"tokenizer.ggml.{name}_token_id"
            if key in self.header.metadata:
                out[name] = self.meta.get(key, int)
                if not 0 <= out[name] < tokens:
                    raise BadModel(f"{self.path}: {key} is {out[name]}, the vocabulary has {tokens} tokens")
        return out

    def _rope(self, arch: str, head_dim: int) -> Rope:
        scaling = self.header.metadata.get(f"{arch}.rope.scaling.type", "none")
        if scaling != "none":
            raise BadModel(
                f"{self.path}: rope scaling {scaling!r} is not supported; known are none and Llama 3's {ROPE_FACTORS}"
            )
        theta = self.meta.get(f"{arch}.rope.freq_base", float, 10000.0)
        dims = self.meta.get(f"{arch}.rope.dimension_count", int, head_dim)
        info = self.header.tensors.get(ROPE_FACTORS)
        if info is None:
            return Rope(theta, dims)
        if info.kind != "F32" or info.shape != (dims // 2,):
            raise BadModel(f"{self.path}: {ROPE_FACTORS} is {info.kind} {list(info.shape)}, not F32 [{dims // 2}]")
        factors = self.header.blob(info).view("<f4").astype(np.float64)
        return Rope(theta, dims, "factors", tuple(factors.tolist()))

    def _named_tensors(self) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        for info in self.header.tensors.values():
            name = _TOP.get(info.name) or _layer_name(info.name)
            if name is not None:
                out[name] = Tensor(name, info.kind, info.shape, self.header.blob(info))
            elif info.name != ROPE_FACTORS:
                raise BadModel(f"{self.path}: tensor {info.name} has no place in a {self.spec.architecture} model")
        check_tensors(self.path, self.spec, out)
        if self.spec.architecture == "llama":  # only now: the sizes are known to be those of the file
            orders = {
                part: _order(n, self.spec.head_dim) for part, n in (("q", self.spec.heads), ("k", self.spec.kv_heads))
            }
            for name, tensor in out.items():
                order = orders.get(name.rpartition(".")[2])
                if order is not None:
                    out[name] = replace(tensor, row_order=order)
        return out


def _layer_name(name: str) -> str | None:
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[3] == "weight" and parts[2] in _LAYER:
        return f"layers.{parts[1]}.{_LAYER[parts[2]]}"
    return None


def _order(heads: int, head_dim: int) -> "npt.NDArray[np.intp]":
    """Row i of the tensor is row `order[i]` of the file, where pairs of one rotation lie side by side."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
