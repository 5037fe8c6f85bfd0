"""The common base of all messages, the envelope head, and packed integer arrays.

A message is a frozen tagged struct in msgpack map form; its tag is its class name. Bulk integers (token ids,
block ids, identities) travel as one `bytes` field of little-endian items: decoding 8,000 ids as a list costs
200 us, as one blob 3 us.
"""

import sys
from array import array
from collections.abc import Iterable

import msgspec

PROTOCOL = 7
"""Raised whenever a message changes shape or meaning; peers of another version are refused at the hello."""

IDENTITY_BYTES = 32

if sys.byteorder != "little":  # pragma: no cover - Perdure runs on x86-64 and arm64
    raise ImportError("Perdure's packed arrays are little-endian; this machine is big-endian")


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that crosses a socket."""


class Head(msgspec.Struct, frozen=True, array_like=True):
    """First frame of every envelope; the second is the message.

    `to` is the incarnation the sender believes it talks to (0: any, only for the hello): what was meant for a
    dead incarnation is dropped by the next. `rid` names a request that wants a reply (0: none), `re` the request
    that this message answers (0: none). `deadline` is on this machine's monotonic clock, in seconds (0: none); over
    TCP, whose other end has another clock, the seconds that were left when it was sent.
    """

    to: int = 0
    rid: int = 0
    re: int = 0
    deadline: float = 0.0


def pack_u32(values: Iterable[int]) -> bytes:
    """Token or block ids -> packed little-endian u32; OverflowError for a value outside 0..2^32-1."""
    return array("I", values).tobytes()


def unpack_u32(blob: bytes) -> "array[int]":
    """Inverse of `pack_u32`; ValueError when the length is not a multiple of 4."""
    out = array("I")
    out.frombytes(blob)
    return out


def pack_u64(values: Iterable[int]) -> bytes:
    """Generations, offsets, checksums -> packed little-endian u64."""
    return array("Q", values).tobytes()


def unpack_u64(blob: bytes) -> "array[int]":
    """Inverse of `pack_u64`."""
    out = array("Q")
    out.frombytes(blob)
    return out


def split_identities(blob: bytes) -> list[bytes]:
    """One blob of 32-byte identities -> a list; ValueError for a ragged blob."""
    if len(blob) % IDENTITY_BYTES:
        raise ValueError(f"an identity blob of {len(blob)} bytes is no multiple of {IDENTITY_BYTES}")
    return [blob[i : i + IDENTITY_BYTES] for i in range(0, len(blob), IDENTITY_BYTES)]
