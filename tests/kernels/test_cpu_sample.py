"""Sampling in C against kernels/reference/sampler.py, which defines it, and against itself in other company."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels.cpu import library
from kernels.cpu.library import pointer
from kernels.reference.sampler import chosen, sample
from kernels.sampling import uniform
from shared.messages.engine import SampleSpec

pytestmark = pytest.mark.skipif(not library.supported(), reason="this CPU has none of the instruction sets")

LIBRARIES = tuple(library.load(isa) for isa in library.supported())
NEAR = 1e-9
"""Two cuts this close may fall either way: the definition sums doubles, the kernel multiples of 2^-44."""

LOGITS_NOT_FINITE, BIAS_OUT_OF_VOCABULARY, BIAS_NOT_FINITE, FORCED_OUT_OF_VOCABULARY = -1, -2, -3, -4

logit = st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5]))
rows_of_logits = st.lists(logit, min_size=1, max_size=70)


GREEDY = SampleSpec()


@dataclass
class Drawn:
    token: int
    logprob: float
    top_ids: list[int]
    top: list[float]


@dataclass(frozen=True)
class Asked:
    """What one row asks for. `forced`: -1 or a token whose log-probability alone is wanted."""

    spec: SampleSpec = GREEDY
    position: int = 0
    forced: int = -1
    point: float | None = None

    def uniform(self) -> float:
        """The random number, by the definition unless `point` says it."""
        return uniform(self.spec.seed, self.spec.choice, self.position) if self.point is None else self.point


def drawn_by(cpu: Any, logits: NDArray[np.float32], asked: Sequence[Asked], parts: int = 1) -> list[Drawn]:
    """Rows [n, vocab] of logits through `pd_sample`."""
    ffi = library.declarations()
    rows, vocab = logits.shape
    sampling = ffi.new("pd_sampling[]", rows)
    kept: list[Any] = []
    for entry, one in zip(sampling, asked, strict=True):
        spec = one.spec
        entry.temperature, entry.top_p, entry.min_p, entry.top_k = spec.temperature, spec.top_p, spec.min_p, spec.top_k
        entry.point = one.uniform()
        entry.forced, entry.alternatives, entry.biases = one.forced, spec.logprobs, len(spec.bias)
        kept += [ffi.new("int32_t[]", [i for i, _ in spec.bias]), ffi.new("double[]", [a for _, a in spec.bias])]
        entry.bias_ids, entry.bias = kept[-2], kept[-1]
    width = max(0, *(one.spec.logprobs for one in asked))
    drawn = ffi.new("pd_drawn[]", rows)
    top_ids, top = np.full((rows, width), -7, np.int32), np.full((rows, width), np.nan)
    scratch = np.full((cpu.pd_sample_scratch(vocab),), 0xFF, np.uint8)
    for part in range(parts):
        cpu.pd_sample(
            pointer(logits, "float *"), vocab, rows, vocab, sampling, drawn,
            pointer(top_ids, "int32_t *"), pointer(top, "double *"), width, pointer(scratch, "void *"), part, parts,
        )  # fmt: skip
    counts = [min(max(one.spec.logprobs, 0), vocab) if d.token >= 0 else 0 for one, d in zip(asked, drawn, strict=True)]
    assert all((top_ids[row, n:] == -7).all() for row, n in enumerate(counts)), "written beyond what was asked for"
    return [
        Drawn(d.token, d.logprob, top_ids[row, :n].tolist(), top[row, :n].tolist())
        for row, (d, n) in enumerate(zip(drawn, counts, strict=True))
    ]


def one_drawn(values: Sequence[float], asked: Asked) -> Drawn:
    """One row, the same on every instruction set."""
    row = np.array([values], np.float32)
    found = [drawn_by(cpu, row, [asked])[0] for cpu in LIBRARIES]
    assert all(each == found[0] for each in found)
    return found[0]


specs = st.builds(
    SampleSpec,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 75),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 1.0)),
    seed=st.integers(0, 2**64 - 1),
    bias=st.lists(st.tuples(st.integers(0, 69), st.floats(-20, 20)), max_size=3).map(tuple),
)


def judged(values: Sequence[float], spec: SampleSpec, position: int) -> SampleSpec:
    """The spec with the biases that the row has; rejects rows where rounding alone decides who is drawn."""
    row = np.array(values, np.float32).astype(np.float64)
    bias = tuple((token, addend) for token, addend in spec.bias if token < len(row))
    for token, addend in bias:
        row[token] += addend
    weights = np.exp((row - row.max()) / spec.temperature)
    ranked = np.argsort(-row, kind="stable")[: spec.top_k or None]
    if spec.top_p < 1.0:
        bound = spec.top_p * weights[ranked].sum()
        reached = np.cumsum(weights[ranked])
        assume((abs(reached - bound) > NEAR * bound).all())
        ranked = ranked[: 1 + (reached < bound).sum()]
    assume(((abs(weights[ranked] - spec.min_p) > NEAR) | (weights[ranked] == spec.min_p)).all())
    edges = np.cumsum(weights[np.sort(ranked[weights[ranked] >= spec.min_p])])
    point = uniform(spec.seed, spec.choice, position) * edges[-1]
    assume((abs(edges - point) > NEAR * edges[-1]).all())
    return SampleSpec(spec.temperature, spec.top_k, spec.top_p, spec.min_p, spec.seed, bias=bias)


@given(rows_of_logits, specs, st.integers(0, 5000))
def test_draws_as_the_definition_does(values: list[float], spec: SampleSpec, position: int) -> None:
    spec = judged(values, spec, position)
    expected = sample(np.array(values, np.float32), spec, position).token
    assert one_drawn(values, Asked(spec, position)).token == expected


@given(st.integers(0, 2**32), st.sampled_from([1.0, 4.0, 30.0]), specs, st.integers(0, 5000))
def test_draws_as_the_definition_does_from_a_real_vocabulary(
    seed: int, spread: float, spec: SampleSpec, position: int
) -> None:
    """Nuclei of one token to thousands, chunks and partial selections; ties by rounding to eighths."""
    random = np.random.default_rng(seed)
    row = np.round(random.standard_normal(3000) * spread * 8).astype(np.float32) / 8
    spec = judged(row.tolist(), spec, position)
    assert one_drawn(row.tolist(), Asked(spec, position)).token == sample(row, spec, position).token


@given(rows_of_logits, st.lists(st.tuples(st.integers(0, 69), st.floats(-20, 20)), max_size=3))
def test_greedy_is_the_argmax_of_the_biased_logits_ties_to_the_lower_id(
    values: list[float], bias: list[tuple[int, float]]
) -> None:
    spec = SampleSpec(top_k=3, top_p=0.5, bias=tuple((token, addend) for token, addend in bias if token < len(values)))
    assert one_drawn(values, Asked(spec)).token == sample(np.array(values, np.float32), spec, 0).token


@given(rows_of_logits, st.integers(0, 75), st.data())
def test_logprobs_and_alternatives(values: list[float], alternatives: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(values) - 1))
    expected = chosen(np.array(values, np.float32), token, alternatives)
    found = one_drawn(values, Asked(SampleSpec(logprobs=alternatives), forced=token))
    assert found.token == token
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-13)
    assert found.top_ids == [id for id, _ in expected.top]
    assert found.top == pytest.approx([value for _, value in expected.top], abs=1e-13)


@given(st.integers(0, 2**32), st.sampled_from([0.01, 1.0, 10.0, 1e30]))
def test_logprobs_of_a_real_vocabulary_sum_to_one(seed: int, spread: float) -> None:
    row = (np.random.default_rng(seed).standard_normal(1003) * spread).astype(np.float32)
    found = one_drawn(row.tolist(), Asked(SampleSpec(logprobs=1003)))
    assert math.fsum(math.exp(x) for x in found.top) == pytest.approx(1.0, abs=1e-13)
    assert found.logprob == found.top[0]


@given(st.integers(2, 9), st.integers(1, 4), st.integers(0, 2**32), st.data())
def test_a_row_is_drawn_alike_alone_and_in_any_company(rows: int, parts: int, seed: int, data: st.DataObject) -> None:
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((rows, 300)) * 3).astype(np.float32)
    asked = [
        Asked(data.draw(specs), position=row, forced=data.draw(st.sampled_from([-1, -1, 299]))) for row in range(rows)
    ]
    for cpu in LIBRARIES:
        together = drawn_by(cpu, logits, asked, parts)
        alone = [drawn_by(cpu, logits[row : row + 1], asked[row : row + 1])[0] for row in range(rows)]
        assert together == alone


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_no_token_and_harms_no_other(bad: float) -> None:
    for place, cpu in itertools.product((0, 5, 39), LIBRARIES):
        logits = np.arange(80, dtype=np.float32).reshape(2, 40)
        logits[0, place] = bad
        for spec in (SampleSpec(), SampleSpec(temperature=1.0, logprobs=2)):
            ill, well = drawn_by(cpu, logits, [Asked(spec), Asked(SampleSpec())])
            assert (ill.token, well.token) == (LOGITS_NOT_FINITE, 39)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_bias_or_a_forced_token_can_get_wrong(temperature: float) -> None:
    for token in (2, -1):
        spec = SampleSpec(temperature=temperature, bias=((token, 1.0),))
        assert one_drawn([0.0, 1.0], Asked(spec)).token == BIAS_OUT_OF_VOCABULARY
    for addend in (math.nan, math.inf):
        spec = SampleSpec(temperature=temperature, bias=((0, addend),))
        assert one_drawn([0.0, 1.0], Asked(spec)).token == BIAS_NOT_FINITE
    nobody = SampleSpec(temperature=temperature, bias=((0, -math.inf), (1, -math.inf)))
    assert one_drawn([0.0, 1.0], Asked(nobody)).token == BIAS_NOT_FINITE
    banned = SampleSpec(temperature=temperature, bias=((1, -math.inf),))
    assert one_drawn([0.0, 1.0], Asked(banned)).token == 0
    assert one_drawn([0.0, 1.0], Asked(forced=2)).token == FORCED_OUT_OF_VOCABULARY


@given(rows_of_logits, st.floats(1e-300, 1e-3), st.integers(0, 100))
def test_a_tiny_temperature_draws_one_of_the_best(values: list[float], temperature: float, position: int) -> None:
    row = np.array(values, np.float32)
    token = one_drawn(values, Asked(SampleSpec(temperature=temperature), position)).token
    assert float(row.max()) - float(row[token]) <= 32 * temperature  # e^-32 is less than 2^-45


def test_a_nucleus_of_equal_scores_takes_the_lower_ids() -> None:
    zeros, spec = [0.0] * 5000, SampleSpec(temperature=1.0, top_p=0.5)
    drawn = {one_drawn(zeros, Asked(spec, position)).token for position in range(1000)}
    assert max(drawn) < 2500
    assert len(drawn) > 700


@pytest.mark.parametrize(("point", "token"), [(0.0, 300), (0.5 - 2**-53, 300), (0.5, 700), (1.0 - 2**-53, 700)])
@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.5}])
def test_the_ends_of_the_unit_interval_draw_ids_that_have_a_weight(
    point: float, token: int, filters: dict[str, Any]
) -> None:
    """Two equal tokens among a thousand that are filtered out."""
    logits = [0.0] * 1000
    logits[300] = logits[700] = 20.0
    assert one_drawn(logits, Asked(SampleSpec(temperature=1.0, **filters), point=point)).token == token


def test_draws_follow_the_distribution() -> None:
    """Fixed seeds, so it either always passes or never; 26.1 is chi-square's 99.9 % quantile at 8 degrees."""
    logits = np.array([0.3, -1.0, 2.0, 0.0, 1.1, -0.4, 0.9, 1.7, -2.0], np.float32)
    rows = 20_000
    asked = [Asked(SampleSpec(temperature=0.8), position) for position in range(rows)]
    drawn = drawn_by(LIBRARIES[0], np.tile(logits, (rows, 1)), asked)
    counts = np.bincount([d.token for d in drawn], minlength=len(logits))
    weights = np.exp(logits.astype(np.float64) / 0.8)
    expected = rows * weights / weights.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 26.1


def test_a_crew_draws_as_one_thread_does_and_refuses_sizes_that_cannot_be() -> None:
    ffi, cpu = library.declarations(), LIBRARIES[-1]
    logits = np.random.default_rng(3).standard_normal((7, 500)).astype(np.float32)
    asked = [Asked(SampleSpec(temperature=1.0), position) for position in range(7)]
    alone = [d.token for d in drawn_by(cpu, logits, asked)]
    sampling, drawn = ffi.new("pd_sampling[]", 7), ffi.new("pd_drawn[]", 7)
    for entry, one in zip(sampling, asked, strict=True):
        entry.temperature, entry.top_p, entry.point = 1.0, 1.0, one.uniform()
        entry.forced = entry.alternatives = -1
    opened = ffi.new("pd_crew **")
    for threads in (1, 2, 3):
        assert cpu.pd_crew_open(threads, opened) == 0
        scratch = np.empty(threads * cpu.pd_sample_scratch(500), np.uint8)

        def call(rows: int, vocab: int, scratch: Any = scratch) -> int:
            tops = (ffi.NULL, ffi.NULL, 0)
            pointers = (pointer(logits, "float *"), 500, rows, vocab, sampling, drawn, *tops)
            return int(cpu.pd_crew_sample(opened[0], *pointers, pointer(scratch, "void *")))

        assert call(7, 500) == 0
        assert [d.token for d in drawn] == alone
        assert {call(-1, 500), call(7, 0), call(7, 501), call(7, 1 << 19)} == {-5}
        cpu.pd_crew_close(opened[0])
