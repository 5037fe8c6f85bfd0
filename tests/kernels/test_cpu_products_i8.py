"""Products of activations rounded to 8 bits: what is rounded, how right it is, and the same bits however it is cut."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import library, packing
from shared.model.tensors import BLOCK_BYTES, Tensor
from tests.kernels.test_cpu_products import Floats, same, weights

KINDS = ["Q4_0", "Q4_1", "Q8_0"]
ORDER = np.array([8 * i + j for i in range(4) for j in (0, 2, 4, 6, 1, 3, 5, 7)])
"""Which k of a group lies where."""

pytestmark = pytest.mark.skipif(not library.supported(), reason="this CPU has none of the instruction sets")


@pytest.fixture(params=library.supported(), autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(library.ISA_VARIABLE, request.param)
    return request.param


@dataclass
class Rows:
    """pd_rows_i8 and what it points to; `q` in the kernels' order."""

    q: npt.NDArray[np.int8]
    d: Floats
    sum: Floats
    c: Any


def quantised(x: Floats, parts: int = 1) -> Rows:
    rows, width = x.shape
    q = np.full((rows, width), 99, np.int8)
    d, total = np.full((2, rows, width // 32), np.nan, np.float32)
    ffi, at = library.declarations(), library.pointer
    fields = {"q": at(q, "int8_t *"), "d": at(d, "float *"), "sum": at(total, "float *"), "in": width}
    c = ffi.new("pd_rows_i8 *", fields)
    for part in range(parts):
        library.library().pd_quantise_rows(at(x, "float *"), width, rows, c, part, parts)
    return Rows(q, d, total, c)


def product(
    matrix: packing.Matrix, x: Floats, parts: int = 1, bias: Floats | None = None, residual: Floats | None = None
) -> Floats:
    lib, at = library.library(), library.pointer
    rows = quantised(x, parts)
    y = np.full((len(x), matrix.out), np.nan, np.float32)
    for part in range(parts):
        scratch = np.full(lib.pd_product_i8_scratch(), np.nan, np.float32)
        lib.pd_product_i8(
            matrix.c,
            rows.c,
            len(x),
            at(y, "float *"),
            matrix.out,
            at(bias, "float *"),
            at(residual, "float *"),
            0 if residual is None else matrix.out,
            at(scratch, "float *"),
            part,
            parts,
        )
    return y


def normal(rows: int, width: int, seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


@given(rows=st.integers(1, 9), groups=st.integers(1, 9), parts=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_groups_are_rounded_by_their_greatest_value(rows: int, groups: int, parts: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    x = normal(rows, 32 * groups, seed) * 10.0 ** random.integers(-20, 20, (rows, 1))
    x = x.astype(np.float32)
    got = quantised(x, parts)
    grouped = x.reshape(rows, groups, 32)
    top = np.abs(grouped).max(-1, keepdims=True)
    expected = np.rint(grouped * (np.float32(127) / top))
    assert np.array_equal(got.q.reshape(rows, groups, 32), expected[..., ORDER])
    assert same(got.d, (top / np.float32(127))[..., 0])
    assert np.array_equal(got.sum, expected.sum(-1))
    assert np.abs(got.q).max() == 127


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so() -> None:
    x = normal(5, 64, 1)
    x[0], x[1, 3], x[2, 40], x[3] = 0, np.nan, -np.inf, 1e-38
    for kind in KINDS:
        y = product(packing.pack([weights(kind, 40, 64, 1)]), x)
        assert np.all(y[[0, 3]] == 0)
        assert np.all(np.isnan(y[[1, 2]]))
        assert np.all(np.isfinite(y[4]))


@pytest.mark.parametrize("kind", KINDS)
@given(
    shape=st.tuples(st.integers(1, 100), st.integers(1, 12) | st.sampled_from([18, 19, 40])),
    rows=st.integers(1, 40),
    parts=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=25, deadline=None)
def test_products_agree_with_float64_and_never_depend_on_the_cut(
    kind: str, shape: tuple[int, int], rows: int, parts: int, seed: int
) -> None:
    out, groups = shape
    tensor = weights(kind, out, 32 * groups, seed)
    matrix = packing.pack([tensor])
    x = normal(rows, 32 * groups, seed)
    y = product(matrix, x)
    got = quantised(x)
    back = np.empty((rows, groups, 32))
    back[..., ORDER] = got.q.reshape(rows, groups, 32) * got.d[..., None].astype(np.float64)
    back = back.reshape(rows, -1)
    w = tensor.fp32().astype(np.float64)
    # Q4's integers are rounded apart from their offset, so what cancels counts in full
    integers = (
        np.abs(w) if kind == "Q8_0" else np.abs(w) + 32 * np.abs(w).reshape(out, groups, 32).max(-1).repeat(32, -1)
    )
    bound = np.abs(back) @ integers.T * (groups + 4) * 2.0**-23 + 1e-30
    assert np.all(np.abs(y - back @ w.T) <= bound)
    assert same(product(matrix, x, parts), y)
    for row in range(rows):
        assert same(product(matrix, x[row : row + 1]), y[row : row + 1])
    for count in range(2, rows):
        assert same(product(matrix, x[rows - count :], parts), y[rows - count :]), count


@pytest.mark.parametrize("kind", KINDS)
def test_the_greatest_integers_do_not_overflow(kind: str) -> None:
    """All weights at an end of their range, all activations at theirs, of either sign."""
    blocks = np.zeros((64, 2, BLOCK_BYTES[kind]), np.uint8)
    blocks[..., 0:2] = np.float16(1).reshape(1).view(np.uint8)
    blocks[:32, :, 4 if kind == "Q4_1" else 2 :] = 0x80 if kind == "Q8_0" else 0xFF
    blocks[32:, :, 4 if kind == "Q4_1" else 2 :] = 0x7F if kind == "Q8_0" else 0x00
    tensor = Tensor("ends", kind, (64, 64), blocks.reshape(-1))
    x = np.ones((8, 64), np.float32) * np.array([[127], [-127]] * 4, np.float32)
    expected = x.astype(np.float64) @ tensor.fp32().astype(np.float64).T
    assert np.array_equal(product(packing.pack([tensor]), x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_bias_and_residual(kind: str) -> None:
    matrix = packing.pack([weights(kind, 77, 416, 3)])
    x, residual, bias = normal(500, 416, 1), normal(500, 77, 2), normal(1, 77, 3)[0]
    plain = product(matrix, x)
    assert same(product(matrix, x, 3, bias, residual), (plain + bias) + residual)
    assert same(product(matrix, x[100:493], 16), plain[100:493])
