"""Each dense operation of the reference backend against float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kernels import choose_backend
from kernels.reference.backend import Reference
from kernels.reference.linear import Matrix
from kernels.rope import rope_tables
from shared.config import ConfigError
from shared.kv import KVLayout
from tests.kernels import oracle

TOKENS = st.sampled_from([1, 2, 3, 8, 17, 40])
WIDTH = st.sampled_from([8, 24, 64, 100])


@pytest.fixture(scope="module")
def backend() -> Reference:
    return Reference(threads=1)


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


def test_pack_stacks_along_the_outputs_in_order(backend: Reference) -> None:
    a, b, x = torch.randn(5, 16), torch.randn(3, 16), torch.randn(2, 16)
    close(
        backend.linear(x, backend.pack([oracle.tensor(a), oracle.tensor(b)])), x.double() @ torch.cat((a, b)).double().T
    )


@given(TOKENS, WIDTH, st.integers(0, 99))
def test_rms_norm_and_embedding(tokens: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    backend = Reference(threads=1)
    x, weight = torch.randn(tokens, width) * 10, torch.randn(width)
    close(backend.rms_norm(x, backend.vector(oracle.tensor(weight)), 1e-5), oracle.rms_norm(x, weight, 1e-5))
    heads = torch.randn(tokens, 3, width)
    close(backend.head_norm(heads, weight, 1e-6), oracle.rms_norm(heads, weight, 1e-6))
    ids = torch.randint(0, tokens, (7,))
    assert torch.equal(backend.embed(ids, backend.embedding(oracle.tensor(x))), x[ids])


@given(TOKENS, WIDTH, st.sampled_from([8, 40]), st.integers(0, 99))
def test_swiglu_and_logits(tokens: int, width: int, wide: int, seed: int) -> None:
    torch.manual_seed(seed)
    backend = Reference(threads=1)
    x, gate, up = torch.randn(tokens, width), *(torch.randn(wide, width) / width**0.5 for _ in range(2))
    packed = backend.pack([oracle.tensor(gate), oracle.tensor(up)])
    close(backend.swiglu(x, packed), F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T))
    close(backend.logits(x, packed), x.double() @ torch.cat((gate, up)).double().T)


@given(st.sampled_from([8, 16]), st.sampled_from([8, 16]), st.lists(st.integers(0, 8191), min_size=1, max_size=5))
def test_rope_at_far_positions_and_of_a_part_of_the_head(dims: int, head_dim: int, starts: list[int]) -> None:
    dims = min(dims, head_dim)
    backend = Reference(threads=1)
    frequencies = 100000.0 ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    layout = KVLayout(1, 1, head_dim, head_dim, "fp32", 16)
    pool = oracle.PoisonedPool(layout, 1, seed=0)
    table = torch.zeros(600, dtype=torch.int64)
    batch = oracle.batch_of([(start, 2, table) for start in starts])
    step = backend.begin(batch, pool.kv, rope_tables(frequencies, 8200))
    heads = torch.randn(2 * len(starts), 3, head_dim)
    before = heads.clone()
    turned = backend.rope(heads, step)
    assert torch.equal(heads, before)
    # float32 of an exact cosine is within 6e-8; float32 angles of position 8,191 would be off by 5e-4.
    close(turned, oracle.rope(heads, batch.positions, torch.from_numpy(frequencies)), 2e-6)


def test_an_unknown_backend_is_refused_by_name() -> None:
    assert choose_backend("reference", 1).name == "reference"
    with pytest.raises(ConfigError, match=r"model\.backend 'cuda' is unknown; known are reference"):
        choose_backend("cuda", 1)


def test_numerics_name_what_changes_rounding() -> None:
    one, two = Reference(threads=1).numerics, Reference(threads=2).numerics
    assert one != two
    assert torch.__version__ in one
    assert torch.backends.cpu.get_cpu_capability() in one
