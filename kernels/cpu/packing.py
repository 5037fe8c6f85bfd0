"""Weights as the kernels read them: a file's tensors -> panels (csrc/panels.h says how they lie), losing nothing.

Quantised weights keep the bits of the file in another order, or are widened to 8 bits (blocks.py). Tensors that are
stacked along `out` become one matrix; where neighbours differ in format, another run of panels begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.cpu import library
from kernels.cpu.blocks import GROUP, GROUPS, PANEL, UNPACK, Bytes
from shared.model.fp8 import BLOCK
from shared.model.tensors import BLOCK_BYTES, F8, Tensor

_FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<u4"), "F16": np.dtype("<u2"), "BF16": np.dtype("<u2")}

NUMBERS = {"F32": 0, "F16": 1, "BF16": 2, "Q8": 3, "Q4_0": 4, "Q4_1": 5, "K4": 6, "K8": 7, "F8": 8}
"""The kernels' formats, PD_F32 and so on."""

FORMATS = {kind: kind for kind in _FLOATS} | {kind: name for kind, (name, _) in UNPACK.items()}
"""The file's kind -> the kernels' format; but see `format_of`."""

INT8_FORMATS = ("Q8", "Q4_0", "Q4_1")
INT8_KINDS = frozenset(kind for kind, format in FORMATS.items() if format in INT8_FORMATS)
"""Those that products of 8-bit activations take, see csrc/products_i8.c: as kernels' formats, as the file's kinds."""

_PIECE = 1 << 22
"""Bytes of a tensor packed at a time, so that its transposed copy stays in cache."""


@dataclass(frozen=True)
class Run:
    """So many outputs in panels of one format."""

    format: str
    out: int


@dataclass(frozen=True)
class Plan:
    """How a matrix [out, width] lies: `runs`, one behind the other."""

    runs: tuple[Run, ...]
    width: int

    @property
    def out(self) -> int:
        """Outputs in all."""
        return sum(run.out for run in self.runs)

    @property
    def takes_int8(self) -> bool:
        """Whether it can be multiplied by activations of 8 bits: a stack all of whose runs can."""
        return all(run.format in INT8_FORMATS for run in self.runs)

    @property
    def nbytes(self) -> int:
        """Bytes of all panels."""
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each run; multiples of a cache line."""
        return tuple(-(-run.out // PANEL) * panel_bytes(run.format, self.width) for run in self.runs)


@dataclass(frozen=True)
class Matrix:
    """A matrix of this plan; `data`: uint8 [plan.nbytes] that begins at a cache line."""

    plan: Plan
    data: Bytes

    @property
    def out(self) -> int:
        """Outputs in all."""
        return self.plan.out

    @property
    def width(self) -> int:
        """Inputs."""
        return self.plan.width

    @cached_property
    def c(self) -> Any:
        """`pd_matrix *` for the kernels, the first run; valid as long as this object."""
        return self._c[0]

    @cached_property
    def _c(self) -> list[Any]:
        """Each run's `pd_matrix *`; it names the one behind it."""
        ffi = library.declarations()
        made: list[Any] = []
        end = self.plan.nbytes
        for run, size in zip(reversed(self.plan.runs), reversed(self.plan.sizes), strict=True):
            fields = {"format": NUMBERS[run.format], "in": self.plan.width, "out": run.out}
            fields["panels"] = library.pointer(self.data[end - size :], "void *")
            fields["next"] = made[0] if made else ffi.NULL
            made.insert(0, ffi.new("pd_matrix *", fields))
            end -= size
        return made


def format_of(tensor: Tensor) -> str:
    """The kernels' format for it."""
    return "F32" if is_widened(tensor) else FORMATS[tensor.kind]


def is_widened(tensor: Tensor) -> bool:
    """Whether it must become F32: 8-bit floats whose scales change within a group of inputs."""
    return tensor.scales is not None and not tensor.scales.in_groups(tensor.shape[-1])


def panel_bytes(format: str, width: int) -> int:
    """Bytes of a panel of `width` inputs."""
    if format in _FLOATS:
        return _FLOATS[format].itemsize * PANEL * width
    return GROUPS[format].itemsize * width // GROUP


def packed_as(tensors: Sequence[Tensor]) -> Plan:
    """What `pack` would make of them. ValueError when their widths differ."""
    widths = {tensor.shape[-1] for tensor in tensors}
    if len(widths) != 1:
        raise ValueError(f"weights of {sorted(widths)} inputs cannot be stacked")
    runs = ((format, list(run)) for format, run in groupby(tensors, format_of))
    return Plan(tuple(Run(format, sum(tensor.shape[0] for tensor in run)) for format, run in runs), widths.pop())


def pack(tensors: Sequence[Tensor]) -> Matrix:
    """One matrix of weights [out_i, in], stacked along `out`; ValueError when their widths differ."""
    plan = packed_as(tensors)
    data = library.aligned(plan.nbytes)
    left = iter(tensors)
    start = 0
    for run, size in zip(plan.runs, plan.sizes, strict=True):
        panels = data[start : start + size].reshape(-1, panel_bytes(run.format, plan.width))
        if run.out % PANEL:
            panels[-1] = 0  # the columns that nobody has
        first = 0
        while first < run.out:
            tensor = next(left)
            if run.format == "F32":
                _place("F32", tensor.fp32().view(np.uint8), plan.width, panels, first)
            else:
                _place(tensor.kind, tensor.raw(), plan.width, panels, first)
            first += tensor.shape[0]
        start += size
    return Matrix(plan, data)


def unpack(matrix: Matrix) -> npt.NDArray[np.float32]:
    """The fp32 values [out, in], by the kernel that looks embeddings up."""
    values = np.empty((matrix.out, matrix.width), np.float32)
    first = 0
    run = matrix.c
    while first < matrix.out:
        ids = np.arange(run.out, dtype=np.int32)
        target = values[first:]
        library.library().pd_embed_rows(
            run,
            library.pointer(ids, "int32_t *"),
            run.out,
            library.pointer(target, "float *"),
            matrix.width,
            0,
            1,
        )
        first += run.out
        run = run.next
    return values


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
    format, unpacked = UNPACK[kind]
    panels, block = len(target), BLOCK.itemsize if kind == F8 else BLOCK_BYTES[kind]
    blocks = rows.reshape(panels, -1, rows.shape[1] // block, block)  # [panel, column, block, byte]
    groups = target.view(GROUPS[format])  # [panel, group]
    for name, field in unpacked(blocks).items():
        room = groups[name]  # [panel, group, ..., column]
        shape = (panels, blocks.shape[1], *room.shape[1:-1])
        room[..., columns] = np.moveaxis(field.reshape(shape), 1, -1)
