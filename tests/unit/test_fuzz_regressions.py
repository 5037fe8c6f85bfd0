"""Inputs that the fuzzer once found, under the name of what went wrong: refused as documented now, or taken."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ops.fuzz import child
from ops.fuzz.keys import _KEY
from ops.fuzz.target import joined, parted
from services.store.arena.records import RECORD

TARGETS = {target.name: target for target in child.targets()}


def config(toml: bytes = b"", environ: bytes = b"") -> bytes:
    return joined([toml, environ])


def recency_at_the_end_of_its_clock() -> bytes:
    parts = parted(child.input_of(TARGETS["arena"], 1, 0), 4)
    table = bytearray(parts[2])
    at = (RECORD.fields or {})["recency"][1]
    table[at : at + 8] = b"\xff" * 8
    parts[2] = bytes(table)
    return joined(parts)


def safetensors(shape: object) -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


def client_keys(**changes: str) -> bytes:
    return msgspec.json.encode({"keys": [{"user": "ann", "public": _KEY, "added": "x"} | changes], "version": 1})


FOUND: dict[str, tuple[str, Callable[[], bytes], bool]] = {
    "a size of 400 digits": ("config", lambda: config(b'[kv]\npool_bytes = "' + b"9" * 400 + b'"'), False),
    "a hook's count is no number": ("config", lambda: config(b'[faults.hooks]\nworker_in_step = "exit:often"'), False),
    "a delay of no seconds": ("config", lambda: config(b'[faults.hooks]\nworker_in_step = "delay:2G"'), False),
    "a variable is no UTF-8": ("config", lambda: config(b"", b"PERDURE_MODEL__SOURCE=\xff\xfe"), False),
    "a shape is a number": ("safetensors", lambda: safetensors(5), False),
    "a counter below zero": ("small-files", lambda: b"-111111111111111111111\n", False),
    "a counter of another script": ("small-files", lambda: "\u00b2".encode(), False),
    "a recency at the end of its clock": ("arena", recency_at_the_end_of_its_clock, True),
    "a key whose digits exceed 32 bits": ("key-files", lambda: client_keys(public="#" * 40), False),
    "a user name in the list that is none": ("key-files", lambda: client_keys(user="x" * 90), False),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_answered_as_documented(name: str, tmp_path: Path) -> None:
    target, make, taken = FOUND[name]
    assert TARGETS[target].check(make(), tmp_path) is taken
