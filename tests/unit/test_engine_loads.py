"""The engine loads what the store has; a store that is slow, silent, wrong or dead is a bounded wait and a miss."""

import msgspec
import pytest

from services.scheduler.settings import Settings
from shared.messages.base import split_identities, unpack_u32
from shared.messages.store import Lookup
from tests.engine_kit import by_tier, cached_tokens, counter, stored, warm, words
from tests.scheduler_world import World


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
def test_a_bad_block_is_computed_and_reported_and_those_around_it_are_used(bad: int) -> None:
    world = stored()
    prompt = warm(world)
    world.store.corrupt(bad)
    before = counter(world, "computed_tokens")
    id = world.submit(prompt, 2)
    world.settle()
    assert by_tier(world, id)["host"] == 28
    assert counter(world, "load_blocks_bad") == 1
    assert counter(world, "computed_tokens") - before == 4 + 1 + 1
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


@pytest.mark.parametrize(("token_s", "waits"), [(0.0, 0.05), (0.001, 0.05), (0.1, 0.4), (10.0, 2.0)])
def test_a_lookup_is_waited_for_by_what_it_may_spare(token_s: float, waits: float) -> None:
    world = stored(load_s=2.0)
    prompt = warm(world)  # 33 tokens, of which 32 may come from the store
    world.facts = msgspec.structs.replace(world.facts, token_s=token_s)
    world.start_worker()
    world.submit(prompt, 2)
    assert world.engine.next_deadline() == pytest.approx(world.now + waits)
    world.advance(waits)
    assert world.plan is not None


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
    assert (world.plan.rows[0].start, len(unpack_u32(world.plan.rows[0].ids))) == (0, 28)
    assert (counter(world, "load_timeouts"), counter(world, "load_blocks_missing")) == (1, 7)
    assert not world.store.leases
    world.settle()
    assert by_tier(world, id) == {"device": 0, "host": 0, "disk": 4}  # what had arrived is used


def test_a_load_is_given_up_when_it_stands_still_not_when_it_is_long() -> None:
    world = stored(load_s=2.0)
    prompt = warm(world, spill=True)
    id = world.submit(prompt, 2)
    world.answer_ask()
    while world.store.staging:
        world.advance(1.9)
        world.stage()
    world.settle()
    assert by_tier(world, id)["disk"] == 32
    assert counter(world, "load_timeouts") == 0


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_prefix_larger_than_the_stores_window_comes_whole(window: int) -> None:
    world = stored()
    prompt = warm(world, spill=True)
    world.store.window = window
    id = world.submit(prompt, 2)
    world.answer_ask()
    for _ in range(window):
        world.stage()
    assert world.store.stage() is None  # until something is given back
    world.settle()
    assert by_tier(world, id) == {"device": 0, "host": 0, "disk": 32}
    assert counter(world, "load_timeouts") == 0


def test_a_host_part_behind_the_disk_part_is_copied_while_that_is_read() -> None:
    world = stored()
    prompt = warm(world)
    for name in list(world.store.host)[:4]:
        world.store.disk[name] = world.store.slots.pop(world.store.host.pop(name)).values
    id = world.submit(prompt, 1)
    world.answer_ask()
    assert [len(transfer.copies) for transfer, _ in world.transfers] == [4]
    world.settle()
    assert by_tier(world, id) == {"device": 0, "host": 16, "disk": 16}


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


def test_a_failed_read_leaves_a_hole_that_is_computed() -> None:
    world = stored()
    prompt = warm(world, spill=True)
    id = world.submit(prompt, 2)
    world.answer_ask()
    world.stage()
    world.stage()
    world.stage(fail=True)
    before = counter(world, "computed_tokens")
    world.settle()
    assert by_tier(world, id)["disk"] == 28
    assert counter(world, "computed_tokens") - before == 4 + 1 + 1
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
    assert world.engine.statistics().breaker.state == "open"
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
    assert world.engine.statistics().breaker.state != "open"
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
    assert world.engine.statistics().breaker.state == "open"
    world.kill_store()
    world.start_store()
    assert world.engine.statistics().breaker.state != "open"


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


@pytest.mark.parametrize("then", ["worker", "clear"])
def test_a_load_survives_the_loss_of_its_store_and_then_more(then: str) -> None:
    world = stored()
    prompt = warm(world)
    id = world.submit(prompt, 2)
    world.answer_ask()
    assert world.transfers
    world.kill_store()
    if then == "worker":
        world.kill_worker()
        world.start_worker()
    else:
        world.clear()
    world.settle()
    assert cached_tokens(world, id) == 0


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


def test_a_found_run_that_no_longer_joins_the_device_prefix_is_not_attached() -> None:
    world = World(Settings(step_tokens=64), blocks=12, block_tokens=4, store=True)
    prompt = warm(world)
    world.submit(prompt[:17], 1)
    world.settle()  # 4 blocks are on the device again
    id = world.submit(prompt, 1)
    assert isinstance(world.asks[0].message, Lookup)
    assert len(split_identities(world.asks[0].message.identities)) == 4
    world.submit(words(42, 7), 1, no_read=True, no_store=True)  # evicts most of them
    world.finish_plan()
    world.answer_ask()
    assert counter(world, "loads_without_room") == 1
    assert not world.store.leases
    world.settle()
    assert by_tier(world, id)["host"] > 16


def test_a_found_run_that_the_device_got_meanwhile_is_not_loaded_again() -> None:
    world = stored()
    prompt = warm(world)
    id = world.submit(prompt, 1)
    world.submit(prompt[:29], 1, no_read=True)  # computes, and publishes, the first 7 blocks
    world.finish_plan()
    world.answer_ask()
    assert len(world.transfers[0][0].copies) == 1
    world.settle()
    assert by_tier(world, id) == {"device": 28, "host": 4, "disk": 0}


def test_at_most_so_many_wait_on_the_store_and_run() -> None:
    world = World(Settings(step_tokens=64, max_running=3, max_loads=2), blocks=80, block_tokens=4, store=True)
    prompts = [words(17, i) for i in range(6)]
    for prompt in prompts:
        world.submit(prompt, 1)
        world.settle()
    world.store.spill()
    world.start_worker()
    ids = [world.submit(prompt, 2) for prompt in prompts]
    assert world.engine.statistics().loading == 2
    while world.live():
        assert world.turn()
        now = world.engine.statistics()
        assert now.loading <= 2
        assert now.running <= 3
    world.settle()
    assert [by_tier(world, id)["disk"] for id in ids] == [16] * 6


def test_what_was_looked_up_for_one_worker_is_not_given_to_one_with_another_fingerprint() -> None:
    world = stored()
    prompt = warm(world)
    id = world.submit(prompt, 1)
    assert world.asks
    world.facts = msgspec.structs.replace(world.facts, fingerprint=b"g" * 32)
    world.start_worker()
    world.answer_ask()  # to the question about the old names
    world.settle()
    assert cached_tokens(world, id) == 0
    assert counter(world, "leases_late") == 1


def test_a06_three_hundred_loads_that_fail_leave_room_for_the_next() -> None:
    world = World(Settings(step_tokens=64, max_loads=2), blocks=24, block_tokens=4, store=True)
    prompt = warm(world, spill=True)
    good = warm(world, 17, salt=9, spill=True)
    for number in range(300):
        id = world.submit(prompt, 1)
        if number % 3 == 0:  # no room: somebody takes it while the lookup is out
            world.submit(words(60, 1000 + number), 10, no_read=True, no_store=True)
            world.answer_ask()
        elif number % 3 == 1:  # aborted while the disk reads
            world.answer_ask()
            world.stage()
            world.cancel(id)
        else:  # the disk fails
            world.answer_ask()
            world.stage(fail=True)
        while world.live():
            assert world.turn()
        world.store.spill()
        world.start_worker()
    assert counter(world, "loads_dropped") == counter(world, "loads_without_room") == 100
    assert world.engine.statistics().loading == 0
    assert not world.store.leases
    id = world.submit(good, 1)
    world.settle()
    assert by_tier(world, id) == {"device": 0, "host": 0, "disk": 16}
