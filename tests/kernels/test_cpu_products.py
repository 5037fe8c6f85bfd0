"""Products and embeddings from packed weights: right against float64, and the same bits however the work is cut."""

from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import library, packing
from shared.model.tensors import Tensor
from tests.random_blocks import weights, width_of

Floats = npt.NDArray[np.float32]
KINDS = sorted(packing.FORMATS)

pytestmark = pytest.mark.skipif(not library.supported(), reason="this CPU has none of the instruction sets")


@pytest.fixture(params=library.supported(), autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(library.ISA_VARIABLE, request.param)
    return request.param


def product(
    matrix: packing.Matrix,
    x: Floats,
    parts: int = 1,
    bias: Floats | None = None,
    residual: Floats | None = None,
    y: Floats | None = None,
) -> Floats:
    """The kernel, part after part, into a poisoned y unless one is given."""
    lib, at = library.library(), library.pointer
    if y is None:
        y = np.full((len(x), matrix.out), np.nan, np.float32)
    for part in range(parts):
        scratch = np.full(lib.pd_product_scratch(), np.nan, np.float32)
        lib.pd_product(
            matrix.c,
            at(x, "float *"),
            x.strides[0] // 4,
            len(x),
            at(y, "float *"),
            y.strides[0] // 4,
            at(bias, "float *"),
            at(residual, "float *"),
            0 if residual is None else residual.strides[0] // 4,
            at(scratch, "float *"),
            part,
            parts,
        )
    return y


def same(a: Floats, b: Floats) -> bool:
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def chains(x: Floats, w: Floats) -> Floats:
    """X @ w^T by the definition: one fused multiply-add after the other, ascending k. float64 holds a product of two
    floats exactly; adding rounds it once there and once to fp32, so inputs must leave room for both (see the test).
    """
    sums = np.zeros((len(x), len(w)), np.float32)
    for k in range(x.shape[1]):
        sums = (x[:, k, None].astype(np.float64) * w[None, :, k] + sums).astype(np.float32)
    return sums


shapes = st.tuples(st.integers(1, 100), st.integers(1, 12))
"""Outputs and groups of 32 inputs."""


@pytest.mark.parametrize("kind", KINDS)
@given(shape=shapes, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_packed_weights_are_the_files_weights(kind: str, shape: tuple[int, int], seed: int) -> None:
    out, groups = shape
    width = width_of(kind, groups, seed % 32)
    tensor = weights(kind, out, width, seed)
    unpacked = packing.unpack(packing.pack([tensor]))
    expected = tensor.fp32() + np.float32(0) if kind == "Q4_0" else tensor.fp32()  # its -0 becomes +0
    assert same(unpacked, expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Q4_0"])
@given(out=st.integers(1, 70), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_products_multiply_by_the_files_weights_to_the_bit(kind: str, out: int, seed: int) -> None:
    """Rows of a unit matrix, few and many: each result is +0 plus one weight and zeros, so a -0 alone turns."""
    tensor = weights(kind, out, width_of(kind, 1, 0), seed)
    matrix = packing.pack([tensor])
    unit = np.eye(tensor.shape[1], dtype=np.float32)
    expected = np.ascontiguousarray(tensor.fp32().T) + np.float32(0)
    assert same(product(matrix, unit), expected)
    for row in range(seed % 17, len(unit), 17):
        assert same(product(matrix, unit[row : row + 1]), expected[row : row + 1])


@pytest.mark.parametrize("kind", KINDS)
@given(shape=shapes, rows=st.integers(1, 40), parts=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_products_agree_with_float64_and_never_depend_on_the_cut(
    kind: str, shape: tuple[int, int], rows: int, parts: int, seed: int
) -> None:
    out, groups = shape
    width = width_of(kind, groups, seed % 32)
    tensor = weights(kind, out, width, seed)
    matrix = packing.pack([tensor])
    x = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    y = product(matrix, x)
    w = tensor.fp32().astype(np.float64)
    bound = np.abs(x).astype(np.float64) @ np.abs(w).T
    assert np.all(np.abs(y - x.astype(np.float64) @ w.T) <= bound * (width + 1) * 2.0**-24)
    assert same(product(matrix, x, parts), y)
    for row in range(rows):
        assert same(product(matrix, x[row : row + 1]), y[row : row + 1])
    for count in range(2, rows):
        assert same(product(matrix, x[rows - count :], parts), y[rows - count :]), count


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_more_rows_and_inputs_than_a_block(kind: str) -> None:
    tensor = weights(kind, 70, 768, 7)
    matrix = packing.pack([tensor])
    x = np.random.default_rng(7).standard_normal((500, 768)).astype(np.float32)
    y = product(matrix, x)
    assert np.allclose(y, x.astype(np.float64) @ tensor.fp32().astype(np.float64).T, rtol=1e-4, atol=1e-3)
    for parts in (2, 3, 16, 64):
        assert same(product(matrix, x, parts), y), parts
    for first, count in ((0, 1), (3, 4), (11, 13), (100, 192), (100, 193), (499, 1)):
        assert same(product(matrix, x[first : first + count], 2), y[first : first + count]), (first, count)


@pytest.mark.parametrize("rows", [1, 3, 7, 50])
def test_a_product_is_one_ascending_chain_of_fused_multiply_adds(rows: int) -> None:
    """All products are multiples of 2^-14 below 2^29, so float64 adds them exactly and `chains` rounds once a step."""
    random = np.random.default_rng(rows)
    x = (random.integers(-1023, 1024, (rows, 224)) * 2.0 ** random.integers(-8, 8, (rows, 224))).astype(np.float32)
    w = (random.integers(-1023, 1024, (45, 224)) / 64).astype(np.float32)
    tensor = Tensor("test", "F32", w.shape, w.view(np.uint8).reshape(-1))
    assert same(product(packing.pack([tensor]), x, 2), chains(x, w))


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 200])
@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q8_0"])
def test_bias_and_residual_come_last_and_the_residual_may_be_the_result(kind: str, rows: int) -> None:
    tensor = weights(kind, 77, 416, 3)
    matrix = packing.pack([tensor])
    random = np.random.default_rng(rows)
    x = random.standard_normal((rows, 416)).astype(np.float32)
    bias = random.standard_normal(77).astype(np.float32)
    residual = random.standard_normal((rows, 77)).astype(np.float32)
    plain = product(matrix, x)
    assert same(product(matrix, x, 3, bias), plain + bias)
    assert same(product(matrix, x, 3, bias, residual), (plain + bias) + residual)
    y = residual.copy()
    assert same(product(matrix, x, 3, None, y, y), plain + residual)


@pytest.mark.parametrize("rows", [1, 9])
def test_only_the_outputs_that_exist_are_written(rows: int) -> None:
    """Strides wider than the rows; what lies between and behind must stay, also what is read must not go beyond."""
    matrix = packing.pack([weights("Q4_1", 45, 64, 1)])
    x = np.full((rows, 100), np.nan, np.float32)
    x[:, :64] = np.random.default_rng(1).standard_normal((rows, 64))
    room = np.full((rows, 60), np.float32(7))
    y = product(matrix, x, 2, y=room)
    assert np.all(room[:, 45:] == 7)
    assert same(np.ascontiguousarray(y[:, :45]), product(matrix, np.ascontiguousarray(x[:, :64])))


def test_stacked_weights_are_the_weights_one_after_the_other() -> None:
    parts = [weights("Q4_1", out, 64, out) for out in (20, 45, 3, 64)]
    stacked = packing.pack(parts)
    assert stacked.plan.runs == (packing.Run("Q4_1", 132),)
    assert same(packing.unpack(stacked), np.concatenate([part.fp32() for part in parts]))
    with pytest.raises(ValueError, match="64, 96"):
        packing.pack([parts[0], weights("Q4_1", 20, 96, 1)])


@given(kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=6), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_stacked_weights_of_several_formats_keep_theirs(kinds: list[str], seed: int) -> None:
    parts = [weights(kind, 1 + (seed + 37 * n) % 70, 256, n) for n, kind in enumerate(kinds)]
    stacked = packing.pack(parts)
    assert [run.format for run in stacked.plan.runs] == [
        name for name, _ in groupby(packing.FORMATS[kind] for kind in kinds)
    ]
    assert same(packing.unpack(stacked), np.concatenate([packing.unpack(packing.pack([part])) for part in parts]))


def test_reordered_rows_are_packed_in_their_order() -> None:
    tensor = weights("Q4_1", 64, 64, 5)
    order = np.random.default_rng(5).permutation(64)
    turned = Tensor("test", "Q4_1", (64, 64), tensor.blob, order)
    assert same(packing.unpack(packing.pack([turned])), turned.fp32())


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_of_any_ids_in_any_parts(kind: str) -> None:
    width = width_of(kind, 3, 0)
    tensor = weights(kind, 300, width, 9)
    table = packing.pack([tensor])
    ids = np.random.default_rng(9).integers(0, 300, 17).astype(np.int32)
    lib, at = library.library(), library.pointer
    y = np.full((17, width + 4), np.nan, np.float32)
    for part in range(4):
        lib.pd_embed_rows(table.c, at(ids, "int32_t *"), 17, at(y, "float *"), width + 4, part, 4)
    assert np.array_equal(y[:, :width], tensor.fp32()[ids])
    assert np.all(np.isnan(y[:, width:]))


def test_every_instruction_set_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for isa in library.supported():
        monkeypatch.setenv(library.ISA_VARIABLE, isa)
        x = np.random.default_rng(2).standard_normal((37, 768)).astype(np.float32)
        results.append([product(packing.pack([weights(kind, 77, 768, 2)]), x) for kind in KINDS])
    for other in results[1:]:
        assert all(same(a, b) for a, b in zip(results[0], other, strict=True))


def test_panels_begin_at_a_cache_line() -> None:
    for kind in KINDS:
        matrix = packing.pack([weights(kind, 33, 256, 1)])
        assert matrix.data.ctypes.data % 64 == 0
        assert matrix.data.nbytes == 2 * packing.panel_bytes(packing.FORMATS[kind], 256)
