"""Token id -> the bytes that it stands for, as the model's own decoder would have it."""

import json
from typing import TYPE_CHECKING

from services.detokenizer.text import TokenBytes
from shared.model.bpe import BYTE_CHARS
from shared.model.errors import BadModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = {char: byte for byte, char in enumerate(BYTE_CHARS)}


def token_bytes_of(tokenizer: "Tokenizer") -> TokenBytes:
    """The byte table of a byte-level tokenizer, filled as ids are asked for; BadModel for another decoder.

    Special tokens and ids that don't exist stand for nothing. A token that is not written in the byte alphabet (an
    added one, say) stands for its own UTF-8, as in the `tokenizers` package.
    """
    decoder = json.loads(tokenizer.decoder.__getstate__())["type"] if tokenizer.decoder is not None else "none"
    if decoder != "ByteLevel":
        raise BadModel(f"the tokenizer's decoder is {decoder}; text can be made from ByteLevel ones only")
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    table: dict[int, bytes] = {}

    def token_bytes(token: int) -> bytes:
        known = table.get(token)
        if known is None:
            written = None if token in special else tokenizer.id_to_token(token)
            known = table[token] = _as_bytes(written or "")
        return known

    return token_bytes


def _as_bytes(written: str) -> bytes:
    try:
        return bytes(_BYTE[char] for char in written)
    except KeyError:
        return written.encode()
