"""A clear: nothing from before it is found, attached or published any more, on no tier."""

import pytest

from tests.engine_kit import by_tier, cached_tokens, counter, kv_of, stored, warm, words


def test_a_clear_lets_running_requests_end_and_forgets_the_rest() -> None:
    world = stored()
    prompt = words(33)
    world.submit(prompt, 1)
    world.settle()
    running = world.submit(prompt, 20)
    world.step()
    assert world.call("clear", world.now, None) == 8
    assert kv_of(world).cached == 0
    while world.live():
        world.turn()
    lookups = counter(world, "lookups")
    between = world.submit(prompt, 1)  # the store has not answered the clear yet: it is not asked
    while world.live():
        world.turn()
    assert counter(world, "lookups") == lookups
    assert cached_tokens(world, between) == 0
    world.call("cleared", world.now, world.store.clear())
    world.settle()
    assert len(world.sent[running].tokens) == 20
    world.start_worker()
    after = world.submit(prompt, 1)
    world.settle()
    assert by_tier(world, after) == {"device": 0, "host": 32, "disk": 0}  # what was computed after the clear


@pytest.mark.parametrize("stage", ["lookup", "load", "reserve", "save"])
def test_a_clear_voids_what_is_on_its_way(stage: str) -> None:
    world = stored()
    prompt = words(33)
    if stage in ("lookup", "load"):
        prompt = warm(world)
    id = world.submit(prompt, 1)
    if stage != "lookup":
        world.answer_ask()
    if stage in ("reserve", "save"):
        world.finish_plan()
    if stage == "save":
        world.answer_ask()
    world.call("clear", world.now, None)
    world.call("cleared", world.now, world.store.clear())
    world.settle()
    assert cached_tokens(world, id) == 0
    assert all(slot.state != "granted" for slot in world.store.slots.values())


def test_answers_of_another_clear_epoch_are_refused() -> None:
    world = stored()
    prompt = warm(world)
    world.submit(prompt, 1)
    old = world.store.epoch
    world.store.epoch = old - 1
    world.answer_ask()
    world.store.epoch = old
    assert counter(world, "lookups_stale") == 1
    assert not world.store.leases
    world.settle()


@pytest.mark.parametrize("store_restarts", [False, True])
def test_of_two_clears_at_once_the_first_answer_allows_no_lookup_yet(store_restarts: bool) -> None:
    world = stored()
    prompt = warm(world)
    for _ in range(2):
        world.call("clear", world.now, None)
    if store_restarts:
        world.kill_store()
        world.start_store()
    first, second = world.store.epoch, world.store.clear()
    lookups = counter(world, "lookups")
    world.call("cleared", world.now, None if store_restarts else first)
    world.submit(prompt, 1)
    while world.live():
        world.turn()
    assert counter(world, "lookups") == lookups
    world.call("cleared", world.now, second)
    world.start_worker()
    world.submit(prompt, 1)
    world.settle()
    assert counter(world, "lookups") > lookups


def test_answers_to_clears_in_another_order_keep_the_later_epoch() -> None:
    world = stored()
    for _ in range(2):
        world.call("clear", world.now, None)
    first, second = world.store.clear(), world.store.clear()
    world.call("cleared", world.now, second)
    world.call("cleared", world.now, first)
    store = world.engine._desk.store
    assert store is not None
    assert store.epoch == second
