"""The two fixed pages of a segment file: its superblock, and the footer that ends each slot.

    0        4096                                   4096 + slot_bytes
    ├ super ─┼─ payload (padded to 4 KiB) ─┬ footer ─┼─ payload ─┬ footer ─┼ ...

A footer says whose bytes lie before it. It names its own slot, so that a footer copied elsewhere is none; a CRC32C
covers its fields; the checksum in it (XXH3-64) covers the payload.
"""

import struct
from typing import NamedTuple

import crc32c

PAGE = 4096
FORMAT = 1
"""Raised when the meaning of a byte in a segment file changes."""

SLOT_BITS = 16
MAX_SLOTS = 1 << SLOT_BITS
"""Slots of a segment; a slot's number is segment << SLOT_BITS | index, a u32."""

_SUPER = struct.Struct("<8sIIII")
_SUPER_MAGIC = b"PRDRSEG\0"
_FOOTER = struct.Struct("<8sII32s32s32sIQQ")
_FOOTER_MAGIC = b"PRDRSLOT"
_CRC = struct.Struct("<I")


class Superblock(NamedTuple):
    """First page of a segment: payload bytes a slot (a multiple of PAGE) and how many slots."""

    version: int
    number: int
    payload_bytes: int
    slots: int


class Footer(NamedTuple):
    """Last page of a slot. `length`: bytes of the payload that count; `checksum`: XXH3-64 of these."""

    slot: int
    identity: bytes
    parent: bytes
    root: bytes
    length: int
    generation: int
    checksum: int


def padded(length: int) -> int:
    """`length` rounded up to whole pages."""
    return -(-length // PAGE) * PAGE


def slot_bytes(length: int) -> int:
    """What a block of `length` bytes takes of a file, footer included."""
    return padded(length) + PAGE


def _page(magic_and_fields: bytes) -> bytes:
    return (magic_and_fields + _CRC.pack(crc32c.crc32c(magic_and_fields))).ljust(PAGE, b"\0")


def pack_superblock(block: Superblock) -> bytes:
    """One page."""
    return _page(_SUPER.pack(_SUPER_MAGIC, *block))


def unpack_superblock(page: bytes) -> Superblock | None:
    """None when it is none, whatever the bytes are."""
    fields, crc = page[: _SUPER.size], page[_SUPER.size : _SUPER.size + 4]
    if not page.startswith(_SUPER_MAGIC) or crc != _CRC.pack(crc32c.crc32c(fields)):
        return None
    return Superblock(*_SUPER.unpack(fields)[1:])


def pack_footer(footer: Footer) -> bytes:
    """One page."""
    _, identity, parent, root, *_ = footer
    if not len(identity) == len(parent) == len(root) == 32:
        raise ValueError(f"identities have 32 bytes, not {len(identity)}, {len(parent)}, {len(root)}")
    fields = (identity, parent, root, footer.length, footer.generation, footer.checksum)
    return _page(_FOOTER.pack(_FOOTER_MAGIC, FORMAT, footer.slot, *fields))


def unpack_footer(page: bytes, slot: int) -> Footer | None:
    """The footer of `slot`; None when it is none, damaged, of another slot or format."""
    fields, crc = page[: _FOOTER.size], page[_FOOTER.size : _FOOTER.size + 4]
    if not page.startswith(_FOOTER_MAGIC) or crc != _CRC.pack(crc32c.crc32c(fields)):
        return None
    _, version, *rest = _FOOTER.unpack(fields)
    footer = Footer(*rest)
    return footer if version == FORMAT and footer.slot == slot else None
