"""A request that kills every worker ends alone; who was only beside it, or gets further each time, goes on."""

from services.scheduler.settings import Settings
from tests.engine_kit import by_tier, cached_tokens, counter, stored, warm, words
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


def die_in_load(world: World) -> None:
    """Turns until a load is being copied, and kills the worker in it."""
    while not any(not transfer.save for transfer, _ in world.transfers):
        assert world.turn()
    world.kill_worker()
    world.start_worker()


def test_a_load_in_which_the_worker_dies_twice_is_given_up_and_its_blocks_are_not_read_again() -> None:
    world = stored()
    prompt = warm(world)
    id = world.submit(prompt, 3)
    die_in_load(world)
    assert counter(world, "loads_lethal") == 0
    die_in_load(world)
    assert counter(world, "loads_lethal") == 1
    assert not world.store.host  # what was copied is quarantined
    world.settle()
    assert cached_tokens(world, id) == 0
    world.start_worker()
    again = world.submit(prompt, 3)
    world.settle()
    assert by_tier(world, again)["host"] == 32  # saved anew


def test_who_runs_beside_a_load_that_kills_the_worker_is_not_blamed_for_it() -> None:
    world = stored(max_loads=1)
    prompts = [warm(world, salt=salt) for salt in range(3)]
    beside = world.submit(words(9, 77), 30, no_read=True)
    assert world.plan is not None
    for prompt in prompts:
        world.submit(prompt, 2)
    deaths = 0
    while world.live():
        if any(not transfer.save for transfer, _ in world.transfers):
            world.kill_worker()
            world.start_worker()
            deaths += 1
        elif world.asks:
            world.answer_ask()  # before the step that is out
        else:
            assert world.turn()
    assert deaths == 6
    assert len(world.sent[beside].tokens) == 30
    assert counter(world, "finished_error") == 0
    world.settle()


def test_a_load_that_ends_well_forgets_the_death_before_it() -> None:
    world = stored()
    prompt = warm(world)
    id = world.submit(prompt, 3)
    die_in_load(world)
    while not world.sent[id].tokens:
        assert world.turn()
    world.kill_worker()
    world.start_worker()
    die_in_load(world)
    assert counter(world, "loads_lethal") == 0
    world.settle()
    assert by_tier(world, id)["host"] == 32
