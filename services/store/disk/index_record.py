"""How one block stands in the index: a row = identity, the rest, CRC32C over both.

LMDB has no checksums of its own; a flipped bit in a page gives a wrong row silently. The row without its CRC is the
format `ENTRY` of numpy, so that a million rows are read without an object each.
"""

import struct
from typing import Any, NamedTuple

import crc32c
import numpy as np

_VALUE = struct.Struct("<32s32sIIQQQ")
_CRC = struct.Struct("<I")
ROW_BYTES = 32 + _VALUE.size + _CRC.size

_RESIDUE = 0x48674BC7
"""CRC32C of anything with its own CRC32C behind it."""

_SOUND = bytes(ROW_BYTES - _CRC.size) + _CRC.pack(crc32c.crc32c(bytes(ROW_BYTES - _CRC.size)))
"""Any row with its CRC takes a CRC that is counted on to the same value. So very many rows, one behind the other, have
the CRC of as many of these: one call tells whether all are sound. A call a row takes longer than the rest of a start.
"""

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


def checked_rows(raw: bytes) -> "tuple[np.ndarray[Any, Any], list[bytes]]":
    """(entries of dtype ENTRY, identities of damaged rows) of whole rows, one after the other."""
    damaged = []
    if crc32c.crc32c(raw) != crc32c.crc32c(_SOUND * (len(raw) // ROW_BYTES)):
        rows = range(0, len(raw), ROW_BYTES)
        damaged = [at for at in rows if crc32c.crc32c(raw[at : at + ROW_BYTES]) != _RESIDUE]
    entries = np.frombuffer(raw, f"V{ROW_BYTES}").astype(f"V{ENTRY.itemsize}").view(ENTRY)
    if damaged:
        entries = np.delete(entries, [at // ROW_BYTES for at in damaged])
    return entries, [raw[at : at + 32] for at in damaged]
