"""What the front door refuses, with which code and which numbers."""

import math

import msgspec
import pytest

from services.tokenizer.validate import Limits, Refusal, check, digest, resolve_max_tokens
from shared.messages.base import pack_u32
from shared.messages.front import ChatMessage, Generate, Sampling

ID = "0123456789abcdefABCDEF0123456789"
LIMITS = Limits(vocab=512, max_context=4096, body_bytes=1000)


def refusal(request: Generate) -> Refusal:
    with pytest.raises(Refusal) as caught:
        check(request, LIMITS)
    return caught.value


@pytest.mark.parametrize(
    "request_",
    [
        Generate(id=ID, prompt="hi"),
        Generate(id=ID, prompt=""),  # with a BOS that is a prompt; told after encoding
        Generate(id=ID, messages=(ChatMessage(role="user", content=""),)),
        Generate(id=ID, ids=pack_u32([0, 511])),
        Generate(
            id=ID, prompt="x" * 1000, deadline_s=0.001, detached=True, no_store=True, no_read=True, cache_salt="s"
        ),
        Generate(
            id=ID,
            prompt="hi",
            sampling=Sampling(
                max_tokens=1, temperature=0.0, top_k=0, top_p=1.0, min_p=1.0, seed=-1, stop=("x",) * 16, logprobs=20
            ),
        ),
        Generate(id=ID, prompt="hi", sampling=Sampling(top_p=1e-9, stop=("y" * 256,), logprobs=0, max_tokens=1 << 40)),
    ],
)
def test_good_requests_pass(request_: Generate) -> None:
    check(request_, LIMITS)


@pytest.mark.parametrize(
    "request_id", ["", "ab" * 15, "g" * 32, "0x" + "a" * 32, "a" * 129, "a" * 32 + "\n", "１" * 32]
)
def test_ids_have_128_random_bits_in_hex(request_id: str) -> None:
    assert refusal(Generate(id=request_id, prompt="hi")).code == "bad_request"


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (Generate(id=ID), "none"),
        (Generate(id=ID, prompt="a", ids=pack_u32([1])), "prompt, ids"),
        (Generate(id=ID, prompt="a", messages=()), "prompt, messages"),
        (Generate(id=ID, messages=()), "messages is empty"),
        (Generate(id=ID, messages=(ChatMessage(role="", content="x"),)), "role"),
        (Generate(id=ID, ids=b""), "ids is empty"),
        (Generate(id=ID, ids=b"abc"), "3 bytes"),
        (Generate(id=ID, ids=pack_u32([1, 512])), "512"),
        (Generate(id=ID, prompt="a", deadline_s=0.0), "deadline_s"),
        (Generate(id=ID, prompt="a", deadline_s=-1.0), "deadline_s"),
        (Generate(id=ID, prompt="a", deadline_s=math.nan), "deadline_s"),
        (Generate(id=ID, prompt="a", deadline_s=math.inf), "deadline_s"),
        (Generate(id=ID, prompt="a", choices=0), "choices"),
        (Generate(id=ID, prompt="a", cache_salt="x" * 257), "cache_salt"),
    ],
)
def test_x01_inputs_that_are_no_request(request_: Generate, word: str) -> None:
    refused = refusal(request_)
    assert refused.code == "bad_request"
    assert word in refused.reason


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.0001),
        ("top_p", -0.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stop", ("",)),
        ("stop", ("x" * 257,)),
        ("stop", ("x",) * 17),
    ],
)
def test_x02_sampling_out_of_range_is_named(field: str, value: object) -> None:
    refused = refusal(Generate(id=ID, prompt="hi", sampling=msgspec.structs.replace(Sampling(), **{field: value})))
    assert refused.code == "bad_request"
    assert field in refused.reason
    assert "must be" in refused.reason


def test_what_is_not_built_is_refused_by_name() -> None:
    for request, name in (
        (Generate(id=ID, prompt="a", choices=2), "choices"),
        (Generate(id=ID, prompt="a", priority=1), "priority"),
    ):
        refused = refusal(request)
        assert refused.code == "unsupported"
        assert name in refused.reason


def test_a_body_over_the_limit_is_refused_with_both_numbers_in_bytes_of_utf8() -> None:
    big = [
        Generate(id=ID, prompt="x" * 1001),
        Generate(id=ID, prompt="é" * 500 + "x"),
        Generate(id=ID, ids=bytes(1001)),
        Generate(id=ID, messages=(ChatMessage(role="user", content="y" * 997),)),
    ]
    for request in big:
        refused = refusal(request)
        assert refused.code == "body_too_large"
        assert refused.numbers == {"bytes": 1001, "limit": 1000}
        assert "1,001" in refused.reason
        assert "1,000" in refused.reason


@pytest.mark.parametrize("tokens", [8192, 8193, 2 * 8192, 10 * 8192])
def test_x03_a_prompt_over_the_context_is_refused_with_both_numbers(tokens: int) -> None:
    with pytest.raises(Refusal) as caught:
        resolve_max_tokens(tokens, None, Limits(vocab=512, max_context=8192))
    assert caught.value.code == "context_too_long"
    assert caught.value.numbers == {"prompt_tokens": tokens, "max_context": 8192}
    assert f"prompt is {tokens:,} tokens; the model's context is 8,192" in caught.value.reason
    assert f"shorten by {tokens - 8191:,}" in caught.value.reason


def test_max_tokens_is_what_is_asked_for_at_most_what_the_context_holds() -> None:
    limits = Limits(vocab=512, max_context=100)
    assert resolve_max_tokens(40, None, limits) == 60
    assert resolve_max_tokens(40, 7, limits) == 7
    assert resolve_max_tokens(40, 1000, limits) == 60
    assert resolve_max_tokens(99, None, limits) == 1


def test_x01_no_token_at_all_is_a_bad_request() -> None:
    with pytest.raises(Refusal) as caught:
        resolve_max_tokens(0, None, LIMITS)
    assert caught.value.code == "bad_request"


def test_the_digest_covers_every_field_but_the_id() -> None:
    base = Generate(id=ID, prompt="hi")
    assert digest(base) == digest(msgspec.structs.replace(base, id="f" * 32))
    others = [
        msgspec.structs.replace(base, **change)
        for change in (
            {"prompt": "ho"},
            {"sampling": Sampling(seed=1)},
            {"choices": 2},
            {"cache_salt": ""},
            {"no_store": True},
            {"no_read": True},
            {"detached": True},
            {"deadline_s": 1.0},
            {"priority": 1},
            {"prompt": None, "ids": b"hi"},
            {"prompt": None, "messages": (ChatMessage(role="user", content="hi"),)},
        )
    ]
    assert {field for field in base.__struct_fields__ if field != "id"} == {
        field for other in others for field in base.__struct_fields__ if getattr(other, field) != getattr(base, field)
    }
    assert len({digest(request) for request in [base, *others]}) == len(others) + 1


def test_the_digest_does_not_depend_on_the_process() -> None:
    assert digest(Generate(id=ID, prompt="hi", sampling=Sampling(temperature=0.5))).hex()[:16] == "8251f83f51c98c8c"
