"""A plan's rows stand alone: what is wrong with one is nobody else's matter."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kernels.reference.sampler import sample
from services.worker.page_store import PageStore
from services.worker.recorder import recorded
from services.worker.runner import RowOutput, StepOutput
from services.worker.steps import Steps, parse_fixed_ids
from services.worker.toy_runner import ToyRunner
from shared.config import Config, ConfigError, FaultsConfig, KVConfig, ModelConfig
from shared.faults import Faults
from shared.messages.base import pack_u32, unpack_u32
from shared.messages.engine import KVFacts, Plan, Result, Row, SampleSpec, WorkerReady
from shared.model.toy import toy_generate

CONFIG = Config(model=ModelConfig(source="toy:7"), kv=KVConfig(pool_bytes=40 * 1024))
VOCAB = 512


class LogitsRunner:
    """Gives logits that depend on a row's first token alone; token 1 gives none, 2 NaN, 3 raises."""

    def __init__(self) -> None:
        self.ready: WorkerReady = ToyRunner(CONFIG).ready
        self.facts: KVFacts = self.ready.kv
        self.asked: list[int] = []

    @staticmethod
    def logits(token: int) -> np.ndarray:
        return np.random.default_rng(token).normal(size=VOCAB).astype(np.float32)

    def step(self, rows: Sequence[Row], pool: PageStore) -> StepOutput:
        out = []
        for row in rows:
            first = unpack_u32(row.ids)[0]
            self.asked.append(row.key)
            if first == 3:
                raise RuntimeError("the kernel fell over")
            logits = np.full(VOCAB, np.nan, np.float32) if first == 2 else self.logits(first)
            out.append(RowOutput(error="no KV for you") if first == 1 else RowOutput(logits=logits))
        return StepOutput(tuple(out))


def steps_of(runner: LogitsRunner | ToyRunner, **faults: object) -> Steps:
    pool = PageStore(runner.facts.blocks, runner.facts.block_bytes)
    return Steps(runner, pool, Faults(FaultsConfig(**faults)))  # type: ignore[arg-type]


def row(key: int, ids: list[int], *, start: int = 0, sample: SampleSpec | None = None, drawn: int = 0) -> Row:
    return Row(key, start, pack_u32(ids), pack_u32([key]), sample or SampleSpec(), drawn)


def run(steps: Steps, *rows: Row) -> Result:
    result = steps.execute(Plan(epoch=5, seq=6, rows=rows), lambda: True)
    assert result is not None
    assert (result.epoch, result.seq) == (5, 6)
    assert [r.key for r in result.rows] == [r.key for r in rows]
    return result


def ahead(key: int, *, start: int = 1, stop_ids: tuple[int, ...] = ()) -> Row:
    """A row that feeds what the plan before drew."""
    return Row(key, start, b"", pack_u32([key]), SampleSpec(), 1, stop_ids, feeds_last=True)


def test_a_row_planned_ahead_feeds_what_the_plan_before_drew() -> None:
    steps, alone = steps_of(ToyRunner(CONFIG)), steps_of(ToyRunner(CONFIG))
    first = run(steps, row(1, [9]), row(2, [10])).rows
    assert [r.token for r in run(alone, row(1, [9]), row(2, [10])).rows] == [r.token for r in first]
    second = run(steps, ahead(2), ahead(1)).rows
    known = run(alone, row(2, [first[1].token], start=1), row(1, [first[0].token], start=1)).rows
    assert [r.token for r in second] == [r.token for r in known]
    assert steps.statistics().tokens == 4


def test_what_ended_in_the_plan_before_is_dropped_and_not_computed() -> None:
    runner = LogitsRunner()
    steps = steps_of(runner)
    token = int(runner.logits(9).argmax())
    stopping = Row(1, 0, pack_u32([9]), pack_u32([1]), SampleSpec(), 0, (7, token))
    rows = run(steps, stopping, row(2, [1]), row(39, [900]), row(4, [9])).rows
    assert [r.error is None for r in rows] == [True, False, False, True]
    runner.asked.clear()
    rows = run(steps, ahead(1), row(2, [5]), row(39, [5], start=1), ahead(4, stop_ids=(7,))).rows
    assert [(r.dropped, r.token >= 0) for r in rows] == [(True, False)] * 3 + [(False, True)]
    assert runner.asked == [4]
    rows = run(steps, ahead(1), ahead(4)).rows
    assert [r.dropped for r in rows] == [True, False]
    assert steps.statistics().dropped == 4


def test_a_row_that_feeds_what_was_never_drawn_ends_alone() -> None:
    runner = LogitsRunner()
    steps = steps_of(runner)
    run(steps, row(1, [9]), Row(2, 0, pack_u32([9]), pack_u32([2]), None), row(5, [9]))
    with_ids = Row(1, 1, pack_u32([4]), pack_u32([1]), SampleSpec(), 1, (), feeds_last=True)
    rows = run(steps, ahead(3), with_ids, ahead(2), ahead(5)).rows
    assert [r.error is not None for r in rows] == [True, True, True, False]
    assert "nothing was drawn" in (rows[0].error or "")
    assert "4 bytes of its own" in (rows[1].error or "")


def test_a_new_epoch_knows_nothing_of_the_plan_before() -> None:
    runner = LogitsRunner()
    steps = steps_of(runner)
    run(steps, row(1, [9]), row(2, [1]))
    result = steps.execute(Plan(epoch=6, seq=1, rows=(ahead(1), row(2, [9]))), lambda: True)
    assert result is not None
    assert [(r.error is None, r.dropped) for r in result.rows] == [(False, False), (True, False)]


def test_the_recorder_keeps_what_was_fed(tmp_path: Path) -> None:
    steps = steps_of(LogitsRunner(), record_plans=str(tmp_path / "plans"))
    first = run(steps, row(1, [9])).rows
    run(steps, ahead(1), ahead(3))
    _, second = recorded(tmp_path / "plans")
    assert [(r.key, list(unpack_u32(r.ids)), r.feeds_last) for r in second.rows] == [(1, [first[0].token], False)]


def test_a_wrong_row_a_failing_row_and_one_that_is_not_finite_end_alone() -> None:
    runner = LogitsRunner()
    steps = steps_of(runner)
    rows = run(steps, row(1, [9]), row(39, [900]), row(2, [1]), row(3, [2]), row(4, [10, 11])).rows
    assert rows[0].token == int(runner.logits(9).argmax())
    assert rows[0].error is None
    assert rows[1].error is not None
    assert "token 900 is outside the vocabulary of 512" in rows[1].error
    assert rows[2].error == "no KV for you"
    assert rows[3].error == "the model's logits are not finite"
    assert [r.token for r in rows[1:4]] == [-1, -1, -1]
    assert rows[4].token == int(runner.logits(10).argmax())
    assert runner.asked == [1, 2, 3, 4]  # the wrong row never reached the model
    facts = steps.statistics()
    assert (facts.steps, facts.drawn, facts.errors, facts.tokens) == (1, 2, 3, 5)


def test_an_unforeseen_exception_fails_its_plan_and_the_next_one_works() -> None:
    steps = steps_of(LogitsRunner())
    failed = run(steps, row(1, [9]), row(2, [3]))
    assert [r.error for r in failed.rows] == ["the step failed: RuntimeError: the kernel fell over"] * 2
    assert run(steps, row(1, [9])).rows[0].error is None


def test_a_plan_that_nobody_wants_any_more_is_not_begun() -> None:
    runner = LogitsRunner()
    steps = steps_of(runner)
    assert steps.execute(Plan(epoch=5, seq=6, rows=(row(1, [9]),)), lambda: False) is None
    assert runner.asked == []


def test_the_same_row_draws_the_same_token_in_any_batch_and_order() -> None:
    spec = SampleSpec(temperature=1.0, seed=99, logprobs=3)
    mine = row(7, [50, 60], start=3, sample=spec)
    others = [row(i, [100 + i], sample=SampleSpec(temperature=0.9, seed=i)) for i in range(5)]
    alone = run(steps_of(LogitsRunner()), mine).rows[0]
    assert alone == run(steps_of(LogitsRunner()), *others, mine).rows[-1]
    assert alone == run(steps_of(LogitsRunner()), mine, *others).rows[0]
    assert alone.token == sample(LogitsRunner.logits(50), spec, 5).token  # drawn for position start + n
    elsewhere = {run(steps_of(LogitsRunner()), row(7, [50], start=s, sample=spec)).rows[0].token for s in range(12)}
    assert len(elsewhere) > 3


def test_fixed_ids_are_given_by_output_index_also_after_a_restart() -> None:
    steps = steps_of(LogitsRunner(), fixed_ids="256, 65,66")
    spec = SampleSpec(logprobs=1)
    rows = run(steps, *(row(i, [9], sample=spec, drawn=i) for i in range(4))).rows
    own = int(LogitsRunner.logits(9).argmax())
    assert [r.token for r in rows] == [256, 65, 66, own]
    chosen = [r.logprob.chosen for r in rows if r.logprob is not None]
    assert len(set(chosen)) == 4  # each the log-probability of its own token
    toy = steps_of(ToyRunner(CONFIG), fixed_ids="5")
    drawn = run(toy, row(1, [9], sample=spec), row(2, [9], drawn=1)).rows
    assert [r.token for r in drawn] == [5, toy_generate(7, [9], 1)[0]]
    assert drawn[0].logprob is not None
    assert list(unpack_u32(drawn[0].logprob.top_ids)) == [5]


@pytest.mark.parametrize("text", ["1,x", "512", "-1", "1,,2"])
def test_fixed_ids_that_are_none_are_a_configuration_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"faults\.fixed_ids"):
        parse_fixed_ids(text, VOCAB)
    assert parse_fixed_ids(" ", VOCAB) == ()


def test_an_injected_fault_in_a_step_fails_its_rows() -> None:
    steps = steps_of(LogitsRunner(), hooks={"worker_in_step": "fail:2"})
    assert run(steps, row(1, [9])).rows[0].error is None
    assert "injected fault at worker_in_step" in (run(steps, row(1, [9])).rows[0].error or "")
    assert run(steps, row(1, [9])).rows[0].error is None
