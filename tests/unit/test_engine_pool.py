"""Cases A and S: no block leaks, nobody starves, and what can't be served says so alone."""

from random import Random

import pytest

from services.scheduler.settings import Settings
from shared.identity import LOCAL
from shared.messages.engine import Journaled
from shared.messages.front import Rejected
from tests.engine_kit import counter, kv_of, words
from tests.scheduler_world import World, prompts
from tests.sim_worker import VOCAB


@pytest.mark.parametrize("size", [1, 16, 128])
def test_a01_mixed_requests_leave_free_plus_cached_equal_total(size: int) -> None:
    settings = Settings(step_tokens=8 * size, max_running=8)
    world = World(settings, blocks=24, block_tokens=size, max_context=12 * size, check=False)
    random = Random(1)
    for prompt in prompts(random, 500 if size < 128 else 120, 5 * size, families=4):
        id = world.submit(prompt, random.randint(1, 4), stop_ids=random.choice([(), (1, 2)]))
        for _ in range(random.randint(0, 4)):
            world.turn()
        if id in world.sent and random.random() < 0.2:
            world.cancel(id)
    world.settle()  # checks free + cached == total, locked == 0
    assert counter(world, "finished_cancelled") >= 5
    assert counter(world, "finished_stop") >= 5


def test_a02_without_a_prefix_cache_nothing_stays_used() -> None:
    settings = Settings(step_tokens=64, prefix_cache=False)
    world = World(settings, blocks=40, block_tokens=4, store=True, check=False)
    for more in (300, 100):
        for i in range(more):
            world.submit(words(5 + i % 30, i % 5), 3)
        world.settle()
        assert kv_of(world).free == kv_of(world).total
    assert counter(world, "cached_device") == counter(world, "lookups") == counter(world, "save_offered") == 0


def test_a07_a_flood_of_saves_with_a_hanging_store_locks_nothing() -> None:
    world = World(Settings(step_tokens=64), blocks=20, block_tokens=4, store=True)
    world.mute = True
    for i in range(30):
        world.submit(words(30, i), 2)
        for _ in range(10):
            world.turn()
            world.advance(0.02)
    while world.live():
        world.turn()
        world.advance(0.02)
    assert kv_of(world).locked == 0
    id = world.submit(words(79, 99), 2)  # as large as the pool
    world.mute = False
    world.settle()
    finish = world.sent[id].finish
    assert finish is not None
    assert finish.reason == "length"


@pytest.mark.parametrize("together", [1, 2])
def test_a10_a_request_that_outgrows_the_pool_ends_alone(together: int) -> None:
    world = World(Settings(step_tokens=64), blocks=8, block_tokens=4, max_context=10_000)
    ids = [world.submit(words(24, i), 1000) for i in range(together)]
    world.settle()
    for id in ids:
        finish = world.sent[id].finish
        assert finish is not None
        assert (finish.reason, finish.usage.completion_tokens) == ("length", 8 * 4 + 1 - 24)
    assert counter(world, "outgrown") == together
    after = world.submit(words(9), 5)
    world.settle()
    assert len(world.sent[after].tokens) == 5


def test_s01_what_never_fits_is_refused_at_once_with_both_numbers() -> None:
    world = World(Settings(step_tokens=64), blocks=20, block_tokens=4, max_context=64 * 4)
    world.submit(words(30 * 4), 5, id="large")
    assert isinstance(world.answer, Rejected)
    assert world.answer.code == "never_fits"
    assert world.answer.numbers == {"prompt_tokens": 120, "pool_tokens": 80}
    world.submit(words(256), 5, id="long")
    assert isinstance(world.answer, Rejected)
    assert world.answer.code == "context_too_long"
    assert world.answer.numbers == {"prompt_tokens": 256, "max_context": 256}
    assert "shorten by 1 " in world.answer.reason
    for i in range(3):
        world.submit(words(9, i), 5)
    world.settle()
    assert counter(world, "finished_length") == 3
    assert counter(world, "accepted") == 3


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_s02_small_requests_pass_a_large_one_that_does_not_fit(policy: str) -> None:
    world = World(Settings(step_tokens=64, policy=policy), blocks=20, block_tokens=4)
    long = world.submit(words(52), 100)  # 13 blocks at once, 20 in the end
    for _ in range(3):
        world.step()
    large = world.submit(words(40, 1), 2)
    tiny = [world.submit(words(3, 10 + i), 2) for i in range(5)]
    while any(world.sent[id].finish is None for id in tiny):
        assert world.turn()
    assert world.sent[long].finish is None
    assert world.sent[large].finish is None
    world.settle()


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_s02_endless_small_requests_do_not_starve_a_large_one(policy: str) -> None:
    settings = Settings(step_tokens=64, policy=policy, max_bypass=10)
    world = World(settings, blocks=20, block_tokens=4)
    for i in range(4):
        world.submit(words(7, i), 20)
    large = world.submit(words(72, 9), 2)
    passed = 0
    while world.sent[large].finish is None:
        while len(world.live()) < 6:
            world.submit(words(7, passed % 3), 8)
            passed += 1
        assert world.turn()
        assert passed < 40
    assert passed >= 10
    world.settle()


def test_s02_small_requests_flow_past_a_large_one_whose_room_is_kept() -> None:
    world = World(Settings(step_tokens=64, max_bypass=3), blocks=40, block_tokens=4)
    long = world.submit(words(80), 60)
    world.step()
    large = world.submit(words(76, 1), 2)  # 19 blocks; the long one holds 20 and more
    small = 0
    while world.sent[long].finish is None:
        while len(world.live()) < 5:
            world.submit(words(3, small), 2)
            small += 1
        assert world.turn()
        assert not world.sent[large].tokens
    assert small > 30
    before = small
    while world.sent[large].finish is None:
        while len(world.live()) < 4:
            world.submit(words(3, small), 2)
            small += 1
        assert world.turn()
    assert small - before < 10
    world.settle()


def test_lpm_serves_the_longest_cached_prefix_first_but_lets_nobody_starve() -> None:
    settings = Settings(step_tokens=16, max_running=1, policy="lpm", max_bypass=5)
    world = World(settings, blocks=40, block_tokens=4)
    stem = words(30)
    world.submit(stem, 1)
    world.settle()
    busy = world.submit(words(9, 50), 4)
    cold = world.submit(words(20, 51), 1)
    warm = [world.submit([*stem, i], 1) for i in range(12)]
    order = []
    while world.live():
        before = set(world.live())
        world.turn()
        order += [id for id in before if world.sent[id].finish is not None]
    assert order[0] == busy
    assert order.index(cold) == 1 + 5
    assert [id for id in order if id in warm] == warm
    world.settle()


def test_retraction_takes_the_newest_and_the_oldest_goes_on() -> None:
    world = World(Settings(step_tokens=64, max_running=4), blocks=10, block_tokens=4)
    ids = [world.submit(words(8, i), 24) for i in range(3)]
    finished: list[str] = []
    while world.live():
        world.turn()
        finished += [id for id in ids if world.sent[id].finish is not None and id not in finished]
    assert counter(world, "retracted") > 0
    assert finished[0] == ids[0]
    world.settle()


def test_overload_is_refused_with_numbers_and_passes() -> None:
    world = World(Settings(step_tokens=4, max_running=1, max_waiting=3), blocks=20, block_tokens=4)
    for i in range(10):
        world.submit(words(9, i), 2)
    assert isinstance(world.answer, Rejected)
    assert world.answer.code == "overloaded"
    assert world.answer.numbers == {"waiting": 3, "max_waiting": 3}
    world.settle()
    world.submit(words(5), 1)
    world.settle()
    assert counter(world, "rejected") == 6


def test_a_user_may_have_so_many_requests_and_others_are_served_all_the_same() -> None:
    world = World(Settings(step_tokens=4, max_running=1, user_requests=3), blocks=20, block_tokens=4)
    for i in range(5):
        world.submit(words(9, i), 2)
    assert isinstance(world.answer, Rejected)
    assert world.answer.code == "overloaded"
    assert world.answer.numbers == {"requests": 3, "user_requests": 3}
    assert "user p" in world.answer.reason
    for principal in ("q", LOCAL, LOCAL, LOCAL, LOCAL):
        world.submit(words(9, 50), 2, principal=principal)
        assert isinstance(world.answer, Journaled), world.answer
    world.settle()
    world.submit(words(5), 1)
    assert isinstance(world.answer, Journaled)
    world.settle()


def test_a_pool_of_another_size_ends_what_can_no_longer_fit() -> None:
    world = World(Settings(step_tokens=64), blocks=20, block_tokens=4)
    ids = [world.submit([i % VOCAB for i in range(length)], 40) for length in (10, 30, 60)]
    for _ in range(6):
        world.turn()
    world.kill_worker()
    late = world.submit(words(60, 5), 3)
    world.facts = type(world.facts)(b"f" * 32, 4, 64, 8, "fp32", 1, 1, 8)
    world.start_worker()
    ends = [world.sent[id].finish for id in (*ids, late)]
    assert [end.reason if end else None for end in ends] == [None, "length", "length", "error"]
    assert ends[3] is not None
    assert ends[3].error is not None
    assert ends[3].error[0] == "never_fits"
    while world.live():
        world.turn()
    assert kv_of(world).locked == 0
