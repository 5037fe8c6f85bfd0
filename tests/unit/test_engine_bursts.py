"""Several decode steps a plan, when nobody waits; who comes cuts them short."""

import itertools

import pytest

from services.scheduler.events import ToWorker
from services.scheduler.records import Step
from services.scheduler.settings import Settings
from shared.messages.base import unpack_u32, unpack_u64
from shared.messages.engine import MOST_STEPS, Curtail, Plan, RowResult
from tests.engine_kit import counter, kv_of, words
from tests.scheduler_world import World
from tests.sim_worker import oracle

BURSTS = Settings(step_tokens=16, burst_s=0.05)


def steps_of(world: World) -> list[int]:
    return [effect.steps for effect in world.effects if isinstance(effect, Plan)]


def curtails(world: World) -> list[Curtail]:
    messages = [effect.message for effect in world.effects if isinstance(effect, ToWorker)]
    return [message for message in messages if isinstance(message, Curtail)]


def decoding(world: World, length: int = 200, **options: object) -> str:
    """A request that has two plans of several steps out."""
    id = world.submit(words(9), length, **options)  # type: ignore[arg-type]
    while not all(plan.steps > 1 for plan, _ in world.plans):
        world.finish_plan()
    assert len(world.plans) == 2
    return id


def test_one_who_is_alone_needs_an_eighth_of_the_plans_and_of_the_journal_s_records() -> None:
    world = World(BURSTS, blocks=60, block_tokens=4)
    id = world.submit(words(9), 83, logprobs=0)
    world.settle()
    assert world.sent[id].tokens == oracle(words(9), 83)
    assert steps_of(world) == [1, 1, 1] + [MOST_STEPS] * 10  # nobody knows at first how long a decode takes
    assert counter(world, "steps") == 83
    records = [record for record in world.journal if isinstance(record, Step)]
    assert [len(record.rows[0].ids) // 4 for record in records] == [1, 1, 1, *[MOST_STEPS] * 10]
    assert all(len(record.rows[0].logprobs or ()) == len(record.rows[0].ids) // 4 for record in records)


@pytest.mark.parametrize(("token_s", "steps"), [(0.005, 8), (0.012, 4), (0.02, 2), (0.03, 1), (0.3, 1)])
def test_a_plan_takes_about_as_long_as_a_burst_may(token_s: float, steps: int) -> None:
    world = World(BURSTS, blocks=60, block_tokens=4)
    assert world.worker is not None
    world.worker.token_s = token_s
    world.submit(words(9), 100)
    for _ in range(5):
        world.finish_plan()
    assert [plan.steps for plan, _ in world.plans] == [steps] * 2
    world.settle()


def test_no_plan_goes_beyond_anybody_s_last_token() -> None:
    world = World(BURSTS, blocks=60, block_tokens=4, max_context=60)
    ids = [world.submit(words(5, i), 20 + 7 * i) for i in range(3)]
    world.submit(words(40), 100)  # ends at the context's end
    world.settle()
    assert max(steps_of(world)) > 1
    assert counter(world, "dropped_rows") == 0
    assert [len(world.sent[id].tokens) for id in ids] == [20, 27, 34]


@pytest.mark.parametrize("left", [1, 3, 100])
def test_who_comes_cuts_the_plans_short_and_is_in_the_next_one(left: int) -> None:
    world = World(BURSTS, blocks=60, block_tokens=4)
    first = decoding(world, 64)
    before, world.steps_left = len(world.sent[first].tokens), left
    second = world.submit(words(9, 1), 30)
    third = world.submit(words(9, 2), 30)
    assert [curtail.seq for curtail in curtails(world)] == [world.plans[-1][0].seq]  # one for all who come meanwhile
    world.finish_plan()
    assert len(world.sent[first].tokens) - before == max(1, MOST_STEPS - left)
    newest = world.plans[-1][0]
    assert {world.ids[row.key] for row in newest.rows} >= {second}
    assert newest.steps == 1
    plain = [effect for effect in world.effects if isinstance(effect, Plan)][-1]
    assert len(unpack_u64(plain.goes_on)) == 1  # what was told of the first request still holds
    world.settle()
    assert world.sent[first].tokens == oracle(words(9), 64)
    assert world.sent[second].tokens == oracle(words(9, 1), 30)
    assert world.sent[third].tokens == oracle(words(9, 2), 30)


def test_a_stop_id_within_a_plan_ends_the_request_there() -> None:
    answer = oracle(words(9), 60)
    stop = next(token for i, token in enumerate(answer) if i >= 12 and token not in answer[:i])
    at = answer.index(stop) + 1
    world = World(BURSTS, blocks=60, block_tokens=4)
    id = world.submit(words(9), 60, stop_ids=(stop,))
    world.settle()
    assert world.sent[id].tokens == answer[:at]
    assert kv_of(world).locked == 0
    told = [unpack_u32(row.ids) for record in world.journal if isinstance(record, Step) for row in record.rows]
    assert [token for ids in told for token in ids] == answer[:at]


def test_one_row_that_fails_in_the_middle_ends_its_request_with_what_it_had() -> None:
    world = World(BURSTS, blocks=60, block_tokens=4)
    id = decoding(world)
    before, numbers = len(world.sent[id].tokens), itertools.count()

    def fails(row: RowResult) -> RowResult:
        number = next(numbers)
        return row if number < 3 else RowResult(row.key, error="no more" if number == 3 else None, dropped=number > 3)

    world.finish_plan(fails)
    finish = world.sent[id].finish
    assert finish is not None
    assert finish.error == ("internal", "no more")
    assert len(world.sent[id].tokens) == before + 3
    while world.turn():
        pass
    assert kv_of(world).locked == 0


def test_a_worker_that_dies_in_a_long_plan_meets_its_suspects_in_single_steps() -> None:
    world = World(BURSTS, blocks=60, block_tokens=4)
    id = decoding(world, 60)
    world.start_worker()
    assert [plan.steps for plan, _ in world.plans] == [1]
    world.settle()
    assert world.sent[id].tokens == oracle(words(9), 60)


def test_a_plan_whose_blocks_are_not_to_be_had_is_for_one_step() -> None:
    """Nobody is retracted for the sake of a longer plan."""
    world = World(BURSTS, blocks=12, block_tokens=2)
    id = world.submit(words(9), 14)
    world.settle()
    assert counter(world, "retracted") == 0
    assert world.sent[id].tokens == oracle(words(9), 14)
