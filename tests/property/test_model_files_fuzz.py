"""Readers of untrusted model files: whatever the bytes, the answer is a model or BadModel, never another error."""

import functools
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from shared.model.chat import ChatTemplate, TemplateError
from shared.model.gguf_header import read_header
from shared.model.safetensors_header import read_safetensors
from shared.model.spec import BadModel, open_model
from shared.model.template_sandbox import Budget
from tests.tiny_models import Tiny, Vocabulary, train_vocabulary, write_directory, write_gguf

TINY = Tiny(layers=1, heads=2, kv_heads=1, hidden=32, intermediate=32)


@functools.cache
def small_vocabulary() -> Vocabulary:
    return train_vocabulary(260)


@functools.cache
def good_gguf() -> tuple[bytes, int]:
    """A small valid file and where its weights begin."""
    with tempfile.TemporaryDirectory() as folder:
        file = write_gguf(Path(folder) / "m.gguf", TINY, TINY.tensors(), kind="Q8_0", vocabulary=small_vocabulary())
        return file.read_bytes(), read_header(file).data_start


def is_one_line(error: Exception) -> bool:
    """What every refusal is; fails the test otherwise."""
    assert str(error)
    assert isinstance(error, TemplateError) or "\n" not in str(error)
    return True


def opened(content: bytes) -> bool:
    """Whether the bytes are a model that can be used to the end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(content)
        try:
            source = open_model(str(path), Path(folder))
            source.tokenizer()
            source.digest()
        except BadModel as error:
            return not is_one_line(error)
        for tensor in source.tensors().values():
            tensor.fp32()
        return True


def test_the_file_that_is_damaged_below_is_good() -> None:
    assert opened(good_gguf()[0])


@given(st.data())
def test_a_damaged_gguf_is_a_model_or_refused(data: st.DataObject) -> None:
    content, weights = good_gguf()
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, weights - 1))
        how = data.draw(st.sampled_from(["bit", "u64", "cut", "drop"]))
        if how == "bit":
            damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "u64":
            huge = data.draw(st.sampled_from([0, 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1]))
            damaged[at : at + 8] = struct.pack("<Q", huge)
        elif how == "drop":
            del damaged[at : at + data.draw(st.integers(1, 16))]
        else:
            del damaged[max(1, at) :]
            break
    opened(bytes(damaged))


@given(st.binary(max_size=200))
@example(b"")
@example(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
@example(b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 0))
@example(b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1))
@example(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(20))
@example(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
@example(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 9, 5))
def test_any_bytes_behind_the_magic_are_refused(content: bytes) -> None:
    assert not opened(content)
    assert not opened(b"GGUF" + struct.pack("<I", 3) + content)


def test_every_cut_of_the_header_is_refused() -> None:
    content, weights = good_gguf()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        for size in range(1, weights, 37):
            path.write_bytes(content[:size])
            try:
                read_header(path)
            except BadModel:
                continue
            # every byte of the tables is there; only the padding before the weights is not
            assert size > weights - 32


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "I8"]) | JSON,
        "shape": st.lists(st.integers(-2, 2**70), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-2, 2**70), max_size=3) | JSON,
    },
)


@given(st.dictionaries(st.text(max_size=4), ENTRY | JSON, max_size=3) | JSON, st.binary(max_size=32))
def test_any_safetensors_header_is_read_or_refused(entries: Any, data: bytes) -> None:
    raw = json.dumps(entries).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        for content in (struct.pack("<Q", len(raw)) + raw + data, raw + data + b"x"):
            path.write_bytes(content)
            try:
                tensors = read_safetensors(path)
            except BadModel:
                continue
            assert sum(blob.nbytes for _, _, blob in tensors.values()) == len(data)


CONFIG_KEYS = [*TINY.config(), "rope_scaling", "rope_theta", "quantization_config", "sliding_window", "layer_types"]


@given(st.dictionaries(st.sampled_from(CONFIG_KEYS), JSON, max_size=3), st.dictionaries(st.text(max_size=12), JSON))
def test_any_configuration_is_a_model_or_refused(config: dict[str, Any], generation: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        tensors = TINY.tensors()
        generation |= {"do_sample": True}
        write_directory(
            path,
            TINY,
            tensors,
            vocabulary=small_vocabulary(),
            config=config,
            generation=generation,
            tokenizer_config={"eos_token": generation.get("eos"), "chat_template": config.get("rope_scaling")},
        )
        try:
            source = open_model(folder, path)
        except BadModel as error:
            is_one_line(error)
            return
        assert source.tensors().keys() == source.spec.shapes().keys()


PIECES = st.sampled_from(
    "{{ | }} | {% | %} | -%} | {%- | for x in messages | endfor | if | endif | set x = | x | ~ | * | ** | + | messages"
    " | [0] | .content | @join | @tojson | @length | range(99999) | 'ab' | 999999 | ( | ) | % | @map('upper') | @list"
    " | .format( | namespace(x=1) | macro f(x) | endmacro | f(x) | @indent(99) | @replace('', 'ab') | @sort".replace(
        " | ", "\0"
    )
    .replace("@", "|")
    .split("\0")
).map(lambda piece: f" {piece} ")


@given(st.lists(PIECES, max_size=24).map("".join) | st.text(max_size=40))
def test_any_template_renders_or_is_refused(source: str) -> None:
    messages = [{"role": "user", "content": "x" * 10}]
    try:
        ChatTemplate(source, {"bos_token": "<s>"}).render(messages, budget=Budget(steps=20_000))
    except TemplateError as error:
        is_one_line(error)
