"""Each dense operation of the reference backend against float64."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.reference import ops
from kernels.reference.backend import Reference
from kernels.reference.linear import Matrix
from kernels.reference.step import begin
from kernels.rope import rope_tables
from shared.kv import KVLayout
from tests.kernels import oracle

TOKENS = st.sampled_from([1, 2, 3, 8, 17, 40])
WIDTH = st.sampled_from([8, 24, 64, 100])


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@given(TOKENS, WIDTH, WIDTH, st.booleans(), st.booleans(), st.integers(0, 99))
def test_linear_stacks_weights_and_adds_the_residual(
    tokens: int, width: int, out: int, onednn: bool, with_residual: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, w, r = torch.randn(tokens, width), torch.randn(out, width) / width**0.5, torch.randn(tokens, out)
    expected = x.double() @ w.double().T + (r.double() if with_residual else 0)
    matrix = Matrix(w.numpy(), onednn=onednn)
    assert matrix.shape == (out, width)
    close(matrix.times(x, r if with_residual else None), expected)


@given(TOKENS, WIDTH, st.integers(0, 99))
def test_rms_norm(tokens: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(tokens, width) * 10, torch.randn(width)
    close(ops.rms_norm(x, weight, 1e-5), oracle.rms_norm(x, weight, 1e-5))
    heads = torch.randn(tokens, 3, width)
    close(ops.rms_norm(heads, weight, 1e-6), oracle.rms_norm(heads, weight, 1e-6))


@given(st.sampled_from([8, 16]), st.sampled_from([8, 16]), st.lists(st.integers(0, 8191), min_size=1, max_size=5))
def test_rope_at_far_positions_and_of_a_part_of_the_head(dims: int, head_dim: int, starts: list[int]) -> None:
    dims = min(dims, head_dim)
    frequencies = 100000.0 ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    layout = KVLayout(1, 1, head_dim, head_dim, "fp32", 16)
    pool = oracle.PoisonedPool(layout, 1, seed=0)
    table = np.zeros(600, dtype=np.int64)
    batch = oracle.batch_of([(start, 2, table) for start in starts])
    tables = rope_tables(frequencies, 8200)
    step = begin(batch, pool.kv, torch.from_numpy(tables.cos), torch.from_numpy(tables.sin))
    heads = torch.randn(2 * len(starts), 3, head_dim)
    before = heads.clone()
    turned = ops.rope(heads, step)
    assert torch.equal(heads, before)
    # float32 of an exact cosine is within 6e-8; float32 angles of position 8,191 would be off by 5e-4.
    close(turned, oracle.rope(heads, batch.positions, torch.from_numpy(frequencies)), 2e-6)


def test_numerics_name_what_changes_rounding() -> None:
    one, two = Reference(threads=1).numerics, Reference(threads=2).numerics
    assert one != two
    assert torch.__version__ in one
    assert torch.backends.cpu.get_cpu_capability() in one
