"""The sampler against plain float64 references, written for reading and not for speed."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kernels.reference.sampler import chosen, largest, sample
from kernels.sampling import Drawn, uniform
from shared.messages.engine import SampleSpec

NEAR = 1e-9
"""Two cuts this close may fall either way in floating point; the references refuse to judge them."""

logit = st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, 1.0, -1.0, 1.5]))
rows = st.lists(logit, min_size=1, max_size=40)


def as_row(values: list[float]) -> np.ndarray:
    return np.array(values, np.float32)


def reference_probabilities(logits: np.ndarray, spec: SampleSpec) -> dict[int, float]:
    """Unnormalised probability of each id that may be drawn, in the documented order of steps."""
    scores = [float(x) for x in logits]
    for token, addend in spec.bias:
        scores[token] += addend
    top = max(scores)
    left = {i: math.exp((s - top) / spec.temperature) for i, s in enumerate(scores)}
    ranked = sorted(left, key=lambda i: (-scores[i], i))
    if spec.top_k:
        left = {i: left[i] for i in ranked[: spec.top_k]}
    if spec.top_p < 1.0:
        ranked = [i for i in ranked if i in left]
        whole, reached, kept = math.fsum(left.values()), 0.0, []
        for i in ranked:
            kept.append(i)
            reached += left[i]
            assume(abs(reached - spec.top_p * whole) > NEAR * whole)
            if reached >= spec.top_p * whole:
                break
        left = {i: left[i] for i in kept}
    if spec.min_p:
        bound = spec.min_p * max(left.values())
        assume(all(abs(weight - bound) > NEAR * bound or weight == bound for weight in left.values()))
        left = {i: weight for i, weight in left.items() if weight >= bound}
    return left


def reference_draw(logits: np.ndarray, spec: SampleSpec, position: int) -> int:
    left = reference_probabilities(logits, spec)
    whole = math.fsum(left.values())
    point = uniform(spec.seed, spec.choice, position) * whole
    reached = 0.0
    for i in sorted(left):
        reached += left[i]
        assume(abs(reached - point) > NEAR * whole)
        if reached > point:
            return i
    raise AssertionError("the edges do not cover the unit interval")


@given(
    rows,
    st.floats(0.05, 5),
    st.integers(0, 45),
    st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    st.one_of(st.just(0.0), st.floats(0.01, 1.0)),
    st.integers(0, 2**64 - 1),
    st.integers(0, 5000),
    st.lists(st.tuples(st.integers(0, 39), st.floats(-20, 20)), max_size=3),
)
def test_draws_as_the_reference_does(
    values: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
    bias: list[tuple[int, float]],
) -> None:
    bias = [(token, addend) for token, addend in bias if token < len(values)]
    spec = SampleSpec(temperature, top_k, top_p, min_p, seed, bias=tuple(bias))
    row = as_row(values)
    if bias:  # float32 inputs can tie after a float64 sum in one order only; judge clear cases
        scores = sorted(float(row[i]) + sum(a for t, a in bias if t == i) for i in range(len(row)))
        assume(all(b - a > NEAR or b == a for a, b in itertools.pairwise(scores)))
    assert sample(row, spec, position).token == reference_draw(row, spec, position)


@given(rows, st.lists(st.tuples(st.integers(0, 39), st.floats(-20, 20)), max_size=3))
def test_greedy_is_the_argmax_of_the_biased_logits_ties_to_the_lower_id(
    values: list[float], bias: list[tuple[int, float]]
) -> None:
    bias = [(token, addend) for token, addend in bias if token < len(values)]
    scores = [float(x) for x in as_row(values)]
    for token, addend in bias:
        scores[token] += addend
    spec = SampleSpec(temperature=0.0, top_k=3, top_p=0.5, bias=tuple(bias))
    assert sample(as_row(values), spec, 9).token == scores.index(max(scores))


@given(rows, st.integers(0, 45), st.data())
def test_logprobs_are_the_log_softmax_of_the_raw_logits(values: list[float], n: int, data: st.DataObject) -> None:
    row = as_row(values)
    token = data.draw(st.integers(0, len(values) - 1))
    exact = [float(x) for x in row]
    whole = math.log(math.fsum(math.exp(x - max(exact)) for x in exact)) + max(exact)
    found = chosen(row, token, n)
    assert found.logprob == pytest.approx(exact[token] - whole, abs=1e-9)
    ranked = sorted(range(len(exact)), key=lambda i: (-exact[i], i))[:n]
    assert [id for id, _ in found.top] == ranked
    assert [value for _, value in found.top] == pytest.approx([exact[i] - whole for i in ranked], abs=1e-9)


def test_logprobs_ignore_bias_temperature_and_filters() -> None:
    row = as_row([0.0, 2.0, 1.0])
    plain = sample(row, SampleSpec(logprobs=3), 1)
    assert plain.token == 1
    moved = sample(row, SampleSpec(temperature=0.7, top_k=1, logprobs=3, bias=((0, 50.0),)), 1)
    assert moved.token == 0
    assert moved.top == plain.top
    assert [id for id, _ in moved.top] == [1, 2, 0]
    assert (moved.token, moved.logprob) == plain.top[2]
    assert sample(row, SampleSpec(), 1) == Drawn(plain.token)
    alone = sample(row, SampleSpec(logprobs=0), 1)
    assert (alone.top, alone.logprob) == ((), plain.logprob)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=50), st.integers(0, 60))
def test_the_largest_values_come_in_order_and_ties_go_to_the_lower_id(values: list[float], n: int) -> None:
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))[:n]
    assert largest(np.array(values), n).tolist() == ranked


@given(rows, st.floats(1e-300, 1e-3), st.integers(0, 100))
def test_a_tiny_temperature_draws_one_of_the_best(values: list[float], temperature: float, position: int) -> None:
    row = as_row(values)
    token = sample(row, SampleSpec(temperature=temperature), position).token
    behind = float(row.max()) - float(row[token])
    assert behind <= 750 * temperature  # e^-750 is nothing in float64


@given(rows, st.integers(0, 1000))
def test_top_k_of_one_and_the_smallest_top_p_are_greedy(values: list[float], position: int) -> None:
    row = as_row(values)
    best = int(row.argmax())
    assert sample(row, SampleSpec(temperature=1.0, top_k=1), position).token == best
    assert sample(row, SampleSpec(temperature=1.0, top_p=1e-12), position).token == best
    assert sample(row, SampleSpec(temperature=1.0, min_p=1.0, top_k=1), position).token == best


def test_a_nucleus_wider_than_the_first_guess_is_found_whole() -> None:
    row = np.zeros(5000, np.float32)
    spec = SampleSpec(temperature=1.0, top_p=0.5)
    drawn = {sample(row, spec, position).token for position in range(4000)}
    assert max(drawn) < 2500  # ties to the lower id: exactly the lower half may be drawn
    assert len(drawn) > 1500


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", [SampleSpec(), SampleSpec(temperature=1.0, top_k=2)])
def test_logits_that_are_not_finite_end_the_row(bad: float, spec: SampleSpec) -> None:
    for place in range(3):
        row = as_row([0.0, 1.0, 2.0])
        row[place] = bad
        drawn = sample(row, spec, 5)
        assert (drawn.token, drawn.error) == (-1, "the model's logits are not finite")


def test_a_bias_that_names_no_token_or_leaves_none_ends_the_row() -> None:
    row = as_row([0.0, 1.0])
    for token in (2, -1):
        drawn = sample(row, SampleSpec(bias=((token, 1.0),)), 5)
        assert drawn.token == -1
        assert drawn.error == f"logit bias names token {token}; the vocabulary has 2"
    for addend in (math.nan, math.inf):
        assert sample(row, SampleSpec(temperature=1.0, bias=((0, addend),)), 5).error is not None


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    n = sum(counts)
    return sum((seen - n * p) ** 2 / (n * p) for seen, p in zip(counts, probabilities, strict=True))


@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
def test_draws_follow_the_distribution_along_every_key(axis: str) -> None:
    """Fixed seeds, so it either always passes or never; 26.1 is chi-square's 99.9 % quantile at 8 degrees."""
    row = as_row([0.3, -1.0, 2.0, 0.0, 1.1, -0.4, 0.9, 1.7, -2.0])
    weights = np.exp(row.astype(np.float64) / 0.8)
    counts: Counter[int] = Counter()
    for i in range(20_000):
        spec = SampleSpec(0.8, seed=i if axis == "seed" else 11, choice=i if axis == "choice" else 0)
        counts[sample(row, spec, i if axis == "position" else 77).token] += 1
    assert chi_square([counts[i] for i in range(9)], (weights / weights.sum()).tolist()) < 26.1


def test_uniforms_are_uniform_and_independent_of_their_neighbours() -> None:
    draws = np.array([[uniform(seed, 0, position) for position in range(200)] for seed in range(100)])
    counts = np.histogram(draws, bins=16, range=(0, 1))[0]
    assert chi_square(counts.tolist(), [1 / 16] * 16) < 37.7  # 99.9 % at 15 degrees
    along = np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]
    across = np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]
    assert abs(along) < 0.03
    assert abs(across) < 0.03


def test_the_generator_never_changes() -> None:
    """A journaled seed must go on as it began after an upgrade; these values are part of the format."""
    assert uniform(0, 0, 0) == 0.607076503645935
    assert uniform(2**64 - 1, 3, 4096) == uniform(-1, 3, 4096) == 0.5921526156366881
