"""One file of the journal: a header (format, number, where the file before it ends), then frames of records."""

import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

import crc32c

FORMAT = 1
"""Raised when records or frames change meaning; a journal of another format is refused by name."""

HEADER_BYTES = 28
_HEADER = struct.Struct("<8sIIQ")
_MAGIC = b"PRDRJRNL"
_NAME = re.compile(r"(\d{8})\.log")


def segment_path(directory: Path, number: int) -> Path:
    """`NNNNNNNN.log`."""
    return directory / f"{number:08d}.log"


def segment_numbers(directory: Path) -> list[int]:
    """Numbers of the segments that lie here, oldest first."""
    matches = (_NAME.fullmatch(name) for name in os.listdir(directory))
    return sorted(int(match.group(1)) for match in matches if match)


class Header(NamedTuple):
    """`previous_end`: bytes of the file before this one, so that a cut at a frame's border is seen."""

    version: int
    number: int
    previous_end: int


def pack_header(number: int, previous_end: int, version: int = FORMAT) -> bytes:
    """The first bytes of a segment."""
    fields = _HEADER.pack(_MAGIC, version, number, previous_end)
    return fields + crc32c.crc32c(fields).to_bytes(4, "little")


def unpack_header(data: bytes) -> Header | None:
    """None when it is damaged or not whole."""
    fields, crc = data[: _HEADER.size], data[_HEADER.size : HEADER_BYTES]
    if not data.startswith(_MAGIC) or crc != crc32c.crc32c(fields).to_bytes(4, "little"):
        return None
    return Header(*_HEADER.unpack(fields)[1:])
