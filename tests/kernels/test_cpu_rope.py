"""Rotation and the write of KV: near float64, rounded to the nearest, into the token's own slot and nowhere else."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels.batch import Batch
from kernels.cpu import library
from kernels.cpu.library import pointer
from kernels.rope import RopeTables, rope_tables
from shared.kv import KVLayout
from tests.kernels import oracle

pytestmark = pytest.mark.skipif(not library.supported(), reason="this CPU has none of the instruction sets")

LIBRARIES = tuple(library.load(isa) for isa in library.supported())
KV_DTYPES = {"fp32": 0, "fp16": 1, "bf16": 2}
LAYERS = 2

Floats = NDArray[np.float32]


def tables(dims: int, positions: int = 600) -> tuple[NDArray[np.float64], RopeTables]:
    frequencies = 10000.0 ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    return frequencies, rope_tables(frequencies, positions)


def written(
    cpu: Any, pool: oracle.PoisonedPool, layer: int, qkv: Floats, heads: int, batch: Batch, rope: RopeTables, parts: int
) -> tuple[Floats, Floats]:
    """Runs the kernel on a copy of qkv, which it returns, and the tokens' health."""
    ffi, layout = library.declarations(), pool.layout
    qkv, tokens = qkv.copy(), len(qkv)
    positions = batch.positions.astype(np.int32)
    rows = np.repeat(np.arange(len(batch.spans)), [span.count for span in batch.spans])
    logical = positions // layout.block_tokens
    blocks = np.array([batch.spans[row].blocks[n] for row, n in zip(rows, logical, strict=True)], np.int32)
    memory = np.frombuffer(pool.memory, np.uint8)
    sizes = (pool.paged.blocks, layout.layers, layout.kv_heads, layout.head_dim_k, KV_DTYPES[layout.dtype])
    facts = ffi.new("pd_pool *", [pointer(memory, "void *"), *sizes, layout.block_tokens])
    places = ffi.new("pd_places *", [pointer(positions, "int32_t *"), pointer(blocks, "int32_t *")])
    health = np.zeros(tokens, np.float32)
    for part in range(parts):
        cpu.pd_rope_write_kv(
            pointer(qkv, "float *"), qkv.shape[1], tokens, heads, rope.dims,
            pointer(rope.cos, "float *"), pointer(rope.sin, "float *"),
            places[0], facts, layer, pointer(health, "float *"), part, parts,
        )  # fmt: skip
    return qkv, health


@given(
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([16, 32, 48]),
    rotated=st.sampled_from([1.0, 0.5, 0.25]),
    dtype=st.sampled_from(sorted(KV_DTYPES)),
    block_tokens=st.sampled_from([16, 32]),
    spans=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_rotates_and_stores(
    heads: int,
    kv_heads: int,
    dim: int,
    rotated: float,
    dtype: str,
    block_tokens: int,
    spans: list[tuple[int, int]],
    seed: int,
) -> None:
    layout = KVLayout(LAYERS, kv_heads, dim, dim, dtype, block_tokens)
    frequencies, rope = tables(int(dim * rotated))
    tokens = sum(count for _, count in spans)
    random = np.random.default_rng(seed)
    qkv = random.standard_normal((tokens, (heads + 2 * kv_heads) * dim)).astype(np.float32)
    memories = []
    for cpu in LIBRARIES:
        for parts in (1, 2, 5):
            pool = oracle.PoisonedPool(layout, 4 * 9, seed=1)
            batch = oracle.batch_of(
                [(start, count, pool.sequence(0, start + count)[0].astype(np.int64)) for start, count in spans]
            )
            after, health = written(cpu, pool, 1, qkv, heads, batch, rope, parts)
            assert (health == 0).all()
            memories.append((bytes(pool.memory), after.tobytes()))
    assert all(each == memories[0] for each in memories)

    before = torch.from_numpy(qkv).unflatten(1, (-1, dim))
    found = torch.from_numpy(after).unflatten(1, (-1, dim))
    expected = oracle.rope(before[:, : heads + kv_heads], batch.positions, torch.from_numpy(frequencies))
    torch.testing.assert_close(found[:, : heads + kv_heads].double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[:, heads + kv_heads :], before[:, heads + kv_heads :])

    k, v = pool.kv.k(1).clone(), pool.kv.v(1).clone()
    for span in batch.spans:
        for token in range(span.first, span.first + span.count):
            position = span.start + token - span.first
            block, slot = span.blocks[position // block_tokens], position % block_tokens
            assert torch.equal(k[block, :, :, slot], found[token, heads : heads + kv_heads].to(k.dtype))
            assert torch.equal(v[block, :, slot], found[token, heads + kv_heads :].to(v.dtype))
            k[block, :, :, slot] = v[block, :, slot] = torch.nan
    assert k.isnan().all()
    assert v.isnan().all()
    assert pool.kv.k(0).isnan().all()
    assert pool.kv.v(0).isnan().all()


@pytest.mark.parametrize(
    ("dtype", "well", "ill"),
    [
        ("fp32", [3e38, 1e-45], [np.inf, -np.inf, np.nan]),
        ("fp16", [65519.0, 1e-9], [65520.0, -1e30, np.inf, np.nan]),
        ("bf16", [3.38e38, 1e-45], [3.4e38, -3.4e38, np.inf, np.nan]),
    ],
)
@pytest.mark.parametrize("head", [2, 3])
def test_a_token_whose_kv_is_not_finite_once_rounded_is_marked_and_no_other(
    dtype: str, well: list[float], ill: list[float], head: int
) -> None:
    """Head 2 is the k head, 3 the v head; position 0 turns nothing."""
    _, rope = tables(16)
    for cpu in LIBRARIES:
        for value, finite in [*((x, True) for x in well), *((x, False) for x in ill)]:
            pool = oracle.PoisonedPool(KVLayout(LAYERS, 1, 16, 16, dtype, 16), 6, seed=0)
            batch = oracle.batch_of([(0, 1, pool.sequence(0, 1)[0]) for _ in range(3)])
            qkv = np.ones((3, 4 * 16), np.float32)
            qkv[1, head * 16 + 15] = value
            _, health = written(cpu, pool, 0, qkv, 2, batch, rope, 2)
            assert np.isfinite(health).tolist() == [True, finite, True]


def test_queries_that_are_not_finite_say_nothing_about_kv() -> None:
    _, rope = tables(16)
    pool = oracle.PoisonedPool(KVLayout(LAYERS, 1, 16, 16, "fp16", 16), 2, seed=0)
    qkv = np.ones((1, 4 * 16), np.float32)
    qkv[0, :32] = np.inf
    batch = oracle.batch_of([(5, 1, pool.sequence(0, 6)[0])])
    for cpu in LIBRARIES:
        assert written(cpu, pool, 0, qkv, 2, batch, rope, 1)[1] == 0
