"""One tensor of a model file: its bytes as they lie on disk, or dequantised to fp32 on demand.

Quantised formats (ggml's): rows of blocks of 32 values.
    Q8_0  fp16 d, 32 int8:               d * q
    Q4_0  fp16 d, 16 bytes of nibbles:   d * (q - 8)     low nibbles are values 0..15, high ones 16..31
    Q4_1  fp16 d, fp16 m, 16 bytes:      d * q + m
Arithmetic is fp32 and equals the `gguf` package's bit for bit (tested), in bounded pieces so that dequantising a
vocabulary's embedding needs no second copy of it. The package itself, slow to import, dequantises the other formats.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.model.fp8 import Scales
from shared.model.spec import BadModel, ModelSpec

F8 = "F8_E4M3"
"""8-bit floats, which need scales beside them (fp8.py)."""

_BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    F8: (1, 1),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "IQ4_NL": (32, 18),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_XS": (256, 136),
}
BLOCK_VALUES = {kind: values for kind, (values, _) in _BLOCKS.items()}
BLOCK_BYTES = {kind: size for kind, (_, size) in _BLOCKS.items()}
"""Values in, and bytes of, one block of each known type."""

_OURS = ("Q8_0", "Q4_0", "Q4_1")

_PIECE = 1 << 20
"""Values dequantised at once."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def row_bytes(kind: str, values: int) -> int:
    """Bytes of one row of `values` elements; ValueError when they don't fill whole blocks."""
    if values % BLOCK_VALUES[kind]:
        raise ValueError(f"rows of {values} values are no multiple of {kind}'s block of {BLOCK_VALUES[kind]}")
    return values // BLOCK_VALUES[kind] * BLOCK_BYTES[kind]


@dataclass(frozen=True)
class Tensor:
    """`shape` is [rows, columns] or [columns], `kind` a key of BLOCK_VALUES, `blob` the bytes (a view of the file).

    `row_order`: row i of the tensor is row `row_order[i]` of the file (GGUF's interleaved q and k), or None.
    `scales`: of a tensor of kind F8, which alone has some.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    blob: Bytes
    row_order: npt.NDArray[np.intp] | None = None
    scales: Scales | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.blob.nbytes

    def raw(self) -> Bytes:
        """[rows, bytes a row] in the file's own format, rows in the tensor's order (a view unless re-ordered).

        Of kind F8: with the scales between the codes, see `Scales.blocks`.
        """
        rows = self.blob.reshape(-1, row_bytes(self.kind, self.shape[-1]))
        if self.scales is not None:
            rows = self.scales.blocks(rows, np.arange(len(rows)))
        return rows if self.row_order is None else rows[self.row_order]

    def fp32(self, out: Floats | None = None) -> Floats:
        """The values as fp32, in `out` (same shape, contiguous) or a new array."""
        rows = self.blob.reshape(-1, row_bytes(self.kind, self.shape[-1]))
        if out is None:
            out = np.empty(self.shape, dtype=np.float32)
        flat = out.reshape(len(rows), self.shape[-1])
        step = max(1, _PIECE // self.shape[-1])
        for start in range(0, len(rows), step):
            stop = min(len(rows), start + step)
            which = np.arange(start, stop) if self.row_order is None else self.row_order[start:stop]
            piece = rows[start:stop] if self.row_order is None else rows[which]
            if self.scales is None:
                dequantise(self.kind, piece, flat[start:stop])
            else:
                self.scales.dequantise(piece, which, flat[start:stop])
        return out


def dequantise(kind: str, rows: Bytes, out: Floats) -> None:
    """`rows` [n, bytes a row] of type `kind` -> `out` [n, values a row]. Scales that aren't finite give such values."""
    with np.errstate(all="ignore"):
        _dequantise(kind, rows, out)


def _dequantise(kind: str, rows: Bytes, out: Floats) -> None:
    rows = np.ascontiguousarray(rows)
    if kind == "F32":
        out[...] = rows.view("<f4")
    elif kind == "F16":
        out[...] = rows.view("<f2")
    elif kind == "BF16":
        np.left_shift(rows.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)
    elif kind not in _OURS:
        from gguf import GGMLQuantizationType, dequantize

        out[...] = dequantize(rows, GGMLQuantizationType[kind])
    else:
        blocks = rows.reshape(len(rows), -1, BLOCK_BYTES[kind])
        values = out.reshape(len(rows), -1, 32)
        scale = _fp16(blocks, 0)
        if kind == "Q8_0":
            np.multiply(blocks[..., 2:].view(np.int8), scale, out=values, dtype=np.float32)
            return
        quants = blocks[..., 4 if kind == "Q4_1" else 2 :]
        low, high = quants & 15, quants >> 4
        if kind == "Q4_0":
            low, high = low.view(np.int8) - np.int8(8), high.view(np.int8) - np.int8(8)
        np.multiply(low, scale, out=values[..., :16], dtype=np.float32)
        np.multiply(high, scale, out=values[..., 16:], dtype=np.float32)
        if kind == "Q4_1":
            values += _fp16(blocks, 2)


def _fp16(blocks: Bytes, at: int) -> Any:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def most_common_kind(weights: Iterable[tuple[str, int]]) -> str:
    """The type that most values have, of (type, values) pairs; for people."""
    total: dict[str, int] = {}
    for kind, values in weights:
        total[kind] = total.get(kind, 0) + values
    return max(total, key=lambda kind: total[kind], default="none")


def check_tensors(where: object, spec: ModelSpec, tensors: dict[str, Tensor]) -> None:
    """Every tensor of the architecture, each of its shape, and no other; BadModel names the first that is wrong."""
    expected = spec.shapes()
    for name in tensors:
        if name not in expected:
            raise BadModel(f"{where}: tensor {name} has no place in a {spec.architecture} model as configured")
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise BadModel(f"{where}: tensor {name} is missing; the file is incomplete or no {spec.architecture} model")
        if tensor.shape != shape:
            raise BadModel(
                f"{where}: tensor {name} has shape {list(tensor.shape)}, the configuration says {list(shape)}"
            )
