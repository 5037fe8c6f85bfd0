"""One file of the journal: a header page's worth of nothing but its format and number, then frames of records."""

import os
import re
import struct
from pathlib import Path

import crc32c

from shared.fileio import FileIO

FORMAT = 1
"""Raised when records or frames change meaning; a journal of another format is refused by name."""

HEADER_BYTES = 20
_HEADER = struct.Struct("<8sII")
_MAGIC = b"PRDRJRNL"
_NAME = re.compile(r"(\d{8})\.log")


def segment_path(directory: Path, number: int) -> Path:
    """`NNNNNNNN.log`."""
    return directory / f"{number:08d}.log"


def segment_numbers(directory: Path) -> list[int]:
    """Numbers of the segments that lie here, oldest first."""
    matches = (_NAME.fullmatch(name) for name in os.listdir(directory))
    return sorted(int(match.group(1)) for match in matches if match)


def header(number: int, version: int = FORMAT) -> bytes:
    """The first bytes of a segment."""
    fields = _HEADER.pack(_MAGIC, version, number)
    return fields + crc32c.crc32c(fields).to_bytes(4, "little")


def header_version(data: bytes) -> int | None:
    """The format that a segment says it has; None when its header is damaged or not whole."""
    fields, crc = data[: _HEADER.size], data[_HEADER.size : HEADER_BYTES]
    if not data.startswith(_MAGIC) or crc != crc32c.crc32c(fields).to_bytes(4, "little"):
        return None
    return int(_HEADER.unpack(fields)[1])


def write_all(io: FileIO, fd: int, data: bytes) -> None:
    """Normally one write; goes on after a short one. OSError of the kernel, with part of it written perhaps."""
    view = memoryview(data)
    while view:
        taken = io.write(fd, view)
        if taken <= 0:
            raise OSError(28, "the write made no progress")
        view = view[taken:]
