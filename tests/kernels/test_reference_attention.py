"""Paged attention over ragged, scattered, NaN-poisoned pools against float64; and what write_kv stores."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kernels.batch import make_batch
from kernels.reference import ops
from kernels.reference import step as reference_step
from kernels.reference.attention import Attention
from kernels.reference.step import begin
from kernels.rope import rope_tables
from shared.kv import KVLayout
from tests.kernels import oracle

TOLERANCE = 1e-5
"""Against float64 over the KV as stored: the pool's rounding is in both."""


def tables(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = rope_tables(np.ones(dim // 2), 512)
    return torch.from_numpy(made.cos), torch.from_numpy(made.sin)


def check_step(layout: KVLayout, per_kv: int, shapes: list[tuple[int, int]], seed: int, layer: int = 0) -> None:
    """One ragged step: `shapes` are (tokens in the pool, tokens fed); everything is compared with float64."""
    needed = sum(-(-(start + count) // layout.block_tokens) + 1 for start, count in shapes)
    pool = oracle.PoisonedPool(layout, needed + 3, seed)
    sequences = [pool.sequence(start, start + count, layer) for start, count in shapes]
    batch = oracle.batch_of([(s, c, table) for (s, c), (table, _, _) in zip(shapes, sequences, strict=True)])
    step = begin(batch, pool.kv, *tables(layout.head_dim_k))
    tokens = len(batch.ids)
    q = pool.randn(tokens, layout.kv_heads * per_kv, layout.head_dim_k)
    k = pool.randn(tokens, layout.kv_heads, layout.head_dim_k)
    v = pool.randn(tokens, layout.kv_heads, layout.head_dim_v)
    ops.write_kv(k, v, layer, step)
    out = Attention().step(q, layer, step, layout.head_dim_k**-0.5)
    out = out.flatten(1)
    assert out.shape == (tokens, layout.kv_heads * per_kv * layout.head_dim_k)
    assert bool(step.health.isfinite().all())
    for span, (_, old_k, old_v) in zip(batch.spans, sequences, strict=True):
        mine = slice(span.first, span.first + span.count)
        all_k = torch.cat((old_k, k[mine].to(pool.kv.dtype)))
        all_v = torch.cat((old_v, v[mine].to(pool.kv.dtype)))
        expected = oracle.attention(q[mine], all_k, all_v, span.start, layout.head_dim_k**-0.5)
        torch.testing.assert_close(out[mine].double(), expected.flatten(1), rtol=TOLERANCE, atol=TOLERANCE)


LAYOUTS = st.builds(
    KVLayout,
    layers=st.just(2),
    kv_heads=st.sampled_from([1, 3]),
    head_dim_k=st.just(8),
    head_dim_v=st.just(8),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    block_tokens=st.sampled_from([4, 16]),
)
SHAPES = st.lists(
    st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20))),
    min_size=1,
    max_size=5,
)
F32 = KVLayout(2, 2, 8, 8, "fp32", 16)


@given(LAYOUTS, st.sampled_from([1, 3]), SHAPES, st.integers(0, 9), st.integers(0, 1))
@example(F32, 3, [(5, 11)], 0, 0)  # one block: its [token, dim] view is not what flash wants to read
@example(F32, 3, [(15, 1), (16, 1), (0, 1), (31, 1)], 0, 1)
@example(F32, 1, [(16, 16), (0, 32), (32, 2)], 0, 0)
def test_w32_ragged_steps_over_scattered_blocks_equal_float64(
    layout: KVLayout, per_kv: int, shapes: list[tuple[int, int]], seed: int, layer: int
) -> None:
    check_step(layout, per_kv, shapes, seed, layer)


def test_decodes_are_grouped_by_length_within_bounds_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_step, "GROUP_TOKENS", 250)
    shapes = [(n, 1) for n in (40, 110, 5, 200, 100, 0, 0, 30)]
    spans = oracle.batch_of([(s, c, np.arange(20)) for s, c in shapes]).spans
    groups = reference_step.decode_groups(spans, oracle.PoisonedPool(F32, 1, seed=0).kv)
    assert [group.tokens.tolist() for group in groups] == [[3], [1, 4], [0, 7], [2, 5, 6]]
    assert [group.blocks.shape[1] for group in groups] == [13, 7, 3, 1]
    check_step(F32, 3, shapes, seed=4)


def test_padding_of_a_group_repeats_a_block_that_may_itself_be_partly_unwritten() -> None:
    spans = oracle.batch_of([(s, 1, np.arange(20)) for s in (20, 9)]).spans
    (group,) = reference_step.decode_groups(spans, oracle.PoisonedPool(F32, 1, seed=0).kv)
    assert group.blocks.tolist() == [[0, 1], [0, 0]]
    rows, slots = (part.tolist() for part in group.unwritten)
    expected = [(0, slot) for slot in range(21, 32)]
    expected += [(1, slot) for slot in (*range(10, 16), *range(26, 32))]
    assert list(zip(rows, slots, strict=True)) == expected
    check_step(F32, 3, [(20, 1), (9, 1)], seed=5)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_real_head_sizes_and_long_prefixes(head_dim: int) -> None:
    check_step(
        KVLayout(1, 2, head_dim, head_dim, "fp32", 32), 3, [(300, 1), (257, 40), (0, 130), (70, 256), (0, 301)], seed=1
    )


def test_scores_of_any_size_do_not_overflow() -> None:
    pool = oracle.PoisonedPool(F32, 8, seed=2)
    table, old_k, old_v = pool.sequence(20, 24)
    step = begin(oracle.batch_of([(20, 1, table)]), pool.kv, *tables(8))
    q, k, v = pool.randn(1, 4, 8) * 1e4, pool.randn(1, 2, 8) * 1e4, pool.randn(1, 2, 8)
    ops.write_kv(k, v, 0, step)
    out = Attention().step(q, 0, step, 1.0).flatten(1)
    expected = oracle.attention(q, torch.cat((old_k, k)), torch.cat((old_v, v)), 20, 1.0)
    torch.testing.assert_close(out.double(), expected.flatten(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_kv_is_rounded_once_to_nearest_and_nothing_else_is_touched(dtype: str) -> None:
    layout = KVLayout(2, 2, 8, 8, dtype, 16)
    pool = oracle.PoisonedPool(layout, 6, seed=3)
    table, _, _ = pool.sequence(0, 20)
    step = begin(oracle.batch_of([(14, 4, table)]), pool.kv, *tables(8))
    k, v = pool.randn(4, 2, 8), pool.randn(4, 2, 8)
    ops.write_kv(k, v, 1, step)
    for token, position in enumerate(range(14, 18)):
        block, slot = int(table[position // 16]), position % 16
        assert torch.equal(pool.kv.k(1)[block, :, :, slot], k[token].to(pool.kv.dtype))
        assert torch.equal(pool.kv.v(1)[block, :, slot], v[token].to(pool.kv.dtype))
    written = 4 * layout.kv_heads * 16
    flat = torch.frombuffer(pool.memory, dtype=pool.kv.dtype)
    assert int(flat.isnan().logical_not().sum()) == written


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e6])
@pytest.mark.parametrize("where", ["k", "v"])
def test_only_the_token_whose_kv_is_not_finite_is_unhealthy(bad: float, where: str) -> None:
    layout = KVLayout(1, 2, 8, 8, "fp16", 16)
    pool = oracle.PoisonedPool(layout, 6, seed=3)
    rows = [(0, 2, pool.sequence(0, 2)[0]), (3, 1, pool.sequence(3, 4)[0])]
    step = begin(oracle.batch_of(rows), pool.kv, *tables(8))
    values = {"k": pool.randn(3, 2, 8), "v": pool.randn(3, 2, 8)}
    values[where][1, 1, 5] = bad  # 1e6 is finite, and beyond fp16
    ops.write_kv(values["k"], values["v"], 0, step)
    assert step.health.isfinite().tolist() == [True, False, True]
    others = Attention().step(pool.randn(3, 4, 8), 0, step, 1.0)[2]
    assert bool(others.isfinite().all())


def test_the_sampled_tokens_of_a_batch_are_decodes_at_the_ends_of_their_spans() -> None:
    tables = [np.arange(4) + 10 * row for row in range(3)]
    ids = np.arange(8)
    batch = make_batch([(0, ids[:3], tables[0], True), (5, ids[3:7], tables[1], False), (40, ids[7:], tables[2], True)])
    sampled = batch.only_sampled()
    assert sampled.ids.tolist() == [2, 7]
    assert sampled.positions.tolist() == [2, 40]
    assert [(span.first, span.count, span.start, span.end) for span in sampled.spans] == [(0, 1, 2, 3), (1, 1, 40, 41)]
    assert [span.blocks is table for span, table in zip(sampled.spans, (tables[0], tables[2]), strict=True)] == [
        True
    ] * 2
    assert sampled.only_sampled() is sampled
