"""Byte-level BPE tokenizers from a vocabulary and merges, as GGUF files carry them.

Each pre-tokenizer is the pipeline of the model's own `tokenizer.json`; a GGUF file only names it. A wrong one still
"works" and quietly makes other tokens, so an unknown name is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from shared.model.spec import BadModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types of GGUF."""


def _byte_chars() -> str:
    """The 256 printable stand-ins of GPT-2's byte alphabet, by byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_CHARS = _byte_chars()


def _gpt2(tokenizer: "Tokenizer") -> None:
    from tokenizers import pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm(tokenizer: "Tokenizer") -> None:
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )


def _split(digits: str) -> Callable[["Tokenizer"], None]:
    def install(tokenizer: "Tokenizer") -> None:
        from tokenizers import Regex, normalizers, pre_tokenizers

        if not digits:  # Qwen's tokenizer composes characters first; Llama's takes them as they come
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLIT % digits), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return install


PRE_TOKENIZERS: Mapping[str, Callable[["Tokenizer"], None]] = {
    "gpt-2": _gpt2,
    "llama-bpe": _split("{1,3}"),
    "qwen2": _split(""),
    "smollm": _smollm,
}


def build(where: object, pre: str, tokens: Sequence[str], types: Sequence[int], merges: Sequence[str]) -> "Tokenizer":
    """Tokenizer of `tokens` (by id) with `merges` ("left right", by rank) and pre-tokenizer `pre`.

    Control tokens become special, user-defined ones are matched in text and kept when special ones are skipped.
    BadModel when the name is unknown or a merge makes no token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    check_pre(where, pre)
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for id, token in enumerate(tokens) if vocab[token] != id)
        raise BadModel(f"{where}: token {twice!r} is in the vocabulary twice")
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise BadModel(f"{where}: merge {merge!r} joins or makes no token of the vocabulary")
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    PRE_TOKENIZERS[pre](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind == CONTROL:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    if tokenizer.get_vocab_size() != len(tokens):
        raise BadModel(f"{where}: the tokenizer has {tokenizer.get_vocab_size()} tokens, the file {len(tokens)}")
    return tokenizer


def check_pre(where: object, pre: str) -> None:
    """BadModel when `pre` is no pre-tokenizer that we know."""
    if pre not in PRE_TOKENIZERS:
        raise BadModel(f"{where}: unknown pre-tokenizer {pre!r}; known are {', '.join(sorted(PRE_TOKENIZERS))}")
