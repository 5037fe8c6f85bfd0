"""Inputs that the fuzzer once found, under the name of what went wrong: refused as documented now, or taken."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ops.fuzz import child
from ops.fuzz.keys import _KEY
from ops.fuzz.target import joined
from services.store.arena.headers import Headers
from services.store.arena.records import PAGE, VALID, Geometry
from services.store.catalog.catalog import Catalog
from services.store.catalog.recovery import recover

TARGETS = {target.name: target for target in child.targets()}


def config(toml: bytes = b"", environ: bytes = b"") -> bytes:
    return joined([toml, environ])


def safetensors(shape: object) -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


def client_keys(**changes: str) -> bytes:
    return msgspec.json.encode({"keys": [{"user": "ann", "public": _KEY, "added": "x"} | changes], "version": 1})


FOUND: dict[str, tuple[str, Callable[[], bytes], bool]] = {
    "a size of 400 digits": ("config", lambda: config(b'[kv]\npool_bytes = "' + b"9" * 400 + b'"'), False),
    "a number of 5,000 digits": ("config", lambda: config(b"[kv]\npool_bytes = " + b"9" * 5000), False),
    "a hook's count is no number": ("config", lambda: config(b'[faults.hooks]\nworker_in_step = "exit:often"'), False),
    "a delay of no seconds": ("config", lambda: config(b'[faults.hooks]\nworker_in_step = "delay:2G"'), False),
    "a variable is no UTF-8": ("config", lambda: config(b"", b"PERDURE_MODEL__SOURCE=\xff\xfe"), False),
    "a shape is a number": ("safetensors", lambda: safetensors(5), False),
    "a counter below zero": ("small-files", lambda: b"-111111111111111111111\n", False),
    "a counter of another script": ("small-files", lambda: "\u00b2".encode(), False),
    "a key whose digits exceed 32 bits": ("key-files", lambda: client_keys(public="#" * 40), False),
    "a user name in the list that is none": ("key-files", lambda: client_keys(user="x" * 90), False),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_answered_as_documented(name: str, tmp_path: Path) -> None:
    target, make, taken = FOUND[name]
    assert TARGETS[target].check(make(), tmp_path) is taken


def test_a_damaged_recency_leaves_the_clock_room_to_go_on() -> None:
    """No CRC covers it: at the end of its range the next use of any block would exceed what a header holds."""
    geometry = Geometry(extents=1, extent_bytes=8 * PAGE, wanted=0)
    headers = Headers(bytearray(geometry.total), geometry)
    headers.format_extent(0, PAGE)
    root, name = b"r" * 32, b"n" * 32
    headers.write(
        0, VALID, identity=name, parent=root, root=root, generation=1, engine=5, epoch=0, length=9, recency=2**64 - 1
    )
    catalog = Catalog(headers, starts=2)
    recover(catalog)
    lease = catalog.lookup(("e0", 1), [name]).lease
    assert lease is not None
    assert catalog.leases.release(lease.number)
