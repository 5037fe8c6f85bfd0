"""The kernels' exp: near the truth, and the same bits by vector, by tail and one by one, on each instruction set."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels.cpu import library

Floats = NDArray[np.float32]

LEAST, GREATEST = np.float32(-87.3365), np.float32(88.376)
"""Ends of the range where the result is a normal float by the polynomial, as exact_exp.h says."""
VANISHES = np.float32(-87.68313)
"""From here down it is 0, above it a subnormal float at least."""


@pytest.fixture(params=library.supported())
def cpu(request: pytest.FixtureRequest) -> Any:
    return library.load(request.param)


def exp(function: Any, x: Floats) -> Floats:
    y = np.full(len(x), np.nan, dtype=np.float32)
    function(library.pointer(x, "float *"), library.pointer(y, "float *"), len(x))
    return y


def bits(x: Floats) -> NDArray[np.uint32]:
    return x.view(np.uint32)


def floats_between(sign: int, greatest: np.float32, stride: int) -> Floats:
    """Every stride-th float from +-0 to the one of that magnitude, it too."""
    end = int(np.abs(greatest).view(np.uint32))
    found = np.append(np.arange(0, end, stride, dtype=np.uint32), np.uint32(end))
    return (found | np.uint32(sign << 31)).view(np.float32)


@pytest.mark.parametrize(("sign", "greatest"), [(0, GREATEST), (1, LEAST)])
def test_error_is_below_nine_tenths_of_a_unit_in_the_last_place(cpu: Any, sign: int, greatest: np.float32) -> None:
    x = floats_between(sign, greatest, 997)
    exact = np.exp(x.astype(np.float64))
    unit = np.exp2(np.frexp(exact)[1] - 24.0)
    error = np.abs(exp(cpu.pd_exp_vector, x) - exact) / unit
    assert error.max() < 0.9, f"{error.max()} units at {x[error.argmax()].hex()}"


def test_hardest_arguments_halfway_between_powers_of_two(cpu: Any) -> None:
    """There the reduced argument is greatest, and the nearest whole number may be taken from either side."""
    middles = ((np.arange(-125, 127) + 0.5) * np.log(2)).astype(np.float32)
    x = (middles.view(np.int32)[:, None] + np.arange(-50, 50, dtype=np.int32)).reshape(-1).view(np.float32)
    exact = np.exp(x.astype(np.float64))
    error = np.abs(exp(cpu.pd_exp_vector, x) - exact) / np.exp2(np.frexp(exact)[1] - 24.0)
    assert error.max() < 0.9


def test_ends_and_special_values_follow_the_stated_rule(cpu: Any) -> None:
    inf = np.float32(np.inf)
    x = np.array([0.0, -0.0, VANISHES, -88, -1e30, -inf, 88.3763, 1e30, inf], dtype=np.float32)
    for function in (cpu.pd_exp_vector, cpu.pd_exp_each):
        assert exp(function, x).tolist() == [1, 1, 0, 0, 0, 0, inf, inf, inf]
    assert exp(cpu.pd_exp_vector_falling, x[:6]).tolist() == [1, 1, 0, 0, 0, 0]
    assert np.isfinite(exp(cpu.pd_exp_vector, np.array([GREATEST])))
    payloads = np.array([0x7FC00000, 0xFFC00000, 0x7FC00001, 0x7F800001, 0x7FFFFFFF], dtype=np.uint32)
    for function in (cpu.pd_exp_vector, cpu.pd_exp_vector_falling, cpu.pd_exp_each):
        assert np.isnan(exp(function, payloads.view(np.float32))).all()


def test_subnormal_results_are_rounded_not_flushed(cpu: Any) -> None:
    x = -floats_between(0, -VANISHES, 13)
    x = x[(x < LEAST) & (x > VANISHES)]
    result, exact = exp(cpu.pd_exp_vector, x), np.exp(x.astype(np.float64))
    assert ((result > 0) & (result < np.finfo(np.float32).tiny)).mean() > 0.99
    assert (np.abs(result - exact) <= np.finfo(np.float32).smallest_subnormal).all()


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=40))
def test_vector_tail_and_single_floats_are_the_same_bits(values: list[float]) -> None:
    x = np.array(values, dtype=np.float32)
    results = []
    for isa in library.supported():
        cpu = library.load(isa)
        results += [bits(exp(cpu.pd_exp_vector, x)), bits(exp(cpu.pd_exp_each, x))]
        falling = np.minimum(x, np.float32(0))
        assert (bits(exp(cpu.pd_exp_vector_falling, falling)) == bits(exp(cpu.pd_exp_each, falling))).all()
    for other in results[1:]:
        assert (other == results[0]).all()
