"""8-bit floats with scales, as safetensors of FP8 models have them: w = e4m3(code) * scale, rounded once, to fp32.

e4m3: sign, four bits of exponent with bias 7, three of mantissa; no infinities, all ones but the sign is NaN. A scale
is for the whole tensor, for each output, or for each block of (usually) 128 x 128; `weight_scale_inv` of block-wise
files is, despite its name, what is multiplied by.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.model.spec import BadModel

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

GROUP = 32
"""Codes of one of our blocks: fp32 scale, codes."""
BLOCK = np.dtype([("d", "<f4"), ("q", "u1", (GROUP,))])


def _decoded() -> Floats:
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, (codes & 7) / 8
    size = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    size[127] = np.nan
    return np.concatenate([size, -size]).astype(np.float32)


VALUES = _decoded()
"""What each code is."""


@dataclass(frozen=True)
class Scales:
    """`values` fp32 [blocks, blocks] of a tensor [out, in], each for `rows` x `columns` of its values."""

    values: Floats
    rows: int
    columns: int

    def blocks(self, codes: Bytes, which: npt.NDArray[np.intp]) -> Bytes:
        """Codes [n, in] of rows `which` -> uint8 [n, bytes], each GROUP of codes behind its scale; see `in_groups`."""
        out = np.empty((len(codes), codes.shape[1] // GROUP), BLOCK)
        out["q"] = codes.reshape(*out.shape, GROUP)
        starts = np.arange(out.shape[1]) * GROUP
        out["d"] = self.values[(which // self.rows)[:, None], (starts // self.columns)[None]]
        return out.view(np.uint8)

    def dequantise(self, codes: Bytes, which: npt.NDArray[np.intp], out: Floats) -> None:
        """Codes [n, in] of rows `which` -> their values."""
        np.take(VALUES, codes, out=out, mode="clip")  # no code lies outside; other modes need a copy
        columns = np.arange(codes.shape[1]) // self.columns
        out *= self.values[(which // self.rows)[:, None], columns[None]]

    def in_groups(self, width: int) -> bool:
        """Whether GROUPs of `width` inputs have one scale each."""
        return width % GROUP == 0 and (self.columns >= width or self.columns % GROUP == 0)


def scales_for(where: str, shape: tuple[int, ...], values: Floats, block: tuple[int, int]) -> Scales:
    """Of a tensor of `shape`; `block` is what the configuration says of block-wise ones. BadModel when none fits."""
    out, width = shape
    if values.size == 1:
        return Scales(values.reshape(1, 1), out, width)
    if values.shape in ((out,), (out, 1)):
        return Scales(values.reshape(out, 1), 1, width)
    rows, columns = block
    expected = -(-out // rows), -(-width // columns)
    if values.shape == expected:
        return Scales(values, rows, columns)
    raise BadModel(
        f"{where}: scales of shape {list(values.shape)} for weights {list(shape)}; known are one, [{out}, 1] "
        f"and {list(expected)} (blocks of {rows} x {columns})"
    )
