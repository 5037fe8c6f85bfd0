"""Each op of a program against float64, on every backend: programs of one op between an embedding and a head.

The embedding gives a buffer any rows, a head of the identity shows any buffer.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kernels import choose_backend
from kernels.batch import make_batch
from kernels.interface import Backend
from kernels.paged import PagedKV
from kernels.program import Buffer, Builder, Embed, HeadNorm, Linear, Logits, RmsNorm, Select, SwiGLU
from kernels.rope import rope_tables
from shared.kv import KVLayout
from tests.kernels import oracle

BACKENDS = ("reference", "cpu")
LAYOUT = KVLayout(1, 1, 16, 16, "fp32", 16)
ROWS = st.sampled_from([1, 2, 3, 8, 17])
WIDTH = st.sampled_from([8, 24, 64, 100])


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return choose_backend(request.param, 1, head_dim=16).backend


def outcome(
    backend: Backend,
    rows: torch.Tensor,
    add: Callable[[Builder, Buffer], Buffer],
    sampled: Sequence[bool] | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """What `add` makes of a buffer of these rows, [len(rows), width of what it returns]."""
    builder = Builder(heads=1, kv_heads=1, head_dim=16, vocab=len(rows), rope=rope_tables(np.ones(8), 64))
    x = builder.buffer("x", rows.shape[1])
    builder.add(Embed(x, oracle.tensor(rows), scale))
    builder.begin_layer()
    shown = add(builder, x)
    # The vocabulary is as large as the rows are many, so a wide buffer is shown column by column of them.
    parts = []
    for first in range(0, shown.width, len(rows)):
        eye = torch.eye(shown.width)[first : first + len(rows)]
        eye = F.pad(eye, (0, 0, 0, len(rows) - len(eye)))
        ops = list(builder.ops)
        builder.add(Logits(shown, oracle.tensor(eye)))
        model = backend.load(builder.program(), None, lambda done, total: None)
        builder.ops[:] = ops
        wants = sampled or [True] * len(rows)
        batch = make_batch([(0, np.array([n]), np.array([n]), want) for n, want in enumerate(wants)])
        kv = PagedKV(bytearray(b"\xff" * LAYOUT.block_bytes * len(rows)), LAYOUT)
        parts.append(torch.from_numpy(model.step(batch, kv).logits.copy()))
    return torch.cat(parts, 1)[:, : shown.width]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-5)


@given(ROWS, WIDTH, st.integers(0, 99))
def test_an_embedding_gives_its_rows_scaled(backend: Backend, rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    table = torch.randn(rows, width)
    assert torch.equal(outcome(backend, table, lambda b, x: x), table)
    assert torch.equal(outcome(backend, table, lambda b, x: x, scale=12.0), table * 12.0)


@given(ROWS, WIDTH, st.integers(0, 99))
def test_rms_norm(backend: Backend, rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, width) * 10, torch.randn(width)

    def add(b: Builder, x: Buffer) -> Buffer:
        out = b.buffer("out", width)
        b.add(RmsNorm(out, x, oracle.tensor(weight), 1e-5))
        return out

    close(outcome(backend, x, add), oracle.rms_norm(x, weight, 1e-5))


@given(ROWS, st.integers(0, 3), st.integers(1, 3), st.integers(0, 99))
def test_head_norm_leaves_the_other_columns(backend: Backend, rows: int, first: int, heads: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, 8 * 16) * 10, torch.randn(16)

    def add(b: Builder, x: Buffer) -> Buffer:
        b.add(HeadNorm(x, 16 * first, heads, oracle.tensor(weight), 1e-6))
        return x

    expected = x.double().view(rows, 8, 16)
    expected[:, first : first + heads] = oracle.rms_norm(expected[:, first : first + heads], weight, 1e-6)
    close(outcome(backend, x, add), expected.flatten(1))


@given(ROWS, WIDTH, st.lists(st.integers(1, 40), min_size=1, max_size=3), st.booleans(), st.integers(0, 99))
def test_linear_stacks_weights_and_adds_the_residual(
    backend: Backend, rows: int, width: int, outs: list[int], residual: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(rows, width)
    weights = [torch.randn(out, width) / width**0.5 for out in outs]
    back = torch.randn(width, sum(outs)) / sum(outs) ** 0.5

    def add(b: Builder, x: Buffer) -> Buffer:
        out = b.buffer("out", sum(outs))
        b.add(Linear(out, x, tuple(oracle.tensor(w) for w in weights)))
        if not residual:
            return out
        b.add(Linear(x, out, (oracle.tensor(back),), residual=x))
        return x

    expected = x.double() @ torch.cat(weights).double().T
    close(outcome(backend, x, add), x.double() + expected @ back.double().T if residual else expected)


@given(ROWS, st.sampled_from([8, 40]), st.integers(0, 99))
def test_swiglu(backend: Backend, rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(rows, 2 * width) * 4

    def add(b: Builder, x: Buffer) -> Buffer:
        out = b.buffer("out", width)
        b.add(SwiGLU(out, x))
        return out

    gate, up = x.double().chunk(2, 1)
    close(outcome(backend, x, add), F.silu(gate) * up)


@given(st.lists(st.booleans(), min_size=1, max_size=9))
def test_select_keeps_the_sampled_rows_in_order(backend: Backend, sampled: list[bool]) -> None:
    x = torch.randn(len(sampled), 24)

    def add(b: Builder, x: Buffer) -> Buffer:
        b.add(Select((x,)))
        return x

    assert torch.equal(outcome(backend, x, add, sampled), x[torch.tensor(sampled)])


def test_a_program_whose_widths_clash_is_refused_by_the_op() -> None:
    builder = Builder(heads=1, kv_heads=1, head_dim=16, vocab=4, rope=rope_tables(np.ones(8), 64))
    x = builder.buffer("x", 24)
    builder.add(Embed(x, oracle.tensor(torch.randn(4, 24))), Linear(x, x, (oracle.tensor(torch.randn(24, 24)),)))
    with pytest.raises(ValueError, match=r"op 1 \(Linear\): x is overwritten while it is read"):
        builder.program()
    with pytest.raises(ValueError, match="buffer x is 24 wide, not 25"):
        builder.buffer("x", 25)
