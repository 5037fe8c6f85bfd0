"""Frames in an append-only file: length u32, CRC32C u32 over length and payload, payload.

The CRC covers the length, so that zeros (a file extended by a crash) are no frame. A reader takes frames up to the
first that is none: everything it returns is what was written, in order, without a gap.
"""

import struct
from typing import NamedTuple

import crc32c

_LENGTH = struct.Struct("<I")
HEADER_BYTES = 8
MAX_FRAME_BYTES = 1 << 30


def frame(payload: bytes) -> bytes:
    """One frame; ValueError when the payload is larger than a reader would believe."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame holds {MAX_FRAME_BYTES} bytes, not {len(payload)}")
    length = _LENGTH.pack(len(payload))
    return length + _LENGTH.pack(crc32c.crc32c(payload, crc32c.crc32c(length))) + payload


class Frames(NamedTuple):
    """`payloads` of the good frames, `end`: where they end in the data, `ends`: where each ends."""

    payloads: list[memoryview]
    ends: list[int]
    end: int


def read_frames(data: bytes | memoryview, start: int = 0) -> Frames:
    """All frames from `start` up to the first that is none, or to the end of the data."""
    view = memoryview(data)
    payloads: list[memoryview] = []
    ends: list[int] = []
    at = start
    while at + HEADER_BYTES <= len(view):
        length, crc = struct.unpack_from("<II", view, at)
        stop = at + HEADER_BYTES + length
        if length > MAX_FRAME_BYTES or stop > len(view):
            break
        payload = view[at + HEADER_BYTES : stop]
        if crc32c.crc32c(payload, crc32c.crc32c(view[at : at + 4])) != crc:
            break
        payloads.append(payload)
        at = stop
        ends.append(at)
    return Frames(payloads, ends, at)
