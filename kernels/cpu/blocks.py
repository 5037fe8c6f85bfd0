"""Quantised blocks of a file -> the fields of panels' groups (csrc/panels.h), bits moved or widened, none lost.

A group is 32 inputs of 32 outputs. ggml's formats with one fp16 scale a block of 32 keep their codes, or have them
widened to 8 bits. Those with blocks of 256, whose scales are themselves small integers times an fp16, become K groups:

    w = (d * s) * q + (m * t)      d, m: fp16 of the block; s, t: int8 of 16 or 32 inputs; q: 4 or 8 bits

Every product in it is exact in fp32, so the sum rounds as the file's definition does, once. A definition that subtracts
a minimum has its sign turned in m; one without has m * t = -0, which leaves even a zero as it is.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shared.model.fp8 import BLOCK
from shared.model.tensors import F8

PANEL = 32
"""Outputs (rows of the file's tensor) of a panel."""
GROUP = 32
"""Inputs of a group of a quantised panel."""

Bytes: TypeAlias = npt.NDArray[np.uint8]
Fields: TypeAlias = dict[str, npt.NDArray[Any]]
"""Of each group, by the names in GROUPS: arrays [..., groups, what a column has of the field]."""

_D, _M = ("d", "<u2", (PANEL,)), ("m", "<u2", (PANEL,))
_NIBBLES, _BYTES = ("q", "<u4", (GROUP // 8, PANEL)), ("q", "i1", (GROUP, PANEL))

GROUPS: dict[str, np.dtype[Any]] = {
    "Q8": np.dtype([_D, _BYTES]),
    "Q4_0": np.dtype([_D, _NIBBLES]),
    "Q4_1": np.dtype([_D, _M, _NIBBLES]),
    "K4": np.dtype([_D, _M, ("s", "i1", (PANEL,)), ("t", "i1", (PANEL,)), _NIBBLES]),
    "F8": np.dtype([("d", "<f4", (PANEL,)), ("q", "u1", (GROUP, PANEL))]),
    "K8": np.dtype([_D, _M, ("s", "i1", (2, PANEL)), ("t", "i1", (2, PANEL)), _BYTES]),
}
"""The kernels' quantised formats: one group in memory, the columns of each field last."""

_MINUS = np.uint16(0x8000)
_CODES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""What the 16 codes of IQ4_NL and IQ4_XS stand for."""


def q8_0(blocks: Bytes) -> Fields:
    """Q8: fp16 d, 32 int8."""
    return {"d": _half(blocks, 0), "q": blocks[..., 2:].view(np.int8)}


def q4_0(blocks: Bytes) -> Fields:
    """Q4_0: fp16 d, nibbles."""
    return {"d": _half(blocks, 0), "q": _words_of_halves(blocks[..., 2:])}


def q4_1(blocks: Bytes) -> Fields:
    """Q4_1: fp16 d, fp16 m, nibbles."""
    return {"d": _half(blocks, 0), "m": _half(blocks, 2), "q": _words_of_halves(blocks[..., 4:])}


def q5_0(blocks: Bytes) -> Fields:
    """Q8: fp16 d, the fifth bits, nibbles; codes of 0..31 less 16."""
    return {"d": _half(blocks, 0), "q": _fives(blocks, 2) - np.int8(16)}


def q5_1(blocks: Bytes) -> Fields:
    """K8, whose second scales are 1: fp16 d, fp16 m, the fifth bits, nibbles."""
    ones = np.ones((*blocks.shape[:-1], 2), np.int8)
    return {"d": _half(blocks, 0), "m": _half(blocks, 2), "s": ones, "t": ones, "q": _fives(blocks, 4)}


def iq4_nl(blocks: Bytes) -> Fields:
    """Q8: fp16 d, nibbles that choose of 16 numbers."""
    return {"d": _half(blocks, 0), "q": _CODES[_bits(blocks[..., 2:], 16, 4)]}


def f8(blocks: Bytes) -> Fields:
    """F8: as `shared.model.fp8` puts scales and codes together."""
    each = blocks.view(BLOCK)
    return {"d": each["d"], "q": each["q"]}


def q2_k(blocks: Bytes) -> Fields:
    """K8: 16 bytes of scale and minimum, 2-bit codes, fp16 d, fp16 minimum."""
    pairs, codes = blocks[..., :16], _bits(blocks[..., 16:80], 32, 2)
    return _k8(_half(blocks, 80), pairs & 15, codes, _half(blocks, 82), pairs >> 4)


def q3_k(blocks: Bytes) -> Fields:
    """K8: third bits (set: not 4 less), 2-bit codes, 16 scales of 6 bits less 32, fp16 d."""
    third, codes = _bits(blocks[..., :32], 32, 1), _bits(blocks[..., 32:96], 32, 2)
    low, high = _bits(blocks[..., 96:104], 8, 4), _bits(blocks[..., 104:108], 4, 2)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    return _k8(_half(blocks, 108), scales, (codes | third << 2).view(np.int8) - np.int8(4))


def q4_k(blocks: Bytes) -> Fields:
    """K4: fp16 d, fp16 minimum, scales and minima of 6 bits, nibbles."""
    scales, minima = _sixes(blocks[..., 4:16])
    d, m = _half(blocks, 0).repeat(8, -1), (_half(blocks, 2) ^ _MINUS).repeat(8, -1)
    codes = _bits(blocks[..., 16:], 32, 4)
    return _groups({"d": d, "m": m, "s": scales, "t": minima, "q": _words(codes)}, 8)


def q5_k(blocks: Bytes) -> Fields:
    """K8: as q4_k, with fifth bits."""
    scales, minima = _sixes(blocks[..., 4:16])
    codes = _bits(blocks[..., 48:], 32, 4) | _bits(blocks[..., 16:48], 32, 1) << 4
    return _k8(_half(blocks, 0), scales.repeat(2, -1), codes, _half(blocks, 2), minima.repeat(2, -1))


def q6_k(blocks: Bytes) -> Fields:
    """K8: 6-bit codes less 32, 16 scales of 8 bits, fp16 d."""
    codes = _bits(blocks[..., :128], 64, 4) | _bits(blocks[..., 128:192], 32, 2) << 4
    return _k8(_half(blocks, 208), blocks[..., 192:208].view(np.int8), codes.view(np.int8) - np.int8(32))


def iq4_xs(blocks: Bytes) -> Fields:
    """K8: fp16 d, 8 scales of 6 bits less 32, nibbles that choose of 16 numbers."""
    low, high = _bits(blocks[..., 4:8], 1, 4), _bits(blocks[..., 2:4], 1, 2)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    return _k8(_half(blocks, 0), scales.repeat(2, -1), _CODES[_bits(blocks[..., 8:], 16, 4)])


UNPACK: dict[str, tuple[str, Callable[[Bytes], Fields]]] = {
    "Q8_0": ("Q8", q8_0),
    "Q4_0": ("Q4_0", q4_0),
    "Q4_1": ("Q4_1", q4_1),
    "Q5_0": ("Q8", q5_0),
    "Q5_1": ("K8", q5_1),
    "IQ4_NL": ("Q8", iq4_nl),
    "Q2_K": ("K8", q2_k),
    "Q3_K": ("K8", q3_k),
    "Q4_K": ("K4", q4_k),
    "Q5_K": ("K8", q5_k),
    "Q6_K": ("K8", q6_k),
    "IQ4_XS": ("K8", iq4_xs),
    F8: ("F8", f8),
}
"""The file's kind -> the format of its panels, and what makes fields of blocks [..., blocks, bytes]."""


def _half(blocks: Bytes, at: int) -> npt.NDArray[np.uint16]:
    """The bits of an fp16, [..., 1] of [..., bytes]; a view where its place is even."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<u2")


def _bits(packed: Bytes, run: int, width: int) -> Bytes:
    """Codes [...] of `width` bits: a run of `run` bytes holds first the lowest bits of all its bytes, then the next."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    runs = packed.reshape(*packed.shape[:-1], -1, 1, run)
    return (runs >> shifts & np.uint8((1 << width) - 1)).reshape(*packed.shape[:-1], -1)


def _fives(blocks: Bytes, at: int) -> npt.NDArray[np.int8]:
    """32 codes of five bits: 4 bytes of fifth bits from `at` on, then nibbles."""
    fifth = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
    return (_bits(blocks[..., at + 4 :], 16, 4) | fifth << 4).view(np.int8)


def _sixes(packed: Bytes) -> tuple[Bytes, Bytes]:
    """8 scales and 8 minima of six bits in 12 bytes: the low bits of four each, then the rest of all."""
    first, second, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, rest & 15 | first >> 2 & 48], -1)
    minima = np.concatenate([second & 63, rest >> 4 | second >> 2 & 48], -1)
    return scales, minima


def _k8(
    d: npt.NDArray[np.uint16],
    scales: npt.NDArray[Any],
    codes: npt.NDArray[Any],
    least: npt.NDArray[np.uint16] | None = None,
    minima: npt.NDArray[Any] | None = None,
) -> Fields:
    """Groups of blocks of 256: `d`, `least` [..., 1], `scales`, `minima` [..., 16], `codes` [..., 256]."""
    m = np.full_like(d, _MINUS) if least is None else least ^ _MINUS
    t = np.zeros_like(scales) if minima is None else minima
    whole = {"d": d.repeat(8, -1), "m": m.repeat(8, -1), "s": scales, "t": t, "q": codes}
    return _groups(whole, 8)


def _groups(whole: Fields, groups: int) -> Fields:
    """Fields of blocks [..., blocks, of all its groups] -> [..., blocks * groups, of one]."""
    return {name: field.reshape(*field.shape[:-2], field.shape[-2] * groups, -1) for name, field in whole.items()}


def _words_of_halves(quants: Bytes) -> npt.NDArray[np.uint32]:
    """16 bytes of a block (byte i: codes i and i + 16) -> 4 words of eight codes, the first in the lowest bits."""
    wide = np.ascontiguousarray(quants).view("<u8")  # [..., 2]: codes 0..7 and 16..23, codes 8..15 and 24..31
    low = np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.concatenate([_squeezed(wide & low), _squeezed(wide >> np.uint64(4) & low)], -1)


def _words(codes: Bytes) -> npt.NDArray[np.uint32]:
    """Codes of four bits, one a byte -> words of eight, the first in the lowest bits."""
    return _squeezed(np.ascontiguousarray(codes).view("<u8"))


def _squeezed(wide: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """Eight bytes below 16 -> eight nibbles, each step joining neighbours."""
    wide = (wide | wide >> np.uint64(4)) & np.uint64(0x00FF00FF00FF00FF)
    wide = (wide | wide >> np.uint64(8)) & np.uint64(0x0000FFFF0000FFFF)
    return (wide | wide >> np.uint64(16)).astype(np.uint32)
