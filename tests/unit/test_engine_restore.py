"""Loaded, computed, or both from the two ends: the engine does what the forecast says, and the tokens are the same."""

from typing import Any

import pytest

from services.scheduler.restore.rates import Rates
from services.scheduler.settings import Restore, Settings
from shared.messages.base import unpack_u32
from tests.engine_kit import by_tier, counter, warm, words
from tests.scheduler_world import World

BLOCK = 4


def rates(world: World, token_s: float, block_s: float) -> dict[str, Any]:
    """Of the world's kind of worker."""
    made = Rates()
    for count in (1, 2, 4, 8, 16, 32):
        made.note_step(BLOCK, count * BLOCK, token_s * BLOCK)
        made.note_load(count, 0, block_s * count)
        made.note_load(0, count, block_s * count)
    return {world.facts.fingerprint.hex(): made.plain()}


def measured(token_s: float, block_s: float, *, restore: Restore = "auto", **options: Any) -> tuple[World, list[int]]:
    """A prompt of 8 blocks that only the disk holds, in a world that knows how long everything takes."""
    world = World(Settings(step_tokens=8, restore=restore, **options), blocks=40, block_tokens=BLOCK, store=True)
    prompt = warm(world, spill=True)
    world.engine.recall(rates(world, token_s, block_s))
    world.start_worker()
    return world, prompt


def planned(world: World) -> list[tuple[int, int]]:
    """(start, tokens) of the rows of the plan that is out."""
    assert world.plan is not None
    return [(row.start, len(unpack_u32(row.ids))) for row in world.plan.rows]


def test_a_prefix_that_is_quicker_computed_is_not_loaded() -> None:
    world, prompt = measured(token_s=1e-5, block_s=1.0)
    id = world.submit(prompt, 2)
    world.answer_ask()
    assert planned(world) == [(0, 8)]
    assert not world.store.leases
    world.settle()
    assert by_tier(world, id) == {"device": 0, "host": 0, "disk": 0}
    assert (counter(world, "loads_declined"), counter(world, "loads")) == (1, 0)


def test_a_prefix_that_is_quicker_loaded_is_waited_for() -> None:
    world, prompt = measured(token_s=1.0, block_s=1e-3)
    id = world.submit(prompt, 2)
    world.answer_ask()
    assert world.plan is None
    world.settle()
    assert by_tier(world, id) == {"device": 0, "host": 0, "disk": 32}
    assert counter(world, "beside_tokens") == 0


def test_front_and_back_meet() -> None:
    world, prompt = measured(token_s=0.25, block_s=1.0, restore="both")
    id = world.submit(prompt, 2)
    world.answer_ask()
    assert planned(world) == [(0, 8)]
    for _ in range(2):
        world.now += 1.0
        world.stage()
        world.finish_transfer()
    world.finish_plan()
    world.settle()
    tiers = by_tier(world, id)
    assert 8 <= tiers["disk"] < 32
    assert tiers["disk"] + counter(world, "beside_tokens") == 32
    assert (counter(world, "loads"), counter(world, "loads_beside"), counter(world, "loads_declined")) == (1, 1, 0)


@pytest.mark.parametrize("then", ["cancel", "clear", "kill worker", "kill store", "late", "lose"])
def test_whatever_happens_to_the_load_the_tokens_are_the_same(then: str) -> None:
    world, prompt = measured(token_s=0.25, block_s=1.0, restore="both")
    id = world.submit(prompt, 3)
    world.answer_ask()
    world.stage()
    world.stage()
    world.finish_plan()
    match then:
        case "cancel":
            world.cancel(id)
        case "clear":
            world.clear()
        case "kill worker":
            world.kill_worker()
            world.start_worker()
        case "kill store":
            world.kill_store()
        case "late":
            world.stalled = True
        case "lose":
            world.stage(fail=True)
    world.settle()  # which compares with what is computed without a cache


def test_a_load_that_stands_still_is_computed_against_long_before_it_is_given_up() -> None:
    world, prompt = measured(token_s=0.01, block_s=1e-3, load_s=1000.0)
    id = world.submit(prompt, 2)
    world.answer_ask()
    assert world.plan is None
    begun = world.now
    while world.plan is None:
        at = world.engine.next_deadline()
        assert at is not None
        world.advance(at - world.now)
    assert world.now - begun < 1.0
    world.stalled = True
    world.settle()
    assert by_tier(world, id)["disk"] == 0
    assert counter(world, "beside_tokens") == 32


def test_what_is_measured_is_known_to_the_next_life() -> None:
    world = World(Settings(step_tokens=64, restore="auto"), blocks=60, block_tokens=BLOCK, store=True)
    assert world.worker is not None
    world.worker.token_s = 0.01
    world.submit(words(65, 1), 1)
    world.answer_ask()
    world.now += 0.64
    world.finish_plan()
    prompt = warm(world, spill=True)
    world.submit(prompt, 1)
    world.answer_ask()
    while world.store.staging:
        world.now += 0.125
        world.stage()
    world.settle()
    saved = world.engine.rates()[world.facts.fingerprint.hex()]
    known = Rates.of(saved)
    assert known.compute_s(0, 64) == pytest.approx(0.64)
    assert known.load_s(0, 8) == pytest.approx(1.0)
    again = World(Settings(step_tokens=64, restore="auto"), blocks=60, block_tokens=BLOCK, worker=False)
    again.engine.recall({"00": {"prefill": "?"}} | world.engine.rates())
    again.start_worker()
    assert again.engine.rates()[world.facts.fingerprint.hex()] == saved


def test_what_a_request_loads_after_its_worker_died_is_no_hit_beside_its_first_ones() -> None:
    world, prompt = measured(token_s=0.01, block_s=1e-3, restore="load")
    world.submit(prompt, 2)
    world.settle()  # all of it is on the device now, and in the store
    id = world.submit([*prompt, 1, 2], 12)
    assert world.plan is not None
    cached = counter(world, "cached_device")
    assert cached >= 8 * BLOCK
    world.kill_worker()
    world.start_worker()
    world.settle()
    assert counter(world, "loads") == 2  # it was loaded again
    assert by_tier(world, id) == {"device": cached, "host": 0, "disk": 0}
