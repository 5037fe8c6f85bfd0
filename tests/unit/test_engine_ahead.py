"""The next plan is made while one runs, on the assumption that every row goes on."""

import pytest

from services.scheduler.records import Step
from services.scheduler.settings import Settings
from shared.messages.base import unpack_u32
from shared.messages.engine import RowResult
from tests.engine_kit import counter, kv_of, words
from tests.scheduler_world import World
from tests.sim_worker import oracle


def out(world: World) -> list[list[str]]:
    """Who is in the outstanding plans."""
    return [[world.ids[row.key] for row in plan.rows] for plan, _ in world.plans]


def reason_of(world: World, id: str) -> str:
    finish = world.sent[id].finish
    assert finish is not None
    return finish.reason


def test_two_plans_are_out_and_the_second_feeds_what_the_first_draws() -> None:
    world = World(Settings(step_tokens=8), blocks=20, block_tokens=4)
    id = world.submit(words(12), 6)
    (first, _), (second, _) = world.plans
    assert [(row.start, len(row.ids) // 4, row.feeds_last, row.sample is None) for row in first.rows] == [
        (0, 8, False, True)
    ]
    assert [(row.start, len(row.ids) // 4, row.feeds_last, row.sample is None) for row in second.rows] == [
        (8, 4, False, False)
    ]  # the next chunk needs no news of the one before
    world.finish_plan()
    _, (third, _) = world.plans
    assert [(row.start, row.ids, row.feeds_last, row.drawn) for row in third.rows] == [(12, b"", True, 1)]
    world.settle()
    assert world.sent[id].tokens == oracle(words(12), 6)


def test_what_the_worker_did_before_the_news_came_makes_no_difference() -> None:
    world = World(Settings(step_tokens=8), blocks=20, block_tokens=4)
    ids = [world.submit(words(9, i), 7) for i in range(3)]
    while world.plans:
        world.run_ahead()
        world.finish_plan()
    world.settle()
    assert all(len(world.sent[id].tokens) == 7 for id in ids)


def test_a_length_that_is_reached_is_known_ahead_and_costs_no_row() -> None:
    world = World(Settings(step_tokens=16), blocks=20, block_tokens=4, max_context=30)
    world.submit(words(5), 1)
    world.submit(words(5, 1), 7)
    world.submit(words(20, 2), 100)  # ends at the context's end
    world.settle()
    assert counter(world, "finished_length") == 3
    assert counter(world, "dropped_rows") == 0


def test_a_stop_id_costs_one_row_that_leaves_no_trace() -> None:
    prompt = words(7)
    answer = oracle(prompt, 12)
    stop = next(token for i, token in enumerate(answer) if i >= 4 and token not in answer[:i])
    at = answer.index(stop) + 1
    world = World(Settings(step_tokens=16), blocks=20, block_tokens=1)
    id = world.submit(prompt, 12, stop_ids=(stop,))
    while not (world.plan and world.plan.rows[0].drawn == at):
        world.finish_plan()
    assert reason_of(world, id) == "stop"  # told while the row behind it is out
    before = kv_of(world)
    world.finish_plan()
    assert counter(world, "dropped_rows") == 1
    assert world.plans == []
    assert kv_of(world).inserted == before.inserted == len(prompt) + at - 1
    assert kv_of(world).locked == 0
    journaled = [
        token for record in world.journal if isinstance(record, Step) for token in unpack_u32(record.rows[0].ids)
    ]
    assert journaled == answer[:at]
    world.settle()


def test_nobody_gives_blocks_up_while_a_plan_is_out() -> None:
    """When the next token of somebody finds no block, the next plan waits for the result."""
    world = World(Settings(step_tokens=64), blocks=6, block_tokens=4)
    older, newer = world.submit(words(8, 1), 20), world.submit(words(8, 2), 20)
    serial = 0
    while world.live():
        before = counter(world, "retracted")
        single = len(world.plans) == 1
        serial += single
        world.turn()
        assert counter(world, "retracted") == before or single
    assert serial > 0
    assert counter(world, "retracted") > 0
    assert {reason_of(world, id) for id in (older, newer)} == {"length"}
    world.settle()


def test_a_pool_that_holds_nothing_more_serves_to_its_last_token() -> None:
    world = World(Settings(step_tokens=64), blocks=3, block_tokens=4)
    id = world.submit(words(8, 1), 20)
    world.settle()
    assert len(world.sent[id].tokens) == 5  # 12 in the pool, and one that needs no KV
    assert counter(world, "dropped_rows") == 0


def test_all_in_both_plans_of_a_worker_that_dies_are_suspects_and_run_alone_in_time_too() -> None:
    world = World(Settings(step_tokens=64), blocks=40, block_tokens=4)
    first = world.submit(words(5, 1), 30)
    second = world.submit(words(5, 2), 30)
    assert out(world) == [[first], [first, second]] or out(world) == [[first], [first]]
    while out(world)[-1] != [first, second]:
        world.finish_plan()
    world.start_worker()
    third = world.submit(words(5, 3), 30)
    assert out(world) == [[first]]
    world.finish_plan()
    assert out(world) == [[second]]
    world.finish_plan()
    assert third in out(world)[-1]
    assert len(world.plans) == 2
    world.settle()


def test_nothing_is_planned_behind_a_suspect_that_has_ended_meanwhile() -> None:
    world = World(Settings(step_tokens=64), blocks=40, block_tokens=4)
    suspect = world.submit(words(5, 1), 30)
    world.start_worker()
    other = world.submit(words(5, 2), 30)
    assert out(world) == [[suspect]]
    world.cancel(suspect)
    assert out(world) == [[suspect]]
    world.finish_plan()
    assert out(world) == [[other], [other]]
    world.settle()


def test_a_block_given_up_for_an_equal_one_stays_until_the_plan_that_names_it_is_over() -> None:
    world = World(Settings(step_tokens=64), blocks=40, block_tokens=4)
    prompt = words(12)
    ids = [world.submit(prompt, 9, no_read=True) for _ in range(2)]
    while world.live():
        world.turn()  # the world's worker reads every block that a plan names, and free ones hold garbage
    assert kv_of(world).duplicates > 0
    for id in ids:
        assert world.sent[id].tokens == oracle(prompt, 9)
    world.settle()


def test_a_result_that_never_came_ends_its_rows_once_the_next_one_is_there() -> None:
    world = World(Settings(step_tokens=64), blocks=40, block_tokens=4)
    id = world.submit(words(5, 1), 30)
    world.finish_plan()
    world.run_ahead()
    world.plans.pop(0)
    world.finish_plan()
    finish = world.sent[id].finish
    assert finish is not None
    assert finish.error == ("internal", "the worker sent no result for this row")
    while world.turn():
        pass
    assert kv_of(world).locked == 0


def test_a_row_that_the_worker_drops_without_a_cause_is_an_error_of_its_request() -> None:
    world = World(Settings(step_tokens=64), blocks=40, block_tokens=4)
    id = world.submit(words(5, 1), 30)
    world.finish_plan(lambda row: RowResult(row.key, dropped=True))
    assert reason_of(world, id) == "error"
    while world.turn():
        pass
    assert kv_of(world).locked == 0


def test_forced_retractions_wait_for_a_moment_without_a_plan() -> None:
    world = World(Settings(step_tokens=64, retract_every=3), blocks=40, block_tokens=4)
    ids = [world.submit(words(9, i), 20) for i in range(3)]
    world.settle()
    assert counter(world, "retracted_by_force") >= 4
    assert all(len(world.sent[id].tokens) == 20 for id in ids)


@pytest.mark.parametrize("plans_out", [1, 2])
def test_no_more_plans_are_out_than_the_worker_may_have(plans_out: int) -> None:
    world = World(Settings(step_tokens=64, plans_out=plans_out), blocks=40, block_tokens=4)
    world.submit(words(9), 20)
    most = 0
    while world.live():
        most = max(most, len(world.plans))
        world.turn()
    assert most == plans_out
    world.settle()


@pytest.mark.parametrize("plans_out", [0, 3])
def test_other_numbers_of_plans_are_refused(plans_out: int) -> None:
    with pytest.raises(ValueError, match=f"scheduler.plans_out is {plans_out}; write 1 or 2"):
        Settings(plans_out=plans_out)
