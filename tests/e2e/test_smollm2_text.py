"""SmolLM2's own vocabulary: text comes out as its tokenizer would decode it, chats get in as its template says."""

import random

from services.detokenizer.text import TextStream
from services.detokenizer.vocabulary import token_bytes_of
from services.tokenizer.encode import Encoder
from services.tokenizer.validate import Limits
from shared.messages.base import unpack_u32
from shared.messages.front import ChatMessage, Generate
from shared.model.spec import open_model
from tests.models import smollm2_path

TEXTS = [
    "👩‍👩‍👧 ✅ 한국어 ďábel",
    " a",
    "  a    b",
    "\n x",
    "def f(x):\n\treturn x ** 2  # ok",
    "12345 67",
    "ﷺ\u200f\u0301",
]


def test_t01_t05_text_equals_the_tokenizers_own_decode() -> None:
    path = smollm2_path()
    tokenizer = open_model(str(path), path.parent).tokenizer()
    token_bytes = token_bytes_of(tokenizer)
    draw = random.Random(3)
    sequences = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    for text, ids in zip(TEXTS, sequences, strict=True):
        assert tokenizer.decode(ids) == text
    sequences += [[draw.randrange(tokenizer.get_vocab_size()) for _ in range(40)] for _ in range(200)]
    for ids in sequences:
        stream = TextStream(token_bytes)
        deltas = []
        for n, token in enumerate(ids):
            stream.push(token)
            deltas.append(stream.released(n, n + 1))
        assert "".join(deltas) + stream.tail() == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_chat_is_chatml_with_one_generation_prompt_and_no_second_bos() -> None:
    path = smollm2_path()
    source = open_model(str(path), path.parent)
    tokenizer = source.tokenizer()
    encoder = Encoder(source.spec, tokenizer, Limits(vocab=source.spec.vocab, max_context=source.spec.max_context))
    turns = (ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hi"))
    ids = unpack_u32(encoder.encode(Generate(id="ab" * 16, messages=turns))).tolist()
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.token_to_id("<|im_end|>") in source.spec.stop_ids
