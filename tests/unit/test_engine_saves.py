"""The engine saves each full block once, and a store that is full, slow or dead costs nothing but the save."""

import pytest

from services.scheduler.events import Ask
from services.scheduler.settings import Settings
from shared.messages.base import split_identities, unpack_u32, unpack_u64
from shared.messages.store import Commit, Reserve
from tests.engine_kit import by_tier, counter, stored, warm, words
from tests.scheduler_world import World


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
    assert (counter(world, "save_committed"), counter(world, "save_full")) == (3, 1)
    assert (counter(world, "save_orphaned"), counter(world, "save_offered")) == (4, 8)


def test_a_block_whose_ancestor_the_store_has_lost_is_saved_with_its_whole_line() -> None:
    world = stored()
    prompt = words(33)
    world.submit(prompt, 1)
    world.settle()
    world.store.lose(2)
    world.submit([*prompt, 1, 2, 3, 4], 1)
    world.settle()
    assert counter(world, "save_orphaned") == 0  # the store still has the direct parent of the new block
    while world.store.host:
        world.store.lose(0)
    world.submit([*prompt, 1, 2, 3, 4, 5, 6, 7, 8], 1)
    world.settle()
    assert counter(world, "save_orphaned") == 1
    assert len(world.store.host) == 10


def test_a_full_store_is_not_offered_lines_for_ever() -> None:
    world = stored()
    prompt = words(33)
    world.submit(prompt, 1)
    world.settle()
    while world.store.host:
        world.store.lose(0)
    world.store.capacity = 0
    offered = counter(world, "save_offered")
    world.submit(prompt, 40)
    world.settle()
    assert counter(world, "save_orphaned") > 5
    assert counter(world, "save_offered") - offered <= 10 + 2 * 9


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


@pytest.mark.parametrize("arrived", [False, True])
def test_an_unanswered_commit_leaves_no_slot_granted(arrived: bool) -> None:
    world = stored()
    world.submit(words(33), 1)
    world.answer_ask()
    world.finish_plan()
    world.answer_ask()
    world.finish_transfer()
    commit = world.asks[0].message
    assert isinstance(commit, Commit)
    if arrived:
        world.store.answer(commit)
    world.lose_ask()
    world.advance(5.0)
    assert len(world.store.slots) == (8 if arrived else 0)  # it was abandoned, which a committed one ignores
    world.submit(words(17, 4), 1)  # any answer brings the rest back
    world.settle()
    assert len(world.store.host) == 12
    assert counter(world, "save_have") == (8 if arrived else 0)


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


def test_an_idle_engine_offers_again_by_itself_what_the_store_did_not_answer() -> None:
    world = World(Settings(step_tokens=64, store_s=5.0), blocks=40, block_tokens=4, store=True)
    world.mute = True
    world.submit(words(33), 1)
    while world.live():
        world.advance(0.05)
        world.turn()
    assert world.engine.idle
    while world.asks:  # the store loses every question
        world.lose_ask()
    gaps = []
    for _ in range(4):
        begun = world.now
        while not world.asks:
            at = world.engine.next_deadline()
            assert at is not None
            world.advance(max(0.0, at - world.now))
        gaps.append(round(world.now - begun))
        while world.asks:
            world.lose_ask()
    assert gaps[1:] == [15, 25, 45]  # 5 s until it counts as lost, and ever longer until it is offered again
    world.mute = False
    world.settle()
    while not counter(world, "save_committed"):
        at = world.engine.next_deadline()
        assert at is not None
        world.advance(at - world.now)
        world.settle()
    assert len(world.store.host) == 8
    assert counter(world, "save_retries") == 5
