"""Bending bytes: flips, lies about lengths, cuts, splices, floods of one token. Deterministic in its `Random`."""

from collections.abc import Callable, Sequence
from random import Random

INTEGERS = (0, 1, 7, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 1)
LARGEST = 1 << 20
"""Bytes of an input; a longer one is cut."""

TOKENS = (
    b"[",
    b"{",
    b"(",
    b"\x91",
    b"\x81\xa1a",
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\x7f\xff\xff\xff",
    b"\0",
    b"\xff",
    b'"',
)


def _integer(data: bytearray, rng: Random) -> int:
    near = len(data) + rng.randint(-9, 9)
    return max(0, rng.choice((*INTEGERS, near, rng.getrandbits(64))))


def _flip(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _byte(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _lie(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    """A number where a length or an offset may lie."""
    width = rng.choice((1, 2, 4, 8))
    at = rng.randrange(len(data))
    value = _integer(data, rng) & ((1 << 8 * width) - 1)
    data[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))


def _delete(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.randint(1, 16)]


def _insert(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    at = rng.randint(0, len(data))
    data[at:at] = rng.randbytes(rng.randint(1, 12))


def _repeat(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    """A part of it, again and again."""
    at = rng.randrange(len(data))
    part = data[at : at + rng.randint(1, 64)]
    data[at:at] = part * rng.choice((1, 2, 50))


def _truncate(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    del data[rng.randrange(len(data)) :]


def _extend(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    data += bytes(rng.randint(1, 64)) if rng.random() < 0.5 else rng.randbytes(rng.randint(1, 64))


def _splice(data: bytearray, rng: Random, corpus: Sequence[bytes]) -> None:
    """The front of this one and the rest of another."""
    other = rng.choice(corpus)
    data[rng.randint(0, len(data)) :] = other[rng.randint(0, len(other)) :]


def _move(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    at, length = rng.randrange(len(data)), rng.randint(1, 32)
    part = data[at : at + length]
    del data[at : at + length]
    to = rng.randint(0, len(data))
    data[to:to] = part


def _flood(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    """Nesting: very many of one token."""
    at = rng.randint(0, len(data))
    data[at:at] = rng.choice(TOKENS) * rng.choice((10, 1000, 100_000))


def _digits(data: bytearray, rng: Random, _: Sequence[bytes]) -> None:
    """A number in text grows beyond all types."""
    places = [at for at, byte in enumerate(data) if 0x30 <= byte <= 0x39]
    if places:
        at = rng.choice(places)
        data[at : at + 1] = rng.choice(
            (b"-1", b"1e999", b"nan", b"9" * rng.choice((19, 20, 400, 5000)), b"0.5", b"\xd9\xa3")
        )


MUTATORS: tuple[Callable[[bytearray, Random, Sequence[bytes]], None], ...] = (
    _flip,
    _flip,
    _byte,
    _lie,
    _lie,
    _delete,
    _insert,
    _repeat,
    _truncate,
    _extend,
    _splice,
    _move,
    _flood,
    _digits,
)


def bent(data: bytes, rng: Random, corpus: Sequence[bytes]) -> bytes:
    """`data` after one to five mutations, at most LARGEST bytes; parts of others come from `corpus`."""
    out = bytearray(data)
    for _ in range(1 + min(4, int(rng.expovariate(0.8)))):
        if not out:
            out += rng.randbytes(rng.randint(1, 32))
        rng.choice(MUTATORS)(out, rng, corpus)
    return bytes(out[:LARGEST])
