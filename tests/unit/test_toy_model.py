"""The toy model: its oracle, that every byte of KV matters, and its byte tokenizer."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.model.chat import ChatTemplate
from shared.model.spec import BadModel, open_model
from shared.model.toy import EOS, START_STATE, TOKEN_BYTES, VOCAB, ToyModel, toy_decode, toy_encode, toy_generate

PROMPT = toy_encode("a prompt of some length, with more than one block")


def kv_of(model: ToyModel, ids: list[int]) -> bytearray:
    out, state = bytearray(), START_STATE
    for position, token in enumerate(ids):
        kv = model.kv(token, position, state)
        state = model.state(kv)
        out += kv
    return out


def test_the_oracle_is_the_models_own_steps() -> None:
    model, ids = ToyModel(7), list(PROMPT)
    for _ in range(20):
        ids.append(model.next_token(kv_of(model, ids)))
    assert ids[len(PROMPT) :] == toy_generate(7, PROMPT, 20)


def test_the_model_stays_what_it_is() -> None:
    """Stored KV of older runs would silently turn stale if this changed."""
    assert toy_generate(1, toy_encode("hello"), 8) == [294, 277, 78, 228, 420, 51, 192, 99]


def test_every_bit_of_any_positions_kv_decides_the_next_token() -> None:
    model = ToyModel(3)
    kv = kv_of(model, PROMPT)
    right = model.next_token(kv)
    differing = 0
    for at in range(len(kv)):
        kv[at] ^= 1 << at % 8
        differing += model.next_token(kv) != right
        kv[at] ^= 1 << at % 8
    assert differing >= len(kv) * 0.99  # one of 511 tokens is drawn again by chance


def test_a_wrong_byte_in_the_position_before_changes_all_later_kv() -> None:
    model = ToyModel(3)
    kv = bytearray(model.kv(5, 0, START_STATE))
    states = {model.state(kv)}
    for at in range(TOKEN_BYTES):
        kv[at] ^= 1
        states.add(model.state(kv))
        kv[at] ^= 1
    assert len(states) == TOKEN_BYTES + 1


@given(st.integers(0, VOCAB - 1), st.integers(0, 4095), st.integers(0, 2**64 - 1), st.integers(-(2**70), 2**70))
def test_kv_is_finite_and_depends_on_everything(token: int, position: int, state: int, seed: int) -> None:
    kv = ToyModel(seed).kv(token, position, state)
    assert len(kv) == TOKEN_BYTES
    assert np.isfinite(np.frombuffer(kv, np.float32)).all()
    others = [
        ToyModel(seed + 1).kv(token, position, state),
        ToyModel(seed).kv(token + 1, position, state),
        ToyModel(seed).kv(token, position + 1, state),
        ToyModel(seed).kv(token, position, state ^ 1),
    ]
    assert len({kv, *others}) == 5


@given(st.lists(st.integers(1, 200), max_size=20))
def test_pieces_are_as_good_as_the_whole(cuts: list[int]) -> None:
    model = ToyModel(0)
    kv, pieces, at = kv_of(model, PROMPT), [], 0
    for cut in cuts:
        pieces.append(memoryview(kv)[at : at + cut])
        at += len(pieces[-1])
    pieces.append(memoryview(kv)[at:])
    assert model.next_token(pieces) == model.next_token(kv)


def test_eos_is_never_generated_and_all_else_is() -> None:
    made = {token for seed in range(60) for token in toy_generate(seed, [seed], 64)}
    assert EOS not in made
    assert made == set(range(VOCAB)) - {EOS}


def test_no_kv_and_half_a_token_are_errors() -> None:
    for kv in (b"", b"x" * 63):
        with pytest.raises(ValueError, match="no positive multiple of 64"):
            ToyModel(0).next_token(kv)
    with pytest.raises(ValueError, match="has 64 bytes"):
        ToyModel.state(b"x")


def test_its_tokenizer_is_bytes(tmp_path: Path) -> None:
    source = open_model("toy:5", tmp_path)
    tokenizer = source.tokenizer()
    text = "héllo <300> 👩‍👩‍👧\n\x00"
    assert tokenizer.encode(text, add_special_tokens=False).ids == toy_encode(text)
    for ids in ([104, 300, 105], [255, 511, 257], toy_encode(text), [104, EOS]):
        assert tokenizer.decode(ids) == toy_decode(ids)
    assert tokenizer.get_vocab_size() == VOCAB == source.spec.vocab


def test_its_facts(tmp_path: Path) -> None:
    source = open_model("toy:5", tmp_path)
    layout = source.spec.kv_layout("bf16")
    assert (layout.dtype, layout.block_tokens, layout.token_bytes, layout.block_bytes) == (
        "fp32",
        16,
        TOKEN_BYTES,
        1024,
    )
    assert source.spec.kv_layout("fp32", 32).block_tokens == 32
    assert source.digest() != open_model("toy:6", tmp_path).digest()
    assert source.spec.chat_template is not None
    chat = ChatTemplate(source.spec.chat_template, {}).render([{"role": "user", "content": "hi"}])
    assert chat == "user: hi\nassistant:"
    with pytest.raises(BadModel, match="toy:<seed> with an integer seed"):
        open_model("toy:x", tmp_path)


def test_reading_models_never_imports_torch() -> None:
    code = (
        "import sys; import shared.model.toy; assert 'numpy' not in sys.modules;"
        "import shared.model.spec, shared.model.gguf_source, shared.model.hf_source, shared.model.chat;"
        "import shared.model.toy_source, shared.model.prompt, ops.models;"
        "assert not {'torch', 'transformers', 'gguf', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
