"""Random bits in each kind of block that files have, with scales that are sane; and tensors of them."""

import numpy as np
import numpy.typing as npt

from shared.model.fp8 import Scales
from shared.model.tensors import BLOCK_BYTES, BLOCK_VALUES, F8, Tensor

Bytes = npt.NDArray[np.uint8]

HALVES = {
    "Q8_0": {0: 127},
    "Q4_0": {0: 8},
    "Q4_1": {0: 15, 2: 1},
    "Q5_0": {0: 16},
    "Q5_1": {0: 31, 2: 1},
    "IQ4_NL": {0: 127},
    "Q2_K": {80: 15 * 3, 82: 15},
    "Q3_K": {108: 32 * 4},
    "Q4_K": {0: 63 * 15, 2: 63},
    "Q5_K": {0: 63 * 31, 2: 63},
    "Q6_K": {208: 128 * 32},
    "IQ4_XS": {0: 32 * 127},
}
"""Where a block has fp16 numbers, and the largest that they are multiplied by; all other bits may be anything."""


def random_blocks(kind: str, rows: int, width: int, random: np.random.Generator, size: float) -> Bytes:
    """uint8 [rows, bytes a row]; the largest values are near `size`, of either sign."""
    raw = random.integers(0, 256, (rows, width // BLOCK_VALUES[kind], BLOCK_BYTES[kind]), dtype=np.uint8)
    for at, most in HALVES[kind].items():
        scale = random.standard_normal((*raw.shape[:2], 1)) * (size / most)
        raw[..., at : at + 2] = scale.astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def width_of(kind: str, groups: int, odd: int) -> int:
    """Some `groups` of 32 inputs: whole blocks of the kind; `odd` fewer where any number will do."""
    block = max(32, BLOCK_VALUES[kind])
    return -(-groups * 32 // block) * block - (odd if BLOCK_VALUES[kind] == 1 and kind != F8 else 0)


def _scales(out: int, width: int, random: np.random.Generator) -> list[tuple[npt.NDArray[np.float32], int, int]]:
    """By tensor, by output, by block, for `Scales`."""
    shapes = ((out, width), (1, width), (40, 64))
    made = (
        (random.standard_normal((-(-out // rows), -(-width // columns))), rows, columns) for rows, columns in shapes
    )
    return [((values / 448).astype(np.float32), rows, columns) for values, rows, columns in made]


def weights(kind: str, out: int, width: int, seed: int) -> Tensor:
    """A tensor [out, width], signed scales included."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((out, width)).astype(np.float32)
    if kind == "F32":
        raw: Bytes = values.view(np.uint8)
    elif kind == "F16":
        raw = values.astype(np.float16).view(np.uint8)
    elif kind == "BF16":
        raw = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    elif kind == F8:
        raw = random.integers(0, 256, (out, width), dtype=np.uint8)
        raw[raw & 127 == 127] = 0  # NaN
        scales = [Scales(*each) for each in _scales(out, width, random)]
        return Tensor("test", kind, (out, width), raw.reshape(-1), scales=scales[seed % len(scales)])
    else:
        raw = random_blocks(kind, out, width, random, 10.0 ** random.integers(-3, 3))
    return Tensor("test", kind, (out, width), np.ascontiguousarray(raw).reshape(-1))
