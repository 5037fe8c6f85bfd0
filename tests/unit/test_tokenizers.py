"""Byte-level BPE from GGUF vocabularies against an oracle that shares nothing with it but the published patterns."""

import functools
import itertools
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.model import bpe
from shared.model.prompt import encode
from shared.model.spec import BadModel, open_model
from tests.models import smollm2_path
from tests.tiny_models import Tiny, Vocabulary, hf_tokenizer, train_vocabulary, write_directory, write_gguf

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PATTERNS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
}
"""What each name stands for: the text is split by each pattern in turn."""

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading,   inner  and trailing   ",
    "\n\n \n\t x\r\n\r\ny",
    "It's they'll WE'VE don'T 'quoted' ''",
    "0 12 345 6789 1234567 3.14159 1,000,000 ٣٤٥ ½ x2y3",
    "def f(x):\n\treturn {'a': [x, 1]}  # comment\n\n\n",
    "naïve café, Grüße, ďábel, a\u0301 e\u0301 \u1e9b\u0323",
    "한국어 日本語 中文，全角　スペース",
    "👩‍👩‍👧 ✅ 🇩🇪 \U0001f9d1\u200d\U0001f680",
    "\x00\x01\x7f\u200b\ufeff\u00a0|\u2028|",
    "!!!???...---===```",
    "a" * 300,
    "<tool>",
    "x<tool> y",
]


def split(text: str, pattern: str) -> list[str]:
    """Pieces that match and pieces between them, in order."""
    out, at = [], 0
    for match in regex.finditer(pattern, text):
        out += [text[at : match.start()], match.group()]
        at = match.end()
    return [piece for piece in [*out, text[at:]] if piece]


def merged(word: str, vocabulary: Vocabulary, ranks: dict[tuple[str, str], int], whole_words: bool) -> list[str]:
    """Textbook BPE: join the pair of the lowest rank until none is left."""
    parts = [bpe.BYTE_CHARS[byte] for byte in word.encode()]
    if whole_words and "".join(parts) in vocabulary.tokens:
        return ["".join(parts)]
    while True:
        pairs = [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(parts)) if pair in ranks]
        if not pairs:
            return parts
        _, at = min(pairs)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]


def oracle(text: str, pre: str, vocabulary: Vocabulary) -> list[int]:
    ids = {token: id for id, token in enumerate(vocabulary.tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(vocabulary.merges)}
    matched = [t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in (3, 4)]
    out = []
    for piece in regex.split("(" + "|".join(map(regex.escape, matched)) + ")", text):
        if piece in matched:
            out.append(ids[piece])
            continue
        words = [unicodedata.normalize("NFC", piece) if pre == "qwen2" else piece]
        for pattern in PATTERNS[pre]:
            words = [part for word in words for part in split(word, pattern)]
        out += [ids[t] for word in words for t in merged(word, vocabulary, ranks, pre == "llama-bpe")]  # type: ignore[arg-type]
    return out


@functools.cache
def vocabulary() -> Vocabulary:
    return train_vocabulary()


@functools.cache
def built(pre: str) -> Tokenizer:
    v = vocabulary()
    return bpe.build("test", pre, v.tokens, v.types, v.merges)


@pytest.mark.parametrize("pre", sorted(PATTERNS))
@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_the_oracles(pre: str, text: str) -> None:
    assert built(pre).encode(text, add_special_tokens=False).ids == oracle(text, pre, vocabulary())


@pytest.mark.parametrize("pre", sorted(PATTERNS))
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=60))
def test_ids_of_any_text_equal_the_oracles(pre: str, text: str) -> None:
    assert built(pre).encode(text, add_special_tokens=False).ids == oracle(text, pre, vocabulary())


@pytest.mark.parametrize("pre", sorted(PATTERNS))
@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(pre: str, text: str) -> None:
    if pre == "qwen2":
        text = unicodedata.normalize("NFC", text)
    tokenizer = built(pre)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_known_names_are_those_that_the_oracle_knows() -> None:
    assert set(bpe.PRE_TOKENIZERS) == set(PATTERNS)


def test_llama_bpe_takes_whole_words_that_no_merge_makes() -> None:
    v = Vocabulary([*map(str, bpe.BYTE_CHARS), "abc"], [], [1] * 257)
    assert bpe.build("test", "llama-bpe", v.tokens, v.types, v.merges).encode("abc").ids == [256]
    assert len(bpe.build("test", "qwen2", v.tokens, v.types, v.merges).encode("abc").ids) == 3


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    tokenizer, v = built("gpt-2"), vocabulary()
    ids = tokenizer.encode("a<|eos|><tool>b", add_special_tokens=False).ids
    assert ids == [v.id("a"), v.id("<|eos|>"), v.id("<tool>"), v.id("b")]
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|eos|><tool>b"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pre": "falcon"}, "unknown pre-tokenizer 'falcon'; known are gpt-2, llama-bpe, qwen2, smollm"),
        ({"tokens": ["a", "b", "a"], "types": [1, 1, 1]}, "token 'a' is in the vocabulary twice"),
        ({"merges": ["a b"]}, "merge 'a b' joins or makes no token"),
        ({"merges": ["ab"]}, "merge 'ab' joins or makes no token"),
        ({"merges": [""]}, "merge '' joins or makes no token"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(change: dict[str, Any], reason: str) -> None:
    given_: dict[str, Any] = {"pre": "gpt-2", "tokens": ["a", "b"], "types": [1, 1], "merges": []} | change
    with pytest.raises(BadModel, match=reason):
        bpe.build("file", **given_)


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_and_tokenizer_json_of_one_model_give_equal_ids(text: str, tmp_path: Path) -> None:
    tiny, v = Tiny(), vocabulary()
    file = write_gguf(tmp_path / "m.gguf", tiny, tiny.tensors(), vocabulary=v, pre="gpt-2")
    directory = write_directory(tmp_path / "d", tiny, tiny.tensors(), vocabulary=v)
    a, b = open_model(str(file), tmp_path), open_model(str(directory), tmp_path)
    assert encode(a.tokenizer(), a.spec, text) == encode(b.tokenizer(), b.spec, text)


def test_tokenizer_files_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    tiny = Tiny()
    directory = write_directory(tmp_path, tiny, tiny.tensors(), vocabulary=vocabulary())
    tokenizer = hf_tokenizer(vocabulary())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(directory / "tokenizer.json"))
    source = open_model(str(directory), tmp_path)
    assert len(encode(source.tokenizer(), source.spec, "one two three four five six")) > 8
    assert encode(source.tokenizer(), source.spec, "a") == [vocabulary().id("a")]


SMOLLM_TEXTS = [text for text in TEXTS if "<tool>" not in text] + ["<|im_start|>user\nHi 123<|im_end|>\n"]


@functools.cache
def smollm() -> tuple[Tokenizer, Vocabulary]:
    source = open_model(str(smollm2_path()), smollm2_path().parent)
    metadata = source.header.metadata  # type: ignore[attr-defined]
    types = metadata["tokenizer.ggml.token_type"].tolist()
    tokens, merges = (metadata[f"tokenizer.ggml.{name}"].read() for name in ("tokens", "merges"))
    return source.tokenizer(), Vocabulary(tokens, merges, types)


@pytest.mark.parametrize("text", SMOLLM_TEXTS)
def test_smollm2_ids_equal_the_oracles(text: str) -> None:
    tokenizer, v = smollm()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == oracle(text, "smollm", v)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(("name", "pre"), [("GPT2Tokenizer", "gpt-2"), ("Qwen2Tokenizer", "qwen2")])
@pytest.mark.parametrize("text", [text for text in TEXTS if "<tool>" not in text])
def test_ids_equal_those_of_transformers_own_classes(name: str, pre: str, text: str) -> None:
    assert (
        built(pre).encode(text, add_special_tokens=False).ids
        == reference_class(name)(text, add_special_tokens=False)["input_ids"]
    )


@functools.cache
def reference_class(name: str) -> Any:
    import transformers

    v = vocabulary()
    vocab = {token: id for id, token in enumerate(v.tokens)}
    merges = [tuple(merge.split(" ")) for merge in v.merges]
    special = {"unk_token": "<|eos|>", "eos_token": "<|eos|>", "bos_token": "<|bos|>", "pad_token": "<|eot|>"}
    return getattr(transformers, name)(vocab=vocab, merges=merges, **special)
