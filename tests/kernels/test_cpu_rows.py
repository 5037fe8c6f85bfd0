"""Row by row kernels: near float64, the same bits for any company, any parts and every instruction set."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels.cpu import library
from kernels.cpu.library import pointer
from tests.kernels import oracle

pytestmark = pytest.mark.skipif(not library.supported(), reason="this CPU has none of the instruction sets")

LIBRARIES = tuple(library.load(isa) for isa in library.supported())

Floats = NDArray[np.float32]
ROWS, WIDTHS, SEEDS = st.integers(1, 9), st.integers(1, 70), st.integers(0, 2**32)
Kernel = Callable[[Any, Floats, Floats, int, int], None]
"""Called with (library, x, y, part, parts); x and y have spare columns at their rows' ends."""


def spread(seed: int, *shape: int) -> Floats:
    return (np.random.default_rng(seed).standard_normal(shape) * 3).astype(np.float32)


def at(array: Floats) -> Any:
    return pointer(array, "float *")


def ld(array: Floats) -> int:
    return array.strides[0] // 4


def with_room(values: Floats, room: int = 3) -> Floats:
    """A view like `values` whose rows are followed by NaN."""
    wide = np.full((values.shape[0], values.shape[1] + room), np.nan, np.float32)
    wide[:, : values.shape[1]] = values
    return wide[:, : values.shape[1]]


def computed(kernel: Kernel, x: Floats, width: int) -> Floats:
    """The kernel's y [rows, width], found equal for 1 to 4 parts, row by row, and on every instruction set."""
    found: list[Floats] = []
    for cpu in LIBRARIES:
        for parts in (1, 2, 3, 4):
            y = with_room(np.full((len(x), width), np.nan, np.float32))
            for part in range(parts):
                kernel(cpu, with_room(x), y, part, parts)
            assert y.base is not None
            assert np.isnan(y.base[:, width:]).all(), "written beyond the row's end"
            found.append(y.copy())
        alone = np.full_like(found[0], np.nan)
        for row in range(len(x)):
            kernel(cpu, x[row : row + 1], alone[row : row + 1], 0, 1)
        found.append(alone)
    assert all(each.tobytes() == found[0].tobytes() for each in found)
    return found[0]


@given(ROWS, WIDTHS, SEEDS)
def test_rms_norm(rows: int, width: int, seed: int) -> None:
    x, weight = spread(seed, rows, width), spread(seed + 1, width)

    def kernel(cpu: Any, x: Floats, y: Floats, part: int, parts: int) -> None:
        cpu.pd_rms_norm(at(x), ld(x), len(x), width, at(weight), 1e-5, at(y), ld(y), part, parts)

    y = computed(kernel, x, width)
    expected = oracle.rms_norm(torch.from_numpy(x), torch.from_numpy(weight), 1e-5).numpy()
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-12)
    LIBRARIES[0].pd_rms_norm(at(x), width, rows, width, at(weight), 1e-5, at(x), width, 0, 1)
    assert x.tobytes() == y.tobytes(), "in place it differs"


def test_rms_norm_of_nothing_is_nothing_and_of_the_smallest_is_no_accident() -> None:
    x = np.array([[0.0] * 20, [1e-30] * 20], np.float32)
    weight = np.ones(20, np.float32)
    for cpu in LIBRARIES:
        y = np.empty_like(x)
        cpu.pd_rms_norm(at(x), 20, 2, 20, at(weight), 1e-6, at(y), 20, 0, 1)
        assert (y[0] == 0).all()
        np.testing.assert_allclose(y[1], 1e-27, rtol=1e-6)


@given(ROWS, st.integers(1, 5), st.integers(1, 40), st.integers(0, 9), SEEDS)
def test_head_norm_is_the_norm_of_each_head_and_touches_no_other_column(
    rows: int, heads: int, dim: int, first: int, seed: int
) -> None:
    x, weight = spread(seed, rows, first + heads * dim + 2), spread(seed + 1, dim)
    expected = x.copy()
    for head in range(heads):
        columns = expected[:, first + head * dim :]
        LIBRARIES[0].pd_rms_norm(at(columns), ld(columns), rows, dim, at(weight), 1e-6, at(columns), ld(columns), 0, 1)
    for cpu in LIBRARIES:
        for parts in (1, 2, 5):
            y = x.copy()
            for part in range(parts):
                cpu.pd_head_norm(at(y[:, first:]), ld(y), rows, heads, dim, at(weight), 1e-6, part, parts)
            assert y.tobytes() == expected.tobytes()


@given(ROWS, WIDTHS, SEEDS)
def test_swiglu(rows: int, width: int, seed: int) -> None:
    x = spread(seed, rows, 2 * width)

    def kernel(cpu: Any, x: Floats, y: Floats, part: int, parts: int) -> None:
        cpu.pd_swiglu(at(x), ld(x), len(x), width, at(y), ld(y), part, parts)

    gate, up = x[:, :width].astype(np.float64), x[:, width:].astype(np.float64)
    np.testing.assert_allclose(computed(kernel, x, width), gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-12)


def test_swiglu_saturates_instead_of_overflowing() -> None:
    gates = np.array([-np.float32(3e38), -200, -88.5, -0.0, 0.0, 88.5, 200, 3e38], np.float32)
    x = np.concatenate((gates, np.ones(8, np.float32)))[None]
    for cpu in LIBRARIES:
        y = np.full((1, 8), np.nan, np.float32)
        cpu.pd_swiglu(at(x), 16, 1, 8, at(y), 8, 0, 1)
        assert np.abs(y[0, :3]).max() < 1e-35
        assert (y[0, 3:5] == 0).all()
        assert (y[0, 5:] == gates[5:]).all()


@given(ROWS, WIDTHS, SEEDS)
def test_scale_and_add_round_once(rows: int, width: int, seed: int) -> None:
    x, z, factor = spread(seed, rows, width), spread(seed + 1, rows, width), np.float32(0.1 + seed % 7)

    def scale(cpu: Any, x: Floats, y: Floats, part: int, parts: int) -> None:
        cpu.pd_scale(at(x), ld(x), len(x), width, factor, at(y), ld(y), part, parts)

    assert computed(scale, x, width).tobytes() == (x * factor).tobytes()
    for cpu in LIBRARIES:
        y = np.full_like(x, np.nan)
        for part in range(3):
            cpu.pd_add(at(x), width, at(z), width, rows, width, at(y), width, part, 3)
        assert y.tobytes() == (x + z).tobytes()


@given(st.integers(1, 9), WIDTHS, st.data())
def test_taken_rows_are_copies_also_in_place(rows: int, width: int, data: st.DataObject) -> None:
    x = spread(rows, rows, width)
    which = np.array(sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1))), np.int32)
    for cpu in LIBRARIES:
        for parts in (1, 2, 5):
            y, same = np.full((len(which), width), np.nan, np.float32), x.copy()
            for part in range(parts):
                for source, target in ((x, y), (same, same)):
                    taken = (pointer(which, "int32_t *"), len(which))
                    cpu.pd_take_rows(at(source), width, *taken, width, at(target), width, part, parts)
            assert (y == x[which]).all()
            assert (same[: len(which)] == x[which]).all()
            assert (same[len(which) :] == x[len(which) :]).all()
