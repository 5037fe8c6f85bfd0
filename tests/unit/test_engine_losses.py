"""A request that kills every worker ends alone; who was only beside it, or gets further each time, goes on."""

from services.scheduler.settings import Settings
from tests.engine_kit import counter, words
from tests.scheduler_world import World

SMALL = Settings(step_tokens=16)


def keys_of_plan(world: World) -> list[str]:
    assert world.plan is not None
    return [world.ids[row.key] for row in world.plan.rows]


def live_with(world: World, poison: str, deaths: int) -> int:
    """Turns until nothing is left to do; each step with `poison` kills the worker -> how often it did."""
    died = 0
    while world.live():
        if world.plan is not None and poison in keys_of_plan(world):
            died += 1
            assert died <= deaths, "it kills for ever"
            world.kill_worker()
            world.start_worker()
        else:
            assert world.turn()
    return died


def test_a_request_that_kills_the_worker_three_times_ends_alone_and_says_how_often() -> None:
    world = World(SMALL, blocks=40)
    ids = [world.submit(words(5, salt), 6) for salt in range(3)]
    world.finish_plan()
    world.finish_plan()
    assert keys_of_plan(world) == ids
    assert live_with(world, ids[1], 3) == 3
    finish = world.sent[ids[1]].finish
    assert finish is not None
    assert finish.reason == "error"
    assert finish.error is not None
    assert finish.error[0] == "worker_lost"
    assert "3 times" in finish.error[1]
    world.settle()
    for id in (ids[0], ids[2]):
        assert len(world.sent[id].tokens) == 6
    assert counter(world, "finished_error") == 1


def test_a_request_that_kills_in_its_second_chunk_ends_though_the_first_is_computed_again_each_time() -> None:
    world = World(SMALL, blocks=40)
    poison = world.submit(words(40), 2)
    for _ in range(3):
        world.finish_plan()
        world.kill_worker()
        world.start_worker()
    finish = world.sent[poison].finish
    assert finish is not None
    assert finish.error is not None
    assert finish.error[0] == "worker_lost"


def test_who_was_in_a_lost_step_runs_alone_until_it_gets_further() -> None:
    world = World(SMALL, blocks=40)
    first, second = world.submit(words(5, 1), 6), world.submit(words(5, 2), 6)
    world.finish_plan()
    world.finish_plan()
    world.kill_worker()
    world.start_worker()
    third = world.submit(words(5, 3), 6)
    seen = []
    for _ in range(3):
        seen.append(keys_of_plan(world))
        world.finish_plan()
    assert seen == [[first], [second], [first, second, third]]
    world.settle()


def test_requests_that_get_further_in_each_life_of_the_worker_never_end_by_its_deaths() -> None:
    world = World(SMALL, blocks=40)
    ids = [world.submit(words(5, salt), 20) for salt in range(3)]
    deaths = 0
    while world.live():
        for _ in range(5):
            world.step()
        if world.live():
            world.kill_worker()
            world.start_worker()
            deaths += 1
    assert deaths == 9
    for id in ids:
        assert len(world.sent[id].tokens) == 20
    assert counter(world, "finished_error") == 0
