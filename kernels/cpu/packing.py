"""Weights as the kernels read them: a file's tensors -> panels (csrc/panels.h says how they lie), losing nothing.

Quantised weights stay as small as in the file; only the order of their bits changes. Formats that the kernels don't
know become fp32 panels. Several tensors stacked along `out` become one matrix when they share a format.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.cpu import library
from shared.model.tensors import BLOCK_BYTES, Tensor

PANEL = 32
"""Outputs (rows of the file's tensor) of a panel."""
GROUP = 32
"""Inputs of a quantisation group, of the file's formats and of ours."""

Bytes = npt.NDArray[np.uint8]

FORMATS = {"F32": 0, "F16": 1, "BF16": 2, "Q8_0": 3, "Q4_0": 4, "Q4_1": 5}
"""The file's kind -> the kernels' format (PD_F32 and so on)."""

INT8_KINDS = frozenset({"Q8_0", "Q4_0", "Q4_1"})
"""Those that products of 8-bit activations take, see csrc/products_i8.c."""

_GROUP_BYTES = {"F32": 4096, "F16": 2048, "BF16": 2048, "Q8_0": 1088, "Q4_0": 576, "Q4_1": 640}
_FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<u4"), "F16": np.dtype("<u2"), "BF16": np.dtype("<u2")}
_PIECE = 1 << 22
"""Bytes of a tensor packed at a time, so that its transposed copy stays in cache."""


@dataclass(frozen=True)
class Matrix:
    """[out, in] in panels: `data` is uint8 [panels, bytes a panel] and begins at a cache line."""

    kind: str
    out: int
    width: int
    data: Bytes

    @cached_property
    def c(self) -> Any:
        """`pd_matrix *` for the kernels; valid as long as this object."""
        ffi = library.declarations()
        panels = library.pointer(self.data, "void *")
        return ffi.new(
            "pd_matrix *", {"format": FORMATS[self.kind], "in": self.width, "out": self.out, "panels": panels}
        )


def panel_bytes(kind: str, width: int) -> int:
    """Bytes of a panel of `width` inputs."""
    return _GROUP_BYTES[kind] * width // GROUP


def packed_as(tensors: Sequence[Tensor]) -> tuple[str, int, int, int]:
    """What `pack` would make of them: kind, out, width, bytes. ValueError when their widths differ."""
    widths = {tensor.shape[-1] for tensor in tensors}
    if len(widths) != 1:
        raise ValueError(f"weights of {sorted(widths)} inputs cannot be stacked")
    (width,) = widths
    out = sum(tensor.shape[0] for tensor in tensors)
    kinds = {tensor.kind for tensor in tensors}
    kind = kinds.pop() if len(kinds) == 1 else "F32"
    if kind not in FORMATS:
        kind = "F32"
    return kind, out, width, -(-out // PANEL) * panel_bytes(kind, width)


def pack(tensors: Sequence[Tensor]) -> Matrix:
    """One matrix of weights [out_i, in], stacked along `out`; ValueError when their widths differ."""
    kind, out, width, _ = packed_as(tensors)
    data = empty(-(-out // PANEL), panel_bytes(kind, width))
    first = 0
    for tensor in tensors:
        rows = tensor.raw() if tensor.kind == kind else tensor.fp32().view(np.uint8)
        _place(kind, rows, width, data, first)
        first += len(rows)
    if first % PANEL:
        _place(kind, np.zeros((PANEL - first % PANEL, rows.shape[1]), np.uint8), width, data, first)
    return Matrix(kind, out, width, data)


def unpack(matrix: Matrix) -> npt.NDArray[np.float32]:
    """The fp32 values [out, in], by the kernel that looks embeddings up."""
    values = np.empty((matrix.out, matrix.width), np.float32)
    ids = np.arange(matrix.out, dtype=np.int32)
    library.library().pd_embed_rows(
        matrix.c,
        library.pointer(ids, "int32_t *"),
        matrix.out,
        library.pointer(values, "float *"),
        matrix.width,
        0,
        1,
    )
    return values


def empty(panels: int, size: int) -> Bytes:
    """uint8 [panels, size] that begins at a cache line; its content is undefined."""
    return library.aligned(panels * size).reshape(panels, size)


def _place(kind: str, rows: Bytes, width: int, data: Bytes, first: int) -> None:
    """Rows [n, bytes] in the file's format become outputs first.. of the panels."""
    step = max(PANEL, _PIECE // rows.shape[1] // PANEL * PANEL)
    start = 0
    while start < len(rows):
        panel, column = divmod(first + start, PANEL)
        # up to a panel's end, then whole panels, then the rest
        count = min(len(rows) - start, PANEL - column if column else step)
        if not column and count > PANEL:
            count -= count % PANEL
        part = np.ascontiguousarray(rows[start : start + count])
        panels = max(1, count // PANEL)
        target = data[panel : panel + panels]
        columns = slice(column, column + count // panels)
        if kind in _FLOATS:
            _place_floats(part.view(_FLOATS[kind]), target.view(_FLOATS[kind]), width, columns)
        else:
            _place_groups(kind, part, target, columns)
        start += count


def _place_floats(rows: npt.NDArray[Any], target: npt.NDArray[Any], width: int, columns: slice) -> None:
    panels = len(target)
    target.reshape(panels, width, PANEL)[:, :, columns] = rows.reshape(panels, -1, width).transpose(0, 2, 1)


def _place_groups(kind: str, rows: Bytes, target: Bytes, columns: slice) -> None:
    panels, block = len(target), BLOCK_BYTES[kind]
    blocks = rows.reshape(panels, -1, rows.shape[1] // block, block)  # [panel, column, group, byte]
    groups = target.reshape(panels, -1, _GROUP_BYTES[kind])
    scales = 2 if kind == "Q4_1" else 1
    halves = groups[:, :, : 2 * scales * PANEL].view("<u2").reshape(panels, -1, scales, PANEL)
    halves[..., columns] = blocks[..., : 2 * scales].view("<u2").transpose(0, 2, 3, 1)
    quants = np.ascontiguousarray(blocks[..., 2 * scales :])
    room = groups[:, :, 2 * scales * PANEL :]
    if kind == "Q8_0":
        room.reshape(panels, -1, GROUP, PANEL)[..., columns] = quants.transpose(0, 2, 3, 1)
    else:
        words = room.view("<u4").reshape(panels, -1, GROUP // 8, PANEL)
        words[..., columns] = _nibbles(quants).transpose(0, 2, 3, 1)


def _nibbles(quants: Bytes) -> npt.NDArray[np.uint32]:
    """16 bytes of a block (byte i: values i and i + 16) -> 4 words of eight values, the first in the lowest bits."""
    wide = quants.view("<u8")  # [..., 2]: values 0..7 and 16..23, values 8..15 and 24..31
    words = np.empty((*quants.shape[:-1], 4), np.uint32)
    words[..., :2] = _squeezed(wide & np.uint64(0x0F0F0F0F0F0F0F0F))
    words[..., 2:] = _squeezed((wide >> np.uint64(4)) & np.uint64(0x0F0F0F0F0F0F0F0F))
    return words


def _squeezed(wide: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """Eight bytes below 16 -> eight nibbles, each step joining neighbours."""
    wide = (wide | wide >> np.uint64(4)) & np.uint64(0x00FF00FF00FF00FF)
    wide = (wide | wide >> np.uint64(8)) & np.uint64(0x0000FFFF0000FFFF)
    return (wide | wide >> np.uint64(16)).astype(np.uint32)
