"""A plan says only what the worker doesn't know yet."""

import pytest

from services.scheduler.settings import Settings
from services.worker.page_store import PageStore
from services.worker.sessions import Part, Sessions, Unfit, keys_of
from services.worker.steps import Steps
from services.worker.toy_runner import ToyRunner
from shared.config import Config, FaultsConfig, KVConfig, ModelConfig
from shared.faults import Faults
from shared.messages import Head, encode
from shared.messages.base import pack_u32, pack_u64, unpack_u32, unpack_u64
from shared.messages.engine import MOST_STEPS, Grown, Plan, Result, Row, RowResult, SampleSpec
from shared.model.toy import toy_generate
from tests.engine_kit import words
from tests.scheduler_world import World

RUNNER = ToyRunner(Config(model=ModelConfig(source="toy:7"), kv=KVConfig(pool_bytes=40 * 1024)))
BLOCK = RUNNER.facts.block_tokens


# --- the scheduler's side -----------------------------------------------------------------------------------------


def plans_of(world: World) -> list[Plan]:
    """As they were sent."""
    return [effect for effect in world.effects if isinstance(effect, Plan)]


def test_a_decode_that_goes_on_is_its_key_and_a_block_is_told_once() -> None:
    world = World(Settings(step_tokens=16), blocks=60, block_tokens=4)
    world.submit(words(10, 1), 30)
    world.submit(words(6, 2), 30)
    world.settle()
    plans = plans_of(world)
    assert [row.key for plan in plans for row in plan.rows] == [1, 2]
    decodes = [plan for plan in plans if not plan.rows]
    assert all(set(keys_of(plan)) <= {1, 2} for plan in decodes)
    told = [(grown.key, len(grown.blocks) // 4) for plan in plans for grown in plan.grown]
    assert sorted(told) == [(1, 1)] * 7 + [(2, 1)] * 7  # 3 and 2 blocks at first; 39 and 35 tokens are fed
    names = [block for plan in plans for grown in plan.grown for block in unpack_u32(grown.blocks)]
    assert len(set(names)) == len(names)


def test_the_bytes_of_a_decode_step_do_not_grow_with_its_context() -> None:
    def most(context: int) -> int:
        world = World(Settings(step_tokens=1 << 16), blocks=6000, block_tokens=4, max_context=5000, check=False)
        for i in range(8):
            world.submit(words(context, i), 40)
        world.settle()
        return max(len(encode(Head(), plan)[1]) for plan in plans_of(world) if not plan.rows)

    assert most(2500) == most(20) < 250


def test_what_is_over_is_forgotten_and_a_retracted_request_comes_back_whole() -> None:
    world = World(Settings(step_tokens=64, retract_every=5), blocks=40, block_tokens=4)
    ids = [world.submit(words(9, i), 20 + i) for i in range(3)]
    world.settle()
    plans = plans_of(world)
    gone = [key for plan in plans for key in unpack_u64(plan.gone)]
    whole = [row.key for plan in plans for row in plan.rows]
    assert len(whole) - len(ids) > 1  # one that is back in the very next plan is told anew, not forgotten
    assert len(gone) >= len(ids) - 1
    for key in set(gone):
        assert gone.count(key) <= whole.count(key)


def test_a_table_whose_blocks_were_exchanged_is_told_anew() -> None:
    world = World(Settings(step_tokens=64), blocks=40, block_tokens=4)
    for _ in range(2):
        world.submit(words(12), 9, no_read=True)
    world.settle()
    rows = [row for plan in plans_of(world) for row in plan.rows]
    assert len(rows) > 2
    assert any(row.feeds_last for row in rows)


def test_another_worker_is_told_everything() -> None:
    world = World(Settings(step_tokens=64), blocks=40, block_tokens=4)
    world.submit(words(12), 30)
    for _ in range(4):
        world.finish_plan()
    world.start_worker()
    plan = plans_of(world)[-1]
    assert (len(plan.rows), plan.goes_on, plan.grown, plan.gone) == (1, b"", (), b"")
    world.settle()


# --- the worker's side --------------------------------------------------------------------------------------------


def row(key: int, ids: list[int], blocks: list[int], *, start: int = 0, sample: SampleSpec | None = None) -> Row:
    return Row(key, start, pack_u32(ids), pack_u32(blocks), sample or SampleSpec())


def steps() -> Steps:
    return Steps(RUNNER, PageStore(RUNNER.facts.blocks, RUNNER.facts.block_bytes), Faults(FaultsConfig()))


def run(steps: Steps, plan: Plan) -> Result:
    result = steps.execute(plan, lambda: True)
    assert result is not None
    assert [one.key for one in result.rows] == keys_of(plan)
    return result


def test_rows_that_go_on_draw_what_whole_rows_would() -> None:
    worker, prompt = steps(), [(5 * i) % 512 for i in range(BLOCK - 2)]
    tokens = [run(worker, Plan(epoch=1, seq=1, rows=(row(9, prompt, [3]),))).rows[0].token]
    for step in range(20):
        fed = len(prompt) + step
        grown = (Grown(9, pack_u32([20 + fed // BLOCK])),) if fed % BLOCK == 0 else ()
        tokens.append(run(worker, Plan(epoch=1, seq=2 + step, goes_on=pack_u64([9]), grown=grown)).rows[0].token)
    assert tokens == toy_generate(7, prompt, 21)


def test_a_plan_of_several_steps_draws_what_single_ones_would() -> None:
    worker, prompt = steps(), [(5 * i) % 512 for i in range(BLOCK - 2)]
    tokens = [run(worker, Plan(epoch=1, seq=1, rows=(row(9, prompt, [3]),))).rows[0].token]
    grown = (Grown(9, pack_u32([20])),)
    result = worker.execute(Plan(epoch=1, seq=2, goes_on=pack_u64([9]), grown=grown, steps=5), lambda: True)
    assert result is not None
    tokens += [one.token for one in result.rows]
    left = iter([False, False, True])
    result = worker.execute(Plan(epoch=1, seq=3, goes_on=pack_u64([9]), steps=7), lambda: True, lambda: next(left))
    assert result is not None
    assert len(result.rows) == 3
    tokens += [one.token for one in result.rows]
    late = Row(9, len(prompt) + 12, b"", pack_u32([3, 20]), SampleSpec(), 13, feeds_last=True)  # of a scheduler who
    result = worker.execute(Plan(epoch=1, seq=4, rows=(late,)), lambda: True)  # thinks that all seven were made
    assert result is not None
    tokens.append(result.rows[0].token)
    assert tokens == toy_generate(7, prompt, 10)


def test_a_plan_of_too_many_steps_ends_where_its_table_does_or_at_the_most() -> None:
    worker = steps()
    run(worker, Plan(epoch=1, seq=1, rows=(row(1, [1] * (BLOCK - 3), [0]), row(2, [2], [1, 2]))))
    result = worker.execute(Plan(epoch=1, seq=2, goes_on=pack_u64([1, 2]), steps=1 << 40), lambda: True)
    assert result is not None
    first, second = result.rows[0::2], result.rows[1::2]
    assert len(second) == MOST_STEPS
    assert all(one.token >= 0 for one in second)
    assert [one.token >= 0 for one in first] == [True] * 3 + [False] * (MOST_STEPS - 3)
    assert "is fed, but there are a context of" in (first[3].error or "")
    assert all(one.dropped for one in first[4:])


def test_rows_that_go_on_end_alone_when_they_can_not() -> None:
    worker = steps()
    rows = (row(1, [1] * BLOCK, [0]), row(2, [2], [1]), row(3, [3], [2]), Row(4, 0, pack_u32([4]), pack_u32([3]), None))
    run(worker, Plan(epoch=1, seq=1, rows=rows))
    beyond = (Grown(3, pack_u32([RUNNER.facts.blocks])), Grown(77, pack_u32([5])))
    result = run(worker, Plan(epoch=1, seq=2, goes_on=pack_u64([1, 2, 3, 4, 5]), grown=beyond))
    errors = [one.error or "" for one in result.rows]
    assert f"position {BLOCK} is fed, but there are a context of" in errors[0]
    assert errors[1] == ""
    assert "its blocks 0" in errors[2]
    assert "nothing was drawn" in errors[3]
    assert "nothing was drawn" in errors[4]
    again = run(worker, Plan(epoch=1, seq=3, goes_on=pack_u64([1, 2, 3, 4, 5])))
    assert [one.dropped for one in again.rows] == [True, False, True, True, True]


def test_a_forgotten_request_and_another_epoch_begin_anew() -> None:
    worker = steps()
    wrong, right = row(1, [900], [0]), row(1, [9], [0])
    assert run(worker, Plan(epoch=1, seq=1, rows=(wrong,))).rows[0].error is not None
    assert run(worker, Plan(epoch=1, seq=2, rows=(right,))).rows[0].dropped
    assert run(worker, Plan(epoch=1, seq=3, rows=(right,), gone=pack_u64([1, 55]))).rows[0].token >= 0
    assert run(worker, Plan(epoch=2, seq=1, goes_on=pack_u64([1]))).rows[0].error is not None


@pytest.mark.parametrize("field", ["goes_on", "gone"])
def test_a_torn_plan_ends_its_rows_and_the_next_one_is_served(field: str) -> None:
    worker = steps()
    result = worker.execute(Plan(epoch=1, seq=1, rows=(row(1, [9], [0]),), **{field: b"12345"}), lambda: True)
    assert result is not None
    assert "the plan is torn" in (result.rows[0].error or "")
    assert run(worker, Plan(epoch=1, seq=2, rows=(row(2, [9], [0]),))).rows[0].token >= 0


def test_nothing_is_kept_of_who_is_gone() -> None:
    sessions = Sessions(RUNNER.ready)
    for key in range(100):
        plan = Plan(epoch=1, seq=key, rows=(row(key, [9], [0]),), gone=pack_u64([key - 1]) if key else b"")
        (part,) = sessions.complete(plan)
        assert isinstance(part, Part | Unfit)
        sessions.note(part, RowResult(key, 5))
    assert len(sessions) == 1
