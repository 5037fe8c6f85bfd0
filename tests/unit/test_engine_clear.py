"""A clear: nothing from before it is found, attached or published any more, on no tier."""

from array import array
from typing import Any

import pytest

from services.scheduler.settings import Settings
from services.scheduler.target import NoTarget, Target
from shared.identity import LOCAL, namespace_salt
from shared.identity import root as root_of
from shared.messages.store import ClearCache
from shared.scope import of_parts
from tests.engine_kit import by_tier, cached_tokens, counter, kv_of, stored, warm, words
from tests.scheduler_world import KEY, World
from tests.sim_store import SimStore


def test_a_clear_lets_running_requests_end_and_forgets_the_rest() -> None:
    world = stored()
    prompt = words(33)
    world.submit(prompt, 1)
    world.settle()
    running = world.submit(prompt, 20)
    world.step()
    assert world.call("clear", world.now, Target()) == 8
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
    world.call("clear", world.now, Target())
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
        world.call("clear", world.now, Target())
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
        world.call("clear", world.now, Target())
    first, second = world.store.clear(), world.store.clear()
    world.call("cleared", world.now, second)
    world.call("cleared", world.now, first)
    store = world.engine._desk.store
    assert store is not None
    assert store.epoch == second


# --- scopes -------------------------------------------------------------------------------------------------------

FINGERPRINT = b"f" * 32
ALICE = namespace_salt(KEY, "alice")
ALICE_S = namespace_salt(KEY, "alice", "s")
OURS_S = namespace_salt(KEY, LOCAL, "s")


def ask_clear(world: World, **asked: Any) -> int:
    """Device blocks that a clear drops; the store, which is simulated without scopes, is asked nothing."""
    dropped: int = world.call("clear", world.now, world.engine.target(ClearCache(**asked)))
    world.call("cleared", world.now, world.store.epoch)
    return dropped


@pytest.mark.parametrize(
    ("asked", "cleared"),
    [
        ({"what": "all"}, {b"", OURS_S, ALICE, ALICE_S}),
        ({"what": "model"}, {b"", OURS_S, ALICE, ALICE_S}),
        ({"what": "salt"}, {b""}),
        ({"what": "salt", "cache_salt": "s"}, {OURS_S}),
        ({"what": "salt", "principal": "alice"}, {ALICE}),
        ({"what": "salt", "principal": "alice", "cache_salt": "s"}, {ALICE_S}),
        ({"what": "tenant"}, {b"", OURS_S}),
        ({"what": "tenant", "principal": "alice"}, {ALICE, ALICE_S}),
        ({"what": "tenant", "principal": "bob"}, set()),
    ],
)
def test_w14_a_clear_reaches_the_namespaces_of_its_scope_and_no_other(
    asked: dict[str, Any], cleared: set[bytes]
) -> None:
    world = World(Settings(step_tokens=64), blocks=64, block_tokens=4)
    prompt = words(20)
    for salt in (b"", OURS_S, ALICE, ALICE_S):
        world.submit(prompt, 1, salt=salt)
    world.settle()
    assert ask_clear(world, **asked) == 5 * len(cleared)
    for salt in (b"", OURS_S, ALICE, ALICE_S):
        id = world.submit(prompt, 1, salt=salt)
        world.settle()
        assert cached_tokens(world, id) == (0 if salt in cleared else 16)


def test_w14_a_clear_of_another_model_reaches_nothing_here() -> None:
    here = of_parts(KEY, fingerprint=FINGERPRINT)
    other = of_parts(KEY, fingerprint=b"g" * 32)
    for salt in (b"", OURS_S, ALICE_S):
        root = root_of(KEY, FINGERPRINT, adapter="lora", salt=salt)
        assert here.covers(root)
        assert not other.covers(root)


def test_w14_a_clear_by_prefix_takes_all_that_begins_with_its_first_block() -> None:
    world = World(Settings(step_tokens=64), blocks=64, block_tokens=4)
    long, other = words(20), words(20, 1)
    branch = [*long[:8], *words(12, 2)]
    for prompt, salt in ((long, b""), (branch, b""), (other, b""), (long, ALICE)):
        world.submit(prompt, 1, salt=salt)
    world.settle()
    assert ask_clear(world, what="prefix", ids=array("I", long[:7]).tobytes()) == 5 + 3
    found = []
    for prompt, salt in ((long, b""), (branch, b""), (other, b""), (long, ALICE)):
        id = world.submit(prompt, 1, salt=salt)
        world.settle()
        found.append(cached_tokens(world, id))
    assert found == [0, 8, 16, 16]  # the branch shares two blocks of what was computed anew


@pytest.mark.parametrize("tokens_before", [3, 20])
def test_w14_a_request_that_runs_through_a_cleared_prefix_ends_and_inserts_nothing(tokens_before: int) -> None:
    world = World(Settings(step_tokens=4), blocks=64, block_tokens=4)
    prompt = words(20)
    neighbour = world.submit(words(20, 1), 30)
    running = world.submit(prompt[:tokens_before], 20)
    while not world.sent[running].tokens:
        world.turn()
    begun = [*prompt[:tokens_before], *world.sent[running].tokens]
    first = [*begun, *words(4)][:4] if len(begun) < 4 else begun[:4]
    ask_clear(world, what="prefix", ids=array("I", first).tobytes())
    world.settle()
    assert len(world.sent[running].tokens) == 20
    assert len(world.sent[neighbour].tokens) == 30
    everything = [*prompt[:tokens_before], *world.sent[running].tokens]
    again = world.submit([*everything[:4], 0], 1)
    world.settle()
    assert cached_tokens(world, again) == 0
    kept = world.submit([*words(20, 1), 0], 1)
    world.settle()
    assert cached_tokens(world, kept) == 20


def test_a_clear_that_can_not_be_meant_says_why() -> None:
    world = World(Settings(), block_tokens=4)
    with pytest.raises(NoTarget, match="2 tokens; the cache holds blocks of 4; give 2 more"):
        world.engine.target(ClearCache(what="prefix", ids=bytes(8)))
    with pytest.raises(NoTarget, match="ids"):
        world.engine.target(ClearCache(what="prefix", ids=bytes(9)))
    loading = World(Settings(), worker=False)
    for what in ("model", "prefix"):
        with pytest.raises(NoTarget, match="no worker has loaded a model"):
            loading.engine.target(ClearCache(what=what, ids=bytes(64)))
    assert loading.engine.target(ClearCache(what="salt")).scope.mask


@pytest.mark.parametrize("how", ["lookup", "reconnect"])
def test_w14_a_clear_that_somebody_else_made_is_heard_by_its_epoch(how: str) -> None:
    world = stored()
    prompt = words(33)
    world.submit(prompt, 1)
    world.settle()
    world.store.clear()
    if how == "lookup":
        world.submit(words(33, 1), 1)
        world.settle()
    else:
        world.kill_store()
        world.start_store()
    assert counter(world, "clears_heard") == 1
    again = world.submit(prompt, 1)
    world.settle()
    assert cached_tokens(world, again) == 0
    world.start_worker()
    saved = world.submit(prompt, 1)
    world.settle()
    assert by_tier(world, saved) == {"device": 0, "host": 32, "disk": 0}
    assert counter(world, "clears_heard") == 1


def test_a_store_that_lost_its_files_counts_its_epochs_anew() -> None:
    world = stored()
    world.call("clear", world.now, Target())
    world.call("cleared", world.now, world.store.clear())
    prompt = words(33)
    world.submit(prompt, 1)
    world.settle()
    world.kill_store()
    world.store = SimStore(incarnation=world.store.incarnation + 1, epoch=0, arena_key="new")
    world.start_store()
    world.settle()
    again = world.submit(prompt, 1)
    world.settle()
    assert cached_tokens(world, again) == 32
    assert counter(world, "clears_heard") == 0
    assert world.store.host
