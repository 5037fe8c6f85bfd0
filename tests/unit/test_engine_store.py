"""The engine and the store: saves, loads, and a store that is slow, silent, wrong, or dies."""

import pytest

from services.scheduler.events import Ask
from services.scheduler.settings import Settings
from shared.messages.base import split_identities, unpack_u32, unpack_u64
from shared.messages.store import Commit, Lookup, Reserve
from tests.scheduler_world import World
from tests.unit.test_engine_reuse import cached_tokens, counter, kv_of, words


def warm(world: World, length: int = 33, salt: int = 0, *, spill: bool = False) -> list[int]:
    """A prompt that only the store holds."""
    prompt = words(length, salt)
    world.submit(prompt, 1)
    world.settle()
    if spill:
        world.store.spill()
    world.start_worker()
    return prompt


def by_tier(world: World, id: str) -> dict[str, int]:
    finish = world.sent[id].finish
    assert finish is not None
    return finish.usage.cached_by_tier


def stored(**options: int) -> World:
    return World(Settings(step_tokens=64, **options), blocks=40, block_tokens=4, store=True)


# --- saves --------------------------------------------------------------------------------------------------------


def test_each_full_block_is_saved_once_parents_first() -> None:
    world = stored()
    prompt = words(33)
    world.submit(prompt, 8)
    world.settle()
    seen: list[bytes] = []
    for effect in world.effects:
        if isinstance(effect, Ask) and isinstance(effect.message, Reserve):
            names = split_identities(effect.message.identities)
            parents = split_identities(effect.message.parents)
            for i, parent in enumerate(parents):
                assert parent in (effect.message.root, *seen, *names[:i])
            seen += names
    assert len(seen) == len(world.store.host) == 40 // 4
    world.submit(prompt, 8)
    world.settle()
    assert counter(world, "save_offered") == 10


def test_what_the_store_has_is_not_copied_again() -> None:
    world = stored()
    prompt = warm(world)
    world.submit(prompt, 1, no_read=True)  # computes and publishes all again
    world.settle()
    assert counter(world, "save_have") == counter(world, "save_committed") == 8


def test_a_full_store_is_a_counter_and_no_error() -> None:
    world = stored()
    world.store.capacity = 3
    world.submit(words(33), 2)
    world.settle()
    assert (counter(world, "save_committed"), counter(world, "save_full")) == (3, 5)


def test_a_failed_copy_is_abandoned() -> None:
    world = stored()
    world.submit(words(33), 1)
    while not world.transfers:
        world.turn() if not world.asks else world.answer_ask()
        if world.plan:
            world.finish_plan()
    world.finish_transfer(ok=False)
    world.settle()
    assert counter(world, "save_failed") == counter(world, "save_abandoned") > 0
    assert not world.store.slots


def test_a_block_that_was_evicted_before_its_turn_gives_its_slot_back() -> None:
    world = World(Settings(step_tokens=64), blocks=10, block_tokens=4, store=True)
    world.submit(words(33), 1)
    world.answer_ask()
    world.finish_plan()
    assert isinstance(world.asks[0].message, Reserve)
    world.submit(words(37, 1), 1, no_store=True, no_read=True)  # evicts them all
    world.finish_plan()
    world.answer_ask()
    assert counter(world, "save_evicted") == counter(world, "save_abandoned") == 8
    assert not world.transfers
    world.settle()


def test_a_late_reserve_gives_its_grants_back() -> None:
    world = stored()
    world.submit(words(33), 1)
    world.answer_ask()
    world.finish_plan()
    world.advance(5.0)
    assert counter(world, "save_unanswered") == 8
    world.answer_ask()
    assert counter(world, "save_abandoned") == 8
    assert not world.store.slots


def test_unsaved_blocks_are_offered_again_when_the_store_comes_back() -> None:
    world = stored(save_batch=3)
    world.kill_store()
    world.submit(words(33), 1)
    world.submit(words(33, 1), 1, salt=b"t")
    world.settle()
    assert counter(world, "save_offered") == 0
    world.start_store()
    assert {
        len(split_identities(ask.message.identities)) for ask in world.asks if isinstance(ask.message, Reserve)
    } == {3}
    world.settle()
    assert len(world.store.host) == 16
    world.kill_store()
    world.start_store()
    world.settle()
    assert counter(world, "save_offered") == 16  # the hints hold: the same arena came back
    world.kill_store(lose_arena=True)
    world.start_store()
    world.settle()
    assert counter(world, "save_offered") == 32
    assert len(world.store.host) == 16


@pytest.mark.parametrize("copied", [False, True])
def test_grants_are_held_over_a_restart_of_the_store(copied: bool) -> None:
    world = stored()
    world.submit(words(33), 1)
    world.answer_ask()
    world.finish_plan()
    world.answer_ask()
    assert len(world.transfers) == 1
    if copied:
        world.finish_transfer()
        assert isinstance(world.asks[0].message, Commit)
    world.kill_store()
    opening = world.engine.open_engine()
    assert opening is not None
    assert len(unpack_u32(opening.held_slots)) == len(unpack_u64(opening.held_generations)) == 8
    world.start_store()
    world.settle()
    assert counter(world, "save_committed") == 8
    assert counter(world, "save_offered") == 8
    assert counter(world, "save_abandoned") == 0


def test_a_commit_that_arrived_before_the_store_died_is_not_lost() -> None:
    world = stored()
    prompt = words(33)
    world.submit(prompt, 1)
    world.answer_ask()
    world.finish_plan()
    world.answer_ask()
    world.finish_transfer()
    world.kill_store(answered=1)
    world.start_store()
    world.settle()
    assert counter(world, "save_have") == 8
    world.start_worker()
    again = world.submit(prompt, 1)
    world.settle()
    assert by_tier(world, again) == {"device": 0, "host": 32, "disk": 0}


@pytest.mark.parametrize("copied", [False, True])
def test_a_dead_worker_abandons_half_made_copies_only(copied: bool) -> None:
    world = stored()
    world.submit(words(33), 1)
    world.answer_ask()
    world.finish_plan()
    world.answer_ask()
    if copied:
        world.finish_transfer()
    world.kill_worker()
    world.start_worker()
    world.settle()
    assert counter(world, "save_abandoned") == (0 if copied else 8)
    assert len(world.store.host) == (8 if copied else 0)


# --- loads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spill", [False, True])
def test_a_prefix_comes_back_from_the_store(spill: bool) -> None:
    world = stored()
    prompt = warm(world, spill=spill)
    id = world.submit([*prompt, 1, 2], 3)
    before = counter(world, "computed_tokens")
    world.settle()
    tier = "disk" if spill else "host"
    assert by_tier(world, id) == {"device": 0, "host": 0, "disk": 0} | {tier: 32}
    assert counter(world, "computed_tokens") - before == 35 - 32 + 2
    assert counter(world, "loads") == 1


def test_device_host_and_disk_serve_one_prompt_together() -> None:
    world = stored()
    prompt = words(49)
    world.submit(prompt[:33], 1)
    world.settle()
    world.store.spill()
    world.submit(prompt, 1)  # its last 4 blocks are in host memory only
    world.settle()
    world.start_worker()
    world.submit(prompt[:17], 1)
    world.settle()
    id = world.submit(prompt, 1)
    world.settle()
    assert by_tier(world, id) == {"device": 16, "host": 16, "disk": 16}


def test_the_host_part_is_copied_while_the_disk_part_is_read() -> None:
    world = stored()
    prompt = words(33)
    world.submit(prompt[:17], 1)
    world.settle()
    world.submit(prompt, 1)
    world.settle()
    for name in list(world.store.host)[4:]:
        world.store.disk[name] = world.store.slots.pop(world.store.host.pop(name)).values
    world.start_worker()
    id = world.submit(prompt, 1)
    world.answer_ask()
    assert len(world.transfers[0][0].copies) == 4
    world.stage()
    world.stage()
    assert [len(transfer.copies) for transfer, _ in world.transfers] == [4, 1, 1]
    world.finish_transfer(1)
    world.settle()
    assert by_tier(world, id) == {"device": 0, "host": 16, "disk": 16}


def test_other_requests_run_while_one_is_loading() -> None:
    world = stored()
    prompt = warm(world, spill=True)
    loading = world.submit(prompt, 2)
    world.answer_ask()
    assert world.store.staging
    other = world.submit(words(9, 5), 2)
    world.lose_ask() if world.asks else None
    world.advance(0.05)
    while world.sent[other].finish is None:
        assert world.step()
    assert world.sent[loading].finish is None
    world.settle()
    assert by_tier(world, loading)["disk"] == 32


@pytest.mark.parametrize("bad", [0, 3, 7])
def test_a_bad_block_ends_the_run_and_is_reported(bad: int) -> None:
    world = stored()
    prompt = warm(world)
    world.store.corrupt(bad)
    id = world.submit(prompt, 2)
    world.settle()
    assert by_tier(world, id)["host"] == 4 * bad
    assert counter(world, "load_blocks_bad") == 1
    again = warm_again(world, prompt)
    assert by_tier(world, again)["host"] == 32  # it was saved anew


def warm_again(world: World, prompt: list[int]) -> str:
    world.start_worker()
    id = world.submit(prompt, 2)
    world.settle()
    return id


def test_a_lookup_that_is_not_answered_costs_a_bounded_wait_and_is_no_error() -> None:
    world = stored()
    prompt = warm(world)
    id = world.submit(prompt, 2)
    assert world.plan is None
    assert world.engine.next_deadline() == world.now + 0.05
    world.advance(0.05)
    assert world.plan is not None
    assert counter(world, "lookup_timeouts") == 1
    world.answer_ask()  # late: its lease goes back
    assert not world.store.leases
    world.settle()
    assert cached_tokens(world, id) == 0


def test_s04_a_store_that_never_delivers_costs_one_bounded_wait() -> None:
    world = stored(load_s=2.0)
    prompt = warm(world, spill=True)
    id = world.submit(prompt, 2)
    world.answer_ask()
    world.stage()
    assert world.plan is None
    world.advance(1.9)
    assert world.plan is None
    world.advance(0.1)
    world.finish_transfer()
    assert world.plan is not None
    assert world.plan.rows[0].start == 4  # what had arrived is used
    assert (counter(world, "load_timeouts"), counter(world, "load_blocks_missing")) == (1, 7)
    assert not world.store.leases
    world.settle()
    assert by_tier(world, id) == {"device": 0, "host": 0, "disk": 4}


def test_the_wait_for_the_disk_follows_the_measured_rate() -> None:
    world = stored(load_s=5.0)
    prompt = warm(world, spill=True)
    world.submit(prompt, 1)
    world.answer_ask()
    while world.store.staging:
        world.advance(0.01)
        world.stage()
    world.settle()
    world.store.spill()
    world.start_worker()
    world.submit(prompt, 1)
    world.answer_ask()
    at = world.engine.next_deadline()
    assert at is not None
    assert at - world.now == pytest.approx(0.05 + 4 * 0.01 * 8)
    world.settle()


def test_a_failed_read_ends_the_run_where_it_is() -> None:
    world = stored()
    prompt = warm(world, spill=True)
    id = world.submit(prompt, 2)
    world.answer_ask()
    world.stage()
    world.stage()
    world.stage(fail=True)
    world.settle()
    assert by_tier(world, id)["disk"] == 8
    assert counter(world, "load_timeouts") == 0


def test_three_timeouts_open_the_breaker_and_an_answered_probe_closes_it() -> None:
    world = stored()
    prompts = [words(33, i) for i in range(8)]
    world.mute = True
    for prompt in prompts[:3]:
        world.submit(prompt, 1)
        world.advance(0.05)
        while world.live():
            world.turn()
    assert world.engine.statistics().breaker_open
    world.asks.clear()
    quick = world.submit(prompts[3], 1)
    assert world.plan is not None  # nobody waits
    while world.live():
        world.turn()
    assert not any(isinstance(ask.message, Lookup) for ask in world.asks)
    world.advance(0.6)
    world.submit(prompts[4], 1)
    assert world.plan is not None
    probes = [i for i, ask in enumerate(world.asks) if isinstance(ask.message, Lookup)]
    assert len(probes) == 1
    world.mute = False
    world.answer_ask(probes[0])
    assert not world.engine.statistics().breaker_open
    world.settle()
    assert cached_tokens(world, quick) == 0
    world.submit(prompts[5], 1)
    assert any(isinstance(ask.message, Lookup) for ask in world.asks)
    world.settle()


def test_a_new_store_closes_the_breaker() -> None:
    world = stored()
    world.mute = True
    for i in range(3):
        world.submit(words(33, i), 1)
        world.advance(0.05)
        while world.live():
            world.turn()
    assert world.engine.statistics().breaker_open
    world.kill_store()
    world.start_store()
    assert not world.engine.statistics().breaker_open


def test_without_a_store_nobody_waits() -> None:
    world = stored()
    prompt = warm(world)
    world.kill_store()
    world.submit(prompt, 1)
    assert world.plan is not None
    world.settle()


def test_a_store_that_dies_in_a_load_leaves_what_was_copied() -> None:
    world = stored()
    prompt = warm(world, spill=True)
    id = world.submit(prompt, 2)
    world.answer_ask()
    world.stage()
    world.stage()
    world.kill_store()
    world.settle()
    assert by_tier(world, id)["disk"] == 8


def test_a_load_without_room_gives_its_lease_back_and_asks_again() -> None:
    world = World(Settings(step_tokens=64), blocks=12, block_tokens=4, store=True)
    prompt = warm(world)
    id = world.submit(prompt, 2)
    greedy = world.submit(words(15, 9), 20, no_read=True)  # takes the room while the lookup is out
    assert world.plan is not None
    world.answer_ask()
    assert counter(world, "loads_without_room") == 1
    assert not world.store.leases
    world.settle()
    assert len(world.sent[greedy].tokens) == 20
    assert by_tier(world, id)["host"] == 32


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
