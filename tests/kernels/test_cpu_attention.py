"""The CPU library's attention: near float64, and one and the same bits however a sequence is computed."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import library
from tests.kernels.attention_case import Call, Chunk, Floats, Shape, Tokens, attend, defined

BORDERS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 575, 576, 577, 1023, 1024, 1025)
"""Lengths at the ends of strips, tiles, blocks and partials, and one to each side."""


@pytest.fixture(params=library.supported())
def cpu(request: pytest.FixtureRequest) -> Any:
    return library.load(request.param)


def same_bits(a: Floats, b: Floats) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 16),
    dim=st.sampled_from([16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 256]),
    dtype=st.sampled_from(["fp16", "bf16", "fp32"]),
    block_tokens=st.sampled_from([16, 32, 64, 128]),
    scale=st.sampled_from([0.125, 0.0883883, 1.0]),
)
lengths = st.one_of(st.integers(1, 200), st.sampled_from(BORDERS))


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(start, end) of a few sequences; seldom more than forty new tokens, the oracle being slow."""
    spans = []
    for _ in range(draw(st.integers(1, 4))):
        end = draw(lengths)
        count = draw(st.one_of(st.just(1), st.integers(1, min(40, end))))
        spans.append((end - min(count, end), end))
    return spans


@settings(deadline=None, max_examples=60)
@given(shapes, steps(), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_near_the_definition_whatever_the_shape(
    shape: Shape, spans: list[tuple[int, int]], parts: int, seed: int
) -> None:
    chunks = [Chunk(Tokens.random(shape, end, seed + i), start, end) for i, (start, end) in enumerate(spans)]
    wanted = np.concatenate([defined(shape, chunk) for chunk in chunks])
    results = [attend(library.load(isa), shape, chunks, parts, seed) for isa in library.supported()]
    for result in results:
        np.testing.assert_allclose(result, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max() + 1e-6)
        assert same_bits(result, results[0]), "instruction sets differ"


@st.composite
def chunkings(draw: st.DrawFn, length: int) -> list[int]:
    """Ends of chunks that cover [0, length): single tokens, small ones, borders, anything."""
    ends: list[int] = []
    while not ends or ends[-1] < length:
        done = ends[-1] if ends else 0
        size = draw(st.one_of(st.integers(1, 6), st.integers(1, length), st.sampled_from(BORDERS)))
        ends.append(min(done + size, length))
        if len(ends) == 8 and ends[-1] < length:
            ends.append(length)
    return ends


@settings(deadline=None, max_examples=40)
@given(st.data(), shapes, st.integers(1, 1100), st.integers(0, 2**32 - 1))
def test_any_chunks_parts_and_block_lengths_give_the_same_bits(
    data: st.DataObject, shape: Shape, length: int, seed: int
) -> None:
    shape = replace(shape, kv_heads=min(shape.kv_heads, 2), group=min(shape.group, 6), dim=min(shape.dim, 128))
    cpu, sequence = library.library(), Tokens.random(shape, length, seed)
    whole = attend(cpu, shape, [Chunk(sequence, 0, length)])
    ends = data.draw(chunkings(length))
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        other = replace(shape, block_tokens=data.draw(st.sampled_from([16, 32, 64, 128])))
        parts = data.draw(st.integers(1, 9))
        chunk = attend(cpu, other, [Chunk(sequence, start, end)], parts, seed)
        assert same_bits(chunk, whole[start:end]), f"[{start}, {end}) of {length} in {parts} parts"


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_decoding_token_by_token_equals_prefill(cpu: Any, dtype: str, group: int) -> None:
    shape = Shape(kv_heads=2, group=group, dim=64, dtype=dtype)
    sequence = Tokens.random(shape, 1100, 5)
    whole = attend(cpu, shape, [Chunk(sequence, 0, 1100)])
    for position in {*range(0, 1100, 37), *(length - 1 for length in BORDERS)}:
        one = attend(cpu, shape, [Chunk(sequence, position, position + 1)], parts=1 + position % 4)
        assert same_bits(one, whole[position : position + 1]), f"position {position}"


@settings(deadline=None, max_examples=30)
@given(steps(), st.integers(1, 6), st.sampled_from([1, 2, 3, 7]), st.randoms(use_true_random=False))
def test_a_sequence_does_not_notice_who_shares_its_step(
    spans: list[tuple[int, int]], parts: int, group: int, random: Any
) -> None:
    shape, cpu = Shape(kv_heads=3, group=group, dim=32), library.library()
    chunks = [Chunk(Tokens.random(shape, end, i), start, end) for i, (start, end) in enumerate(spans)]
    alone = [attend(cpu, shape, [chunk]) for chunk in chunks]
    order = random.sample(range(len(chunks)), len(chunks))
    together = attend(cpu, shape, [chunks[i] for i in order], parts)
    assert same_bits(together, np.concatenate([alone[i] for i in order]))


@pytest.mark.parametrize("length", BORDERS)
def test_ends_at_borders_are_near_the_definition(cpu: Any, length: int) -> None:
    shape = Shape(kv_heads=1, group=3, dim=64)
    sequence = Tokens.random(shape, length, length)
    chunk = Chunk(sequence, max(0, length - 3), length)
    wanted = defined(shape, chunk)
    np.testing.assert_allclose(attend(cpu, shape, [chunk], 2), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_a_first_token_gets_its_own_value_to_the_bit(cpu: Any, dtype: str) -> None:
    shape = Shape(kv_heads=2, group=2, dim=80, dtype=dtype)
    sequence = Tokens.random(shape, 1, 3)
    result = attend(cpu, shape, [Chunk(sequence, 0, 1)])
    assert same_bits(result, np.repeat(sequence.v, shape.group, axis=1))


def test_scores_of_ten_thousand_neither_overflow_nor_drift(cpu: Any) -> None:
    """Whole-number q and k, so that the scores are exact and weights alone can be wrong: most vanish, a few tie."""
    shape = Shape(kv_heads=1, group=3, dim=64, scale=1.0)
    dice = np.random.default_rng(11)
    q = dice.integers(-40, 41, (700, shape.heads, shape.dim)).astype(np.float32)
    k = dice.integers(-40, 41, (700, 1, shape.dim)).astype(np.float32)
    k[600] = k[90]
    sequence = replace(Tokens.random(shape, 700, 4), q=q, k=k)
    scores = np.abs(q[:, 0] @ k[:, 0].T)
    assert scores.max() > 1e4
    chunk = Chunk(sequence, 600, 700)
    result = attend(cpu, shape, [chunk])
    np.testing.assert_allclose(result, defined(shape, chunk), rtol=0, atol=1e-5)
    assert same_bits(result, attend(cpu, shape, [Chunk(sequence, 0, 700)])[600:])
    equal = replace(sequence, q=np.full_like(q, 40), k=np.full_like(k, 40))
    mean = attend(cpu, shape, [Chunk(equal, 699, 700)], 2)
    np.testing.assert_allclose(mean[0], np.repeat(sequence.v.mean(0), 3, 0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_later_tokens_cannot_reach_an_earlier_one(cpu: Any, bad: float) -> None:
    shape = Shape(kv_heads=1, group=2, dim=32, dtype="fp32")
    sequence = Tokens.random(shape, 100, 8)
    clean = attend(cpu, shape, [Chunk(sequence, 0, 100)])
    for at in (0, 5, 63, 64, 99):
        k, v = sequence.k.copy(), sequence.v.copy()
        k[at] = v[at] = bad
        result = attend(cpu, shape, [Chunk(replace(sequence, k=k, v=v), 0, 100)])
        assert same_bits(result[:at], clean[:at])
        assert np.isnan(result[at:]).all()


@pytest.mark.parametrize(("start", "seen", "end"), [(0, 3, 40), (500, 505, 596)])
def test_a_negative_zero_survives_tokens_that_come_later(cpu: Any, start: int, seen: int, end: int) -> None:
    """A product that underflows leaves -0; adding a +0 for a tile's or a partial's unseen positions would lose it."""
    shape = Shape(kv_heads=1, group=1, dim=16, dtype="fp32", scale=1.0)
    sequence = Tokens.random(shape, end, 2)
    q, k, v = np.full_like(sequence.q, 1), np.zeros_like(sequence.k), np.ones_like(sequence.v)
    k[1] = -5
    v[:seen] = -0.0
    v[1] = -1e-45
    sequence = Tokens(q, k, v)
    last = attend(cpu, shape, [Chunk(sequence, seen - 1, seen)])
    assert np.signbit(last).all()
    assert (last == 0).all()
    assert same_bits(attend(cpu, shape, [Chunk(sequence, start, end)])[seen - 1 - start][None], last)


def test_parts_may_run_at_the_same_time_and_layer_after_layer(cpu: Any) -> None:
    shape = Shape(kv_heads=3, group=3, dim=64)
    chunks = [Chunk(Tokens.random(shape, end, end), start, end) for start, end in ((1500, 1501), (900, 930), (0, 70))]
    wanted = attend(cpu, shape, chunks)
    call = Call(cpu, shape, chunks, parts=5)
    call.plan()
    with ThreadPoolExecutor(5) as threads:
        for _ in range(20):
            call.out[:] = np.nan
            list(threads.map(call.part, range(5)))
            assert same_bits(call.result(), wanted)


def test_parts_may_come_in_any_order_and_outnumber_the_work(cpu: Any) -> None:
    shape = Shape(kv_heads=1, group=1, dim=16)
    chunks = [Chunk(Tokens.random(shape, 1300, 1), 1298, 1300), Chunk(Tokens.random(shape, 1, 2), 0, 1)]
    wanted = attend(cpu, shape, chunks)
    call = Call(cpu, shape, chunks, parts=40)
    call.plan()
    for part in np.random.default_rng(5).permutation(40).tolist():
        call.part(part)
    assert same_bits(call.result(), wanted)


def test_a_step_of_nothing_and_a_span_of_nothing(cpu: Any) -> None:
    shape = Shape(kv_heads=2, group=2, dim=32)
    assert attend(cpu, shape, [], parts=3).shape == (0, 4, 32)
    sequence = Tokens.random(shape, 20, 6)
    empty, real = Chunk(sequence, 20, 20), Chunk(sequence, 3, 20)
    wanted = attend(cpu, shape, [real])
    assert same_bits(attend(cpu, shape, [empty, real, empty], parts=3), wanted)
