"""The toy model as a source: facts and a byte tokenizer, no tensors."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

from shared.model import toy
from shared.model.rope import Rope
from shared.model.spec import BadModel, ModelSource, ModelSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shared.model.tensors import Tensor

CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class ToySource(ModelSource):
    """`toy:<seed>`; see `shared/model/toy.py`."""

    def __init__(self, source: str) -> None:
        try:
            self.seed = int(source.removeprefix("toy:"))
        except ValueError:
            raise BadModel(f"model {source!r}: write toy:<seed> with an integer seed") from None
        self.spec = ModelSpec(
            name=f"toy:{self.seed}",
            architecture="toy",
            layers=toy.LAYERS,
            heads=toy.KV_HEADS,
            kv_heads=toy.KV_HEADS,
            head_dim=toy.HEAD_DIM,
            hidden=toy.HEAD_DIM,
            intermediate=0,
            vocab=toy.VOCAB,
            max_context=toy.MAX_CONTEXT,
            rope=Rope(10000.0, toy.HEAD_DIM),
            norm_eps=0.0,
            tied=True,
            qk_norm=False,
            stop_ids=(toy.EOS,),
            bos_id=None,
            add_bos=False,
            chat_template=CHAT,
            source_kind="toy",
            source=None,
            format="toy",
        )

    def tensors(self) -> Mapping[str, "Tensor"]:
        """None: the toy model has no weights."""
        return {}

    def tokenizer(self) -> "Tokenizer":
        """Ids 0..255 are bytes, 256 is `<eos>`, others show as `<300>` and are never made from text."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        from shared.model.bpe import BYTE_CHARS

        vocab = {BYTE_CHARS[byte]: byte for byte in range(256)}
        vocab |= {f"<{i}>": i for i in range(toy.EOS + 1, toy.VOCAB)} | {"<eos>": toy.EOS}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
        return tokenizer

    def digest(self) -> bytes:
        """The seed is all there is."""
        return blake2b(str(self.seed).encode(), digest_size=32, person=b"toy-weights").digest()
