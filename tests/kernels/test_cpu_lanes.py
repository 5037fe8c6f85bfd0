"""The 16-lane machine does what its header says, to the bit, on each instruction set that this CPU has."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels.cpu import build, library

Floats = NDArray[np.float32]
ODD = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 2.0**-126, 0.5, 1.5, 2.5, -2.5, 65504.0, 65520.0, -6e-8]


@pytest.fixture(scope="module", params=library.supported())
def lanes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """lanes_trial.c, compiled as the library is."""
    built = tmp_path_factory.mktemp("lanes") / "trial.so"
    flags = [*build.COMMON, "-shared", *build.EXACT, *build.FLAGS[request.param], f"-I{build.SOURCES}"]
    source = Path(__file__).with_name("lanes_trial.c")
    subprocess.run([*build.compiler(), *flags, "-o", str(built), str(source)], check=True)
    loaded = ctypes.CDLL(str(built))
    loaded.sum.restype = loaded.top.restype = ctypes.c_float
    loaded.first.restype = loaded.less.restype = ctypes.c_uint32
    return loaded


def at(array: NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def same(a: Floats, b: Floats) -> bool:
    """Equal bits; any NaN is like another."""
    nan = np.isnan(a)
    return bool(np.array_equal(nan, np.isnan(b)) and np.array_equal(a.view("u4")[~nan], b.view("u4")[~nan]))


def each(lanes: ctypes.CDLL, operation: int, a: Floats, b: Floats, c: Floats) -> Floats:
    out = np.empty(16, np.float32)
    lanes.by_lane(operation, at(a), at(b), at(c), at(out))
    return out


def floats(*kinds: st.SearchStrategy[float]) -> st.SearchStrategy[Floats]:
    return st.lists(st.one_of(*kinds), min_size=16, max_size=16).map(lambda values: np.array(values, np.float32))


anything = floats(st.sampled_from(ODD), st.floats(width=32), st.floats(-100, 100, width=32))
moderate = floats(st.floats(-1e6, 1e6, width=32))
short = floats(st.builds(lambda whole, power: whole * 2.0**power, st.integers(-1023, 1023), st.integers(-12, 8)))
"""Ten bits: a product and a sum of products are exact in float64."""

OPERATIONS: list[Callable[[Floats, Floats, Floats], Floats]] = [
    lambda x, y, z: x + y,
    lambda x, y, z: x - y,
    lambda x, y, z: x * y,
    lambda x, y, z: x / y,
    lambda x, y, z: np.where(x > y, x, y),
    lambda x, y, z: np.where(x < y, x, y),
    lambda x, y, z: np.sqrt(x),
]
SELECTIONS: list[Callable[[Floats, Floats], NDArray[np.bool_]]] = [np.less, np.less_equal, np.equal]


@given(x=anything, y=anything, z=anything)
def test_arithmetic_is_ieee(lanes: ctypes.CDLL, x: Floats, y: Floats, z: Floats) -> None:
    with np.errstate(all="ignore"):
        for number, operation in enumerate(OPERATIONS):
            assert same(each(lanes, number, x, y, z), operation(x, y, z)), number
        assert same(each(lanes, 9, x, y, z), np.rint(x))
        for number, condition in enumerate(SELECTIONS, 10):
            assert same(each(lanes, number, x, y, z), np.where(condition(x, y), x, z)), number
        assert lanes.less(at(x), at(y)) == sum(1 << i for i in range(16) if x[i] < y[i])


@given(x=short, y=short, z=short)
def test_multiply_and_add_round_once(lanes: ctypes.CDLL, x: Floats, y: Floats, z: Floats) -> None:
    product = x.astype(np.float64) * y
    assert same(each(lanes, 7, x, y, z) + np.float32(0), (product + z).astype(np.float32) + np.float32(0))
    assert same(each(lanes, 8, x, y, z) + np.float32(0), (z - product).astype(np.float32) + np.float32(0))


def test_multiply_and_add_is_not_two_roundings(lanes: ctypes.CDLL) -> None:
    x = np.full(16, 1 + 2.0**-12, np.float32)
    z = np.full(16, -1 - 2.0**-11, np.float32)
    assert np.all(each(lanes, 7, x, x, z) == np.float32(2.0**-24))


@given(x=moderate)
def test_sums_over_lanes_have_one_tree(lanes: ctypes.CDLL, x: Floats) -> None:
    tree = x
    while len(tree) > 1:
        tree = tree[: len(tree) // 2] + tree[len(tree) // 2 :]
    assert lanes.sum(at(x)) == tree[0]
    assert lanes.top(at(x)) == x.max()


@given(x=anything, n=st.integers(0, 16))
def test_parts_touch_only_their_lanes(lanes: ctypes.CDLL, x: Floats, n: int) -> None:
    room = np.full(32, 7, np.float32)
    loaded = np.empty(16, np.float32)
    ends = np.concatenate([np.empty(0, np.float32), x[:n]])
    lanes.part(at(ends), n, at(loaded), at(room))
    assert same(loaded, np.where(np.arange(16) < n, x, np.float32(0)))
    assert same(room[:n], x[:n])
    assert np.all(room[n:] == 7)


def test_the_first_lanes(lanes: ctypes.CDLL) -> None:
    for n in range(-3, 20):
        assert lanes.first(n) == (1 << min(max(n, 0), 16)) - 1


def test_powers_of_two(lanes: ctypes.CDLL) -> None:
    out = np.empty(16, np.float32)
    for start in range(-126, 113):
        n = np.arange(start, start + 16).clip(-126, 127).astype(np.float32)
        lanes.powers_of_two(at(n), at(out))
        assert np.array_equal(out, np.exp2(n.astype(np.float64)))


def test_every_half_float_widens_exactly(lanes: ctypes.CDLL) -> None:
    wide, wide_b = np.empty(16, np.float32), np.empty(16, np.float32)
    one, one_b, back = np.empty(16, np.float32), np.empty(16, np.float32), np.empty(16, np.uint16)
    for start in range(0, 1 << 16, 16):
        bits = np.arange(start, start + 16).astype(np.uint16)
        lanes.from_f16(at(bits), at(wide))
        lanes.from_bf16(at(bits), at(wide_b))
        lanes.single_halfs(at(bits), at(one), at(one_b), at(back))
        with np.errstate(invalid="ignore"):
            assert same(wide, bits.view(np.float16).astype(np.float32)), start
        assert same(wide_b, (bits.astype(np.uint32) << 16).view(np.float32)), start
        assert same(one, wide), start
        assert same(one_b, wide_b), start
        assert np.array_equal(back[~np.isnan(one)], bits[~np.isnan(one)]), start


@given(x=anything)
def test_rounding_to_half_floats_is_to_the_nearest_even(lanes: ctypes.CDLL, x: Floats) -> None:
    half, brain = np.empty(16, np.uint16), np.empty(16, np.uint16)
    lanes.to_f16(at(x), at(half))
    lanes.to_bf16(at(x), at(brain))
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    nan = np.isnan(x)
    assert np.array_equal(half[~nan], expected.view(np.uint16)[~nan])
    assert np.all(np.isnan(half.view(np.float16)[nan]))
    bits = x.view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    assert np.array_equal(brain[~nan], nearest[~nan].astype(np.uint16))
    assert np.all(np.isnan((brain.astype(np.uint32) << 16).view(np.float32)[nan]))


def test_small_numbers_become_floats(lanes: ctypes.CDLL) -> None:
    out = np.empty(16, np.float32)
    for start in range(-128, 128, 16):
        numbers = np.arange(start, start + 16).astype(np.int8)
        lanes.from_i8(at(numbers), at(out))
        assert np.array_equal(out, numbers)
    both = np.empty((2, 16), np.float32)
    for start in range(0, 256, 16):
        codes = np.arange(start, start + 16).astype(np.uint8)
        lanes.from_e4m3(at(codes), at(both))
        expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
        assert same(both[0], expected)
        assert same(both[1], expected)
    words = np.random.default_rng(1).integers(0, 1 << 32, 16, dtype=np.uint32)
    eight = np.empty((8, 16), np.float32)
    lanes.nibbles(at(words), at(eight))
    assert np.array_equal(eight, [(words >> 4 * i) & 15 for i in range(8)])
