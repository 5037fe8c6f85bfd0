"""The arena file's format, byte by byte, and the checks of its records. Pure: works on any buffer.

    0                 superblock: magic, version, sizes, the file's random key, CRC32C; then, outside the CRC, two
                      aligned words: how often a store started on this file, and the clear epoch
                      at HOME_AT the home that it belongs to, so that an arena whose home is gone can be told
    4096              extent table: per extent the slot size that it serves (0: none yet), slot count, CRC32C
    data_start        extents, one after the other, each: header table (RECORD per slot), then the slots, 4 KiB aligned

A header's CRC32C covers the slot's number and all that names the block. Outside it lie recency and flags, each one
aligned store, so that a kill in the middle of an update of them loses no block.
"""

import os
import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

import crc32c
import numpy as np
from numpy.typing import NDArray

MAGIC = b"PERDUREA"
VERSION = 1
PAGE = 4096

FREE, GRANTED, VALID = 0, 1, 2
"""State of a slot as its header tells it."""

FLAG_CLEAN, FLAG_DOOMED = 1, 2
"""On disk too; granted, but its scope has been cleared since: never to be published."""

RECORD = np.dtype(
    [
        ("identity", "u1", (32,)),
        ("parent", "u1", (32,)),
        ("root", "u1", (32,)),
        ("generation", "<u8"),
        ("engine", "<u8"),
        ("checksum", "<u8"),
        ("epoch", "<u8"),
        ("length", "<u4"),
        ("state", "<u4"),
        ("crc", "<u4"),
        ("unused", "<u4"),
        ("recency", "<u8"),
        ("flags", "<u8"),
    ]
)
NAMED = struct.Struct("<32s32s32sQQQQII")
"""The part of a record that its CRC covers."""

STATE_AT, CRC_AT, RECENCY_AT, FLAGS_AT = 132, 136, 144, 152
EXTENT = struct.Struct("<QII")
"""Stride, slot count, CRC32C."""

EXTENT_BYTES = 32
_SUPERBLOCK = struct.Struct("<8sIIQQQ16s")
STARTS_AT, EPOCH_AT, BOOT_AT = 128, 136, 144
HOME_AT = 1024
_HOME = struct.Struct("<II")


def aligned(nbytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True)
class Geometry:
    """Where things lie in an arena of `extents` extents of `extent_bytes`; `wanted` is what the owner asked for."""

    extents: int
    extent_bytes: int
    wanted: int

    @property
    def data_start(self) -> int:
        """Byte offset of the first extent."""
        return PAGE + aligned(self.extents * EXTENT_BYTES)

    @property
    def total(self) -> int:
        """Bytes of the file."""
        return self.data_start + self.extents * self.extent_bytes

    @property
    def slot_span(self) -> int:
        """Slot numbers of one extent: slot = extent * slot_span + index."""
        return self.extent_bytes // PAGE

    def extent_start(self, extent: int) -> int:
        """Byte offset of an extent, which is that of its header table."""
        return self.data_start + extent * self.extent_bytes

    def slots(self, stride: int) -> int:
        """How many slots of `stride` bytes (a multiple of 4 KiB) an extent holds beside their headers."""
        count = self.extent_bytes // (stride + RECORD.itemsize)
        while count and aligned(count * RECORD.itemsize) + count * stride > self.extent_bytes:
            count -= 1
        return count


def pack_superblock(geometry: Geometry, key: bytes) -> bytes:
    """The first bytes of the file."""
    body = _SUPERBLOCK.pack(
        MAGIC, VERSION, geometry.extents, geometry.total, geometry.extent_bytes, geometry.wanted, key
    )
    return body + crc32c.crc32c(body).to_bytes(4, "little")


def unpack_superblock(page: bytes) -> tuple[Geometry, bytes]:
    """(geometry, key) of the file's first bytes; ValueError with the reason when it is no arena of this format."""
    size = _SUPERBLOCK.size
    if len(page) < size + 4 or page[:8] != MAGIC:
        raise ValueError("it is no arena of ours")
    version = int.from_bytes(page[8:12], "little")
    if version != VERSION:
        raise ValueError(f"its layout is version {version}, this is version {VERSION}")
    if crc32c.crc32c(page[:size]) != int.from_bytes(page[size : size + 4], "little"):
        raise ValueError("its superblock is damaged")
    _, _, extents, total, extent_bytes, wanted, key = _SUPERBLOCK.unpack(page[:size])
    geometry = Geometry(extents, extent_bytes, wanted)
    if extent_bytes % PAGE or not extents or not extent_bytes or geometry.total != total:
        raise ValueError(f"its sizes contradict each other ({extents} x {extent_bytes} in {total} bytes)")
    return geometry, key


def pack_home(home: bytes) -> bytes:
    """What stands at HOME_AT: length, CRC32C, the path. Nothing for a path that has no room there."""
    return _HOME.pack(len(home), crc32c.crc32c(home)) + home if len(home) <= PAGE - HOME_AT - _HOME.size else b""


def unpack_home(page: bytes) -> str:
    """The home that the first page of an arena names; "" when it names none."""
    length, crc = _HOME.unpack_from(page.ljust(PAGE, b"\0"), HOME_AT)
    home = page[HOME_AT + _HOME.size : HOME_AT + _HOME.size + length]
    return os.fsdecode(home) if length and len(home) == length and crc32c.crc32c(home) == crc else ""


def pack_extent(extent: int, stride: int, count: int) -> bytes:
    """The table's record of an extent that serves slots of `stride` bytes."""
    crc = crc32c.crc32c(struct.pack("<IQI", extent, stride, count))
    return EXTENT.pack(stride, count, crc)


def unpack_extent(extent: int, record: bytes, geometry: Geometry) -> int:
    """Stride that an extent serves; 0 when it serves none, or its record is damaged."""
    stride, count, crc = EXTENT.unpack(record)
    if not stride or crc != crc32c.crc32c(struct.pack("<IQI", extent, stride, count)):
        return 0
    return stride if stride % PAGE == 0 and count == geometry.slots(stride) else 0


def header_crc(slot: int, named: bytes) -> int:
    """CRC32C over the slot's number and the named part of its record."""
    return int(crc32c.crc32c(named, crc32c.crc32c(slot.to_bytes(4, "little"))))


@cache
def _number_crcs() -> NDArray[np.uint32]:
    """CRC32C of four bytes is affine over GF(2): that of zeros xor the entries of each byte at its place, [4, 256]."""
    tables = np.zeros((4, 256), np.uint32)
    for place in range(4):
        for byte in range(256):
            tables[place, byte] = crc32c.crc32c((byte << 8 * place).to_bytes(4, "little"))
    tables[1:] ^= tables[0, 0]
    return tables


def header_crcs(slots: NDArray[Any], records: NDArray[Any]) -> NDArray[np.uint32]:
    """`header_crc` of many: `slots` u32 [n], `records` RECORD [n], contiguous. A call each, but no bytecode."""
    numbers = np.ascontiguousarray(slots, "<u4").view(np.uint8).reshape(-1, 4)
    begun = np.bitwise_xor.reduce([table[numbers[:, place]] for place, table in enumerate(_number_crcs())])
    body = records.view(np.uint8).reshape(-1, RECORD.itemsize)
    named = np.ascontiguousarray(body[:, : NAMED.size]).view(f"V{NAMED.size}")[:, 0].tolist()
    return np.fromiter(map(crc32c.crc32c, named, begun.tolist()), np.uint32, len(slots))
