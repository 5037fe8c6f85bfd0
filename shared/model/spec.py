"""What a model is, whatever file it comes from; and `open_model`, the one way to get it.

A source gives a `ModelSpec` (frozen facts), its tensors by canonical name, its tokenizer and the digest of its
weights. Nothing here imports torch, and opening reads headers only: weights stay on disk until a tensor is asked for.

Canonical tensor names, with shapes as [out, in]:
    embed [vocab, hidden]                    norm [hidden]           lm_head [vocab, hidden] (absent when tied)
    layers.N.attn_norm, layers.N.ffn_norm [hidden]                   layers.N.q_norm, .k_norm [head_dim] (qk_norm only)
    layers.N.q [heads * head_dim, hidden]    layers.N.k, .v [kv_heads * head_dim, hidden]
    layers.N.o [hidden, heads * head_dim]    layers.N.gate, .up [intermediate, hidden]   .down [hidden, intermediate]
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shared.kv import KVLayout, default_block_tokens
from shared.model.errors import BadModel, ModelMissing
from shared.model.rope import Rope

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shared.model.tensors import Tensor

__all__ = ["FAMILIES", "BadModel", "ModelMissing", "ModelSource", "ModelSpec", "SamplingDefaults", "open_model"]

FAMILIES = ("llama", "qwen3")
"""Architectures that are served; everything else is refused by name."""


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request gets that asks for nothing: the model's own wish, or greedy when its files say nothing.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 and `min_p` 0 are off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class ModelSpec:
    """Facts of one model. Sizes are counts of elements or tokens; `stop_ids` ends a generation."""

    name: str
    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    max_context: int
    rope: Rope
    norm_eps: float
    tied: bool
    qk_norm: bool
    stop_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool
    """Whether text gets a BOS in front (unless it begins with one already)."""
    chat_template: str | None
    source_kind: str
    """gguf, hf or toy."""
    source: Path | None
    format: str
    """Weight format for people: the type that most weights have, e.g. Q4_1 or BF16."""
    template_tokens: Mapping[str, str] = field(default_factory=dict)
    """Variables that chat templates see: bos_token, eos_token, ..."""
    sampling: SamplingDefaults = SamplingDefaults()

    def kv_layout(self, dtype: str, block_tokens: int = 0) -> KVLayout:
        """Layout of this model's KV; `block_tokens` 0 means the default length (16 for the toy model)."""
        if self.architecture == "toy":
            dtype, block_tokens = "fp32", block_tokens or 16
        one = KVLayout(self.layers, self.kv_heads, self.head_dim, self.head_dim, dtype, 1)
        tokens = block_tokens or default_block_tokens(one.token_bytes)
        return KVLayout(self.layers, self.kv_heads, self.head_dim, self.head_dim, dtype, tokens)

    def fingerprint_fields(self) -> dict[str, str | int | bytes]:
        """Everything of the architecture that changes KV, for `identity.fingerprint`; weights go in by digest."""
        return {
            "architecture": self.architecture,
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "vocab": self.vocab,
            "norm_eps": self.norm_eps.hex(),
            "qk_norm": int(self.qk_norm),
            "rope": ",".join(float(x).hex() for x in (self.rope.theta, self.rope.dims, *self.rope.factors)),
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every tensor that this model must have."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out: dict[str, tuple[int, ...]] = {"embed": (self.vocab, self.hidden), "norm": (self.hidden,)}
        if not self.tied:
            out["lm_head"] = (self.vocab, self.hidden)
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (self.hidden,),
            "q": (q, self.hidden),
            "k": (kv, self.hidden),
            "v": (kv, self.hidden),
            "o": (self.hidden, q),
            "ffn_norm": (self.hidden,),
            "gate": (self.intermediate, self.hidden),
            "up": (self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }
        if self.qk_norm:
            layer |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        for n in range(self.layers):
            out |= {f"layers.{n}.{name}": shape for name, shape in layer.items()}
        return out


class ModelSource(ABC):
    """One opened model. Cheap to open, safe to use from any thread, closed by dropping it."""

    spec: ModelSpec

    @abstractmethod
    def tensors(self) -> Mapping[str, "Tensor"]:
        """Canonical name -> tensor, checked against `spec.shapes()`; reads nothing but headers."""

    @abstractmethod
    def tokenizer(self) -> "Tokenizer":
        """Builds the tokenizer (0.1-1 s); encode with `shared.model.prompt`, which knows about BOS."""

    @abstractmethod
    def digest(self) -> bytes:
        """32 bytes over names, shapes, types and content of the weights; cached by file identity, see `digest`."""


def open_model(source: str, models_dir: Path) -> ModelSource:
    """Opens a known name (`models_dir/<name>.gguf`), a directory, a .gguf file, or `toy:<seed>`.

    BadModel with one line for whatever can't be served; ModelMissing when nothing lies there.
    """
    if source.startswith("toy:"):
        from shared.model.toy_source import ToySource

        return ToySource(source)
    path = Path(source).expanduser()
    pulled = models_dir / f"{source}.gguf"
    if "/" not in source and not path.exists():
        if not pulled.exists():
            raise ModelMissing(
                f"model {source!r} is neither a path nor in {models_dir}; "
                f"known names are fetched by `perdure models pull {source}`"
            )
        path = pulled
    if not path.exists():
        raise ModelMissing(f"model {path}: there is no such file or directory")
    if path.is_dir():
        from shared.model.hf_source import HfSource

        return HfSource(path, models_dir)
    if path.suffix == ".gguf":
        from shared.model.gguf_source import GgufSource

        return GgufSource(path, models_dir)
    raise BadModel(f"model {path} is no .gguf file and no Hugging Face directory (config.json and *.safetensors)")
