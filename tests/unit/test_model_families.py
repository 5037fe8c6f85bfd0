"""Each family against the reference implementation: whole prefill, chunks, decode and a ragged batch, to 1e-4 in fp32.

The pool is NaN before it is written and block tables are scattered, so a slot read out of place shows.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from services.worker.model_runner import ModelRunner
from services.worker.page_store import PageStore
from services.worker.runner import RowOutput
from shared.config import Config, KVConfig, ModelConfig
from shared.messages.base import pack_u32
from shared.messages.engine import Row, SampleSpec
from shared.paths import Places
from tests.hf_tiny import CONTEXT, KINDS, VOCAB, TinyModel, make_tiny

GREEDY = SampleSpec()


@dataclass
class Sequence:
    """What the scheduler would know of one request."""

    key: int
    ids: list[int]
    blocks: list[int]
    done: int = 0


@dataclass
class Engine:
    """A runner, its poisoned pool, and sequences whose blocks are handed out in a scattered order."""

    model: TinyModel
    runner: ModelRunner
    pool: PageStore = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.pool = PageStore(self.runner.facts.blocks, self.runner.facts.block_bytes)
        for block in range(self.pool.nblocks):
            self.pool.poison(block)
        self.free = random.Random(5).sample(range(self.pool.nblocks), self.pool.nblocks)

    def sequence(self, key: int, length: int) -> Sequence:
        rng = random.Random(key)
        ids = [rng.randrange(VOCAB) for _ in range(length)]
        blocks = [self.free.pop() for _ in range(-(-length // self.runner.facts.block_tokens))]
        return Sequence(key, ids, blocks)

    def row(self, sequence: Sequence, count: int, *, sample: bool = True) -> Row:
        start, end = sequence.done, sequence.done + count
        sequence.done = end
        return Row(
            sequence.key,
            start,
            pack_u32(sequence.ids[start:end]),
            pack_u32(sequence.blocks),
            GREEDY if sample else None,
        )

    def step(self, *rows: Row) -> tuple[RowOutput, ...]:
        return self.runner.step(rows, self.pool).rows

    def check(self, sequence: Sequence, output: RowOutput) -> None:
        """The output's logits are those of the reference after all that was fed."""
        assert output.error is None
        assert output.logits is not None
        expected = self.model.logits(sequence.ids[: sequence.done])[-1]
        torch.testing.assert_close(torch.from_numpy(output.logits.copy()), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(request.param, tmp_path_factory.mktemp("models"))


def runner_of(model: TinyModel, home: Path, dtype: str = "fp32", backend: str = "cpu") -> ModelRunner:
    config = Config(
        model=ModelConfig(source=str(model.path), threads=1, backend=backend),
        kv=KVConfig(pool_bytes=2 << 20, block_tokens=16, dtype=dtype),
    )
    return ModelRunner(config, Places(home))


@pytest.fixture(params=["cpu", "reference"])
def engine(request: pytest.FixtureRequest, model: TinyModel, tmp_path: Path) -> Engine:
    return Engine(model, runner_of(model, tmp_path, backend=request.param))


@pytest.mark.parametrize("length", [1, 16, 17, 200])
def test_whole_prefill_gives_the_reference_logits(engine: Engine, length: int) -> None:
    sequence = engine.sequence(1, length)
    engine.check(sequence, *engine.step(engine.row(sequence, length)))


def test_chunks_of_any_size_give_the_reference_logits_at_each_end(engine: Engine) -> None:
    sequence = engine.sequence(2, 150)
    for count in (7, 9, 1, 16, 2, 64, 1, 33, 17):
        engine.check(sequence, *engine.step(engine.row(sequence, count)))
    assert sequence.done == 150


def test_decode_gives_the_reference_logits_at_each_token(engine: Engine) -> None:
    sequence = engine.sequence(3, 60)
    assert engine.step(engine.row(sequence, 30, sample=False)) == (RowOutput(),)
    while sequence.done < 60:
        engine.check(sequence, *engine.step(engine.row(sequence, 1)))


def test_a_ragged_batch_of_five_gives_each_row_its_own_logits(engine: Engine) -> None:
    late, early, fresh, chunk, silent = (
        engine.sequence(key, length) for key, length in enumerate((120, 18, 40, 90, 50))
    )
    engine.step(engine.row(late, 117, sample=False), engine.row(early, 15, sample=False), engine.row(chunk, 50))
    for _ in range(2):
        rows = (
            engine.row(late, 1),
            engine.row(fresh, 20),
            engine.row(silent, 25, sample=False),
            engine.row(early, 1),
            engine.row(chunk, 19),
        )
        outputs = engine.step(*rows)
        assert outputs[2] == RowOutput()
        for sequence, output in zip((late, fresh, early, chunk), (*outputs[:2], *outputs[3:]), strict=True):
            engine.check(sequence, output)


def test_the_last_position_of_the_context_can_be_used(engine: Engine) -> None:
    assert engine.runner.ready.max_context == CONTEXT
    sequence = engine.sequence(4, CONTEXT)
    engine.step(engine.row(sequence, CONTEXT - 1, sample=False))
    engine.check(sequence, *engine.step(engine.row(sequence, 1)))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_kv_of_16_bits_stays_near_the_reference(model: TinyModel, tmp_path: Path, dtype: str) -> None:
    engine = Engine(model, runner_of(model, tmp_path, dtype))
    assert engine.runner.facts.block_bytes * 2 == runner_of(model, tmp_path).facts.block_bytes
    sequence = engine.sequence(6, 80)
    engine.step(engine.row(sequence, 60, sample=False))
    (output,) = engine.step(engine.row(sequence, 20))
    assert output.logits is not None
    expected = model.logits(sequence.ids)[-1]
    difference = (torch.from_numpy(output.logits.copy()) - expected).abs().max() / expected.abs().max()
    assert 0 < difference < (0.006 if dtype == "fp16" else 0.05)


def test_a_row_whose_cached_kv_is_not_finite_ends_alone(engine: Engine) -> None:
    broken, sound = engine.sequence(7, 40), engine.sequence(8, 40)
    engine.step(engine.row(broken, 39, sample=False), engine.row(sound, 39, sample=False))
    engine.pool.poison(broken.blocks[1])
    bad, good = engine.step(engine.row(broken, 1), engine.row(sound, 1))
    assert bad.logits is None
    assert bad.error is not None
    assert "request 7" in bad.error
    engine.check(sound, good)
