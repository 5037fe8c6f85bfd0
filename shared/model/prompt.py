"""Text -> token ids, with exactly one BOS (or none, for models that have none)."""

from typing import TYPE_CHECKING

from shared.model.spec import ModelSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def encode(tokenizer: "Tokenizer", spec: ModelSpec, text: str) -> list[int]:
    """Ids of a prompt or of a rendered chat.

    Special tokens written in the text are taken as such. A model that wants a BOS gets one in front, unless the text
    begins with it already (templates of the Llama 3 kind write it themselves): a second one costs quality and cache.
    """
    # The batch call releases the GIL and keeps no offsets: a book costs a fifth, and other threads go on meanwhile.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    if spec.add_bos and spec.bos_id is not None and ids[:1] != [spec.bos_id]:
        ids.insert(0, spec.bos_id)
    return ids
