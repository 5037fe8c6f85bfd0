"""How one block stands in the index: key = identity, value = the rest + CRC32C over key and value.

LMDB has no checksums of its own; a flipped bit in a page gives a wrong row silently. The packed form without the
CRC, key first, is the row format `ENTRY` of numpy, so that a million rows are read without an object each.
"""

import struct
from typing import NamedTuple

import crc32c
import numpy as np

_VALUE = struct.Struct("<32s32sIIQQQ")
_CRC = struct.Struct("<I")
VALUE_BYTES = _VALUE.size + _CRC.size

ENTRY = np.dtype(
    [
        ("identity", "V32"),
        ("parent", "V32"),
        ("root", "V32"),
        ("slot", "<u4"),
        ("length", "<u4"),
        ("generation", "<u8"),
        ("checksum", "<u8"),
        ("recency", "<u8"),
    ]
)


class Entry(NamedTuple):
    """One block on disk, as the index knows it. `recency` is a number of the catalogue's own clock."""

    identity: bytes
    parent: bytes
    root: bytes
    slot: int
    length: int
    generation: int
    checksum: int
    recency: int


def pack_value(entry: Entry) -> bytes:
    """The value to store under `entry.identity`."""
    value = _VALUE.pack(*entry[1:])
    return value + _CRC.pack(crc32c.crc32c(entry.identity + value))


def sealed(key: bytes, value: bytes) -> bytes:
    """Any small value with its CRC behind it."""
    return value + _CRC.pack(crc32c.crc32c(key + value))


def unsealed(key: bytes, stored: bytes) -> bytes | None:
    """The value without its CRC; None when it is not what was stored under `key`."""
    value = stored[:-4]
    return value if stored[-4:] == _CRC.pack(crc32c.crc32c(key + value)) and len(stored) >= 4 else None


def unpack_value(key: bytes, stored: bytes) -> Entry | None:
    """None when it is not what was stored under `key`."""
    value = unsealed(key, stored)
    return Entry(key, *_VALUE.unpack(value)) if value is not None and len(value) == _VALUE.size else None


def row(key: bytes, stored: bytes) -> bytes | None:
    """One item of dtype ENTRY, as bytes; None when damaged."""
    value = unsealed(key, stored)
    return key + value if value is not None and len(key) == 32 and len(value) == _VALUE.size else None
