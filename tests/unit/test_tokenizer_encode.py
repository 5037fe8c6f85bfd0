"""From input to prompt ids: one BOS, the template's refusals, the lower bound."""

import dataclasses

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from services.detokenizer.text import TextStream
from services.detokenizer.vocabulary import token_bytes_of
from services.tokenizer.encode import EXACT_BYTES, Encoder
from services.tokenizer.submission import submission
from services.tokenizer.validate import Limits, Refusal
from shared.messages.base import pack_u32, unpack_u32
from shared.messages.front import ChatMessage, Generate, Sampling
from shared.model.bpe import BYTE_CHARS
from shared.model.errors import ModelError
from shared.model.spec import ModelSpec, SamplingDefaults
from shared.model.toy_source import ToySource

ID = "ab" * 16
BOS, EOT = 256, 257
LIMITS = Limits(vocab=300, max_context=1000)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}<eot>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}({{ m.role }}){{ m.content }}<eot>{% endfor %}(model)"
)
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE(vocab={BYTE_CHARS[byte]: byte for byte in range(256)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eot>", special=True)])
    made.add_tokens([AddedToken("<think>", special=False)])
    return made


def spec(template: str | None, *, add_bos: bool = True) -> ModelSpec:
    return dataclasses.replace(
        ToySource("toy:1").spec,
        chat_template=template,
        template_tokens={"bos_token": "<bos>", "eos_token": "<eot>"},
        bos_id=BOS,
        add_bos=add_bos,
        stop_ids=(EOT,),
        sampling=SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95),
    )


def ids(encoder: Encoder, **parts: object) -> list[int]:
    return unpack_u32(encoder.encode(Generate(id=ID, **parts))).tolist()  # type: ignore[arg-type]


TURNS = (ChatMessage(role="user", content=" hé "), ChatMessage(role="assistant", content="ok"))


@pytest.mark.parametrize("template", [LLAMA3, GEMMA, CHATML])
@pytest.mark.parametrize("add_bos", [True, False])
def test_k01_chats_and_raw_texts_get_exactly_one_bos(template: str, add_bos: bool) -> None:
    encoder = Encoder(spec(template, add_bos=add_bos), tokenizer(), LIMITS)
    chat = ids(encoder, messages=TURNS)
    wanted = 1 if add_bos or "bos_token" in template else 0
    assert chat.count(BOS) == wanted
    assert chat[:1].count(BOS) == wanted
    raw = tokenizer().decode(chat, skip_special_tokens=False)
    assert ids(encoder, prompt=raw) == chat  # the rendered text sent as a completion
    assert ids(encoder, prompt=raw.removeprefix("<bos>")).count(BOS) == int(add_bos)


def test_k01_ids_are_taken_as_they_are() -> None:
    encoder = Encoder(spec(LLAMA3), tokenizer(), LIMITS)
    for given in ([1, 2], [BOS, 1], [BOS, BOS]):
        assert ids(encoder, ids=pack_u32(given)) == given


def test_x01_an_empty_prompt_is_the_bos_alone_where_there_is_one() -> None:
    assert ids(Encoder(spec(None), tokenizer(), LIMITS), prompt="") == [BOS]
    assert ids(Encoder(spec(None, add_bos=False), tokenizer(), LIMITS), prompt="") == []


def test_what_a_template_refuses_is_a_bad_request_in_its_own_words() -> None:
    encoder = Encoder(spec(GEMMA), tokenizer(), LIMITS)
    with pytest.raises(Refusal, match="System role not supported") as caught:
        ids(encoder, messages=(ChatMessage(role="system", content="x"),))
    assert caught.value.code == "bad_request"


def test_a_model_without_a_template_takes_no_chat() -> None:
    with pytest.raises(Refusal, match="no chat template") as caught:
        ids(Encoder(spec(None), tokenizer(), LIMITS), messages=TURNS)
    assert caught.value.code == "unsupported"


def test_a_lower_bound_is_given_only_where_it_is_one() -> None:
    long = "a" * (EXACT_BYTES + 1)
    with pytest.raises(Refusal, match="at least") as caught:
        ids(Encoder(spec(None), tokenizer(), LIMITS), prompt=long)
    assert caught.value.numbers["prompt_tokens"] <= len(long)
    swallowing = tokenizer()
    swallowing.add_special_tokens([AddedToken("<mask>", special=True, lstrip=True)])
    assert len(ids(Encoder(spec(None), swallowing, LIMITS), prompt=" " * EXACT_BYTES + "<mask>")) == 2
    lowering = tokenizer()
    lowering.normalizer = normalizers.Replace("aa", "")
    assert len(ids(Encoder(spec(None), lowering, LIMITS), prompt=long)) == 2


def test_the_models_sampling_defaults_and_stop_set_hold_unless_the_client_wishes_otherwise() -> None:
    plain = submission(Generate(id=ID, prompt=""), b"d", "me", b"", b"", 7, spec(None))
    assert (plain.sample.temperature, plain.sample.top_k, plain.sample.top_p) == (0.6, 20, 0.95)
    assert plain.stop_ids == (EOT,)
    greedy = Sampling(temperature=0.0, top_k=0, ignore_eos=True)
    wished = submission(Generate(id=ID, prompt="", sampling=greedy), b"d", "me", b"", b"", 7, spec(None))
    assert (wished.sample.temperature, wished.sample.top_k, wished.sample.top_p) == (0.0, 0, 0.95)
    assert wished.stop_ids == ()


def test_t01_the_byte_table_reads_ids_as_the_tokenizers_own_decoder_does() -> None:
    made = tokenizer()
    made.add_tokens([AddedToken("→é", special=False)])  # not all of it in the byte alphabet
    token_bytes = token_bytes_of(made)
    everything = [*range(made.get_vocab_size()), 5000]
    for first in range(0, len(everything), 7):
        some = [*everything[first:], *everything[:first], 0xC3, 0xA9 - 7]
        text = TextStream(token_bytes)
        for token in some:
            text.push(token)
        assert text.released(0, len(some)) + text.tail() == made.decode(some, skip_special_tokens=True)


def test_a_tokenizer_of_another_kind_is_refused_by_name() -> None:
    other = tokenizer()
    other.decoder = decoders.Metaspace()
    with pytest.raises(ModelError, match="Metaspace"):
        token_bytes_of(other)
