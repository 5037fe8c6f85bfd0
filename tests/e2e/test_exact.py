"""Prompts in every pair of circumstances: not one bit differs, and the cache really served."""

from pathlib import Path

import pytest
import trio

from ops.exact.matrix import Matrix, prompts_of
from ops.exact.plan import TIERS, Cell, Machine
from tests.models import smollm2_path


@pytest.mark.slow
async def test_no_bit_of_six_answers_depends_on_batch_chunks_threads_cache_or_kills(tmp_path: Path) -> None:
    source = str(smollm2_path())
    prompts = await trio.to_thread.run_sync(prompts_of, source, 6, 300)
    found = await Matrix(source, prompts, (1, 2), (), lambda line: None).run(cross=0)
    assert found.equal, str(found)
    assert found.compared >= 6 * 14
    assert all(found.cached.get(tier) for tier in TIERS if tier in ("device", "host", "disk"))


@pytest.mark.slow
async def test_nor_with_activations_of_8_bits() -> None:
    """Two prompts in a few cells that differ in everything."""
    source = str(smollm2_path())
    prompts = await trio.to_thread.run_sync(prompts_of, source, 2, 200)
    small, whole = Machine(32, 2, ""), Machine(0, 1, "")
    cells = [Cell(whole, "cold", 1), Cell(small, "cold", 8), Cell(small, "device", 8), Cell(small, "disk", 1)]
    matrix = Matrix(source, prompts, (1, 2), (), lambda line: None, "int8")
    found = await matrix.answer(cells, len(prompts))
    assert found.equal, str(found)
    assert found.compared == 6
    assert all(found.cached.get(tier) for tier in ("device", "disk"))
