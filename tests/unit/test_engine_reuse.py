"""Cases W and F: what is reused is right, whatever else happens. Every test ends by comparing with the oracle."""

from random import Random

import pytest

from services.scheduler.settings import Settings
from shared.messages.base import unpack_u32
from shared.messages.store import Lookup
from tests.engine_kit import cached_tokens, counter, kv_of, words
from tests.scheduler_world import World, prompts

BLOCK_SIZES = pytest.mark.parametrize("size", [1, 16, 128])


@BLOCK_SIZES
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_w16_evicted_blocks_never_answer_for_their_old_prefix(size: int, policy: str) -> None:
    settings = Settings(step_tokens=4 * size, max_running=4, policy=policy)
    world = World(settings, blocks=8, block_tokens=size, max_context=20 * size, check=size == 1)
    random = Random(16)
    texts = [*prompts(random, 12, 6 * size)]
    for i in range(300 if size < 128 else 60):
        world.submit(texts[random.randrange(12)], random.randint(1, 3))
        if i % 3 == 0:
            world.step()
    world.settle()
    assert kv_of(world).evicted > 0
    assert counter(world, "cached_device") > 0


@pytest.mark.parametrize("no_read", [False, True])
def test_w17_equal_cold_prompts_share_the_kept_blocks(no_read: bool) -> None:
    world = World(Settings(step_tokens=64), blocks=64, block_tokens=16)
    prompt = words(64)
    first = world.submit(prompt, 64)
    second = world.submit(prompt, 64, no_read=no_read)  # without reading it must compute, and insert, the same again
    third = world.submit(words(200, 3), 64)
    world.settle()
    assert world.sent[first].tokens == world.sent[second].tokens
    # made twice in any case: 3 full blocks of output, and the prompt's last, of which one token must be computed
    assert kv_of(world).duplicates == (7 if no_read else 4)
    assert world.sent[third].finish is not None


@pytest.mark.parametrize("early", [True, False])
def test_w21_nothing_is_found_before_its_bytes_are_complete(early: bool) -> None:
    world = World(Settings(step_tokens=400), blocks=64, block_tokens=16, store=True)
    prompt = words(320)
    first = world.submit(prompt, 2)
    world.answer_ask()  # its lookup: nothing
    assert world.plan is not None
    second = world.submit(prompt, 2)
    assert len(world.plan.rows) == 1
    world.finish_plan()  # 20 blocks are full now, and offered
    world.answer_ask()  # the reserve: a copy of each is out, but slow
    assert len(world.transfers) == 1
    if early:
        world.copy_early()
    else:
        world.start_worker()
    third = world.submit(prompt, 2)
    while world.turn():
        assert all(name in world.store.host or not world.store.leases for name in world.store.leased())
    world.settle()
    assert cached_tokens(world, first) == 0
    assert world.sent[first].tokens == world.sent[second].tokens == world.sent[third].tokens


def test_w23_a_load_outlives_its_request_and_its_blocks_wait_for_it() -> None:
    world = World(Settings(step_tokens=64), blocks=8, block_tokens=4, store=True)
    prompt = words(20)
    world.submit(prompt, 1)
    world.settle()
    world.start_worker()  # an empty pool
    aborted = world.submit(prompt, 1)
    world.answer_ask()
    assert len(world.transfers) == 1  # the copies of 4 blocks are out
    assert world.cancel(aborted)
    assert kv_of(world).locked == 4
    flood = world.submit(words(16, 5), 30)  # wants the whole pool
    for _ in range(20):
        world.step()
        world.advance(1.0)
    assert world.sent[flood].finish is None
    assert kv_of(world).free + kv_of(world).cached <= 4
    world.finish_transfer()
    world.settle()
    assert len(world.sent[flood].tokens) == 17  # 33 tokens: the pool's 32 and one without KV
    assert not world.store.leases


def test_w23_a_cancelled_request_keeps_its_blocks_while_its_step_is_out() -> None:
    world = World(Settings(step_tokens=64), blocks=8, block_tokens=4)
    gone = world.submit(words(16), 8)
    assert world.plan is not None
    assert world.cancel(gone)
    assert kv_of(world).locked == 5  # one for the token that the plan behind it feeds
    world.submit(words(20, 2), 2)
    assert kv_of(world).locked == 5
    world.finish_plan()
    assert kv_of(world).locked == 5
    world.finish_plan()
    assert counter(world, "dropped_rows") == 2
    world.settle()
    assert world.sent[gone].tokens == []


@BLOCK_SIZES
@pytest.mark.parametrize("options", [{}, {"no_read": True}, {"no_store": True}])
def test_w25_frequent_retraction_with_small_chunks_changes_nothing(size: int, options: dict[str, bool]) -> None:
    settings = Settings(step_tokens=16, retract_every=3, max_running=4)
    world = World(settings, blocks=max(40, 320 // size), block_tokens=size, max_context=300, check=size > 1)
    for i in range(10 if size < 128 else 3):
        world.submit(words(40 + 7 * i, i % 4), 40 if size < 128 else 10, **options)
    world.settle()
    assert counter(world, "retracted_by_force") >= (20 if size < 128 else 5)


def test_w26_logprobs_and_tokens_stay_in_step_through_retraction() -> None:
    world = World(Settings(step_tokens=16, retract_every=2), blocks=12, block_tokens=4)
    ids = [world.submit(words(10, i), 20, logprobs=2) for i in range(4)]
    world.settle()  # compares the lengths, and that no index was sent twice
    for id in ids:
        whole = world.engine.progress(id, 0)
        assert whole is not None
        assert whole.logprobs is not None
        assert len(whole.logprobs) == len(unpack_u32(whole.ids)) == 20
        assert [value.chosen for value in whole.logprobs] == [-float(10 + i) for i in range(20)]
    assert counter(world, "retracted") > 0
    assert counter(world, "output_tokens") == 80


def test_w32_blocks_of_a_table_are_scattered() -> None:
    world = World(Settings(step_tokens=64, max_running=12), blocks=24, block_tokens=4)
    short = [world.submit(words(4, i), 1 if i % 2 else 30, no_store=True) for i in range(10)]
    while any(world.sent[id].finish is None for id in short[1::2]):
        world.turn()
    prefix = words(10, 77)
    world.submit(prefix, 1)
    hit = world.submit(prefix + words(3, 78), 40)
    tables = []
    for _ in range(2000):
        if world.sent[hit].finish is not None:
            break
        if world.plan is not None:
            tables += [unpack_u32(row.blocks) for row in world.plan.rows if row.start > 20]
        world.turn()
    assert any(len(table) >= 3 and list(table) != list(range(table[0], table[0] + len(table))) for table in tables)
    world.settle()
    assert cached_tokens(world, hit) == 8


def test_a08_a_long_request_that_stores_nothing_leaves_nothing() -> None:
    world = World(Settings(step_tokens=16), blocks=32, block_tokens=4, store=True)
    prompt = words(80)  # 5 chunks
    world.submit(prompt, 5, no_store=True)
    world.settle()
    assert kv_of(world).free == 32
    assert not world.store.host
    later = world.submit(prompt, 5)
    world.settle()
    assert cached_tokens(world, later) == 0


def test_no_read_looks_nothing_up_and_matches_nothing() -> None:
    world = World(Settings(step_tokens=64), blocks=32, block_tokens=4, store=True)
    prompt = words(30)
    world.submit(prompt, 2)
    world.settle()
    before = counter(world, "lookups")
    again = world.submit(prompt, 2, no_read=True)
    world.settle()
    assert cached_tokens(world, again) == 0
    assert counter(world, "lookups") == before


@pytest.mark.parametrize("salts", [(b"", b"a"), (b"a", b"b")])
def test_salts_never_share(salts: tuple[bytes, bytes]) -> None:
    world = World(Settings(step_tokens=64), blocks=64, block_tokens=4, store=True)
    prompt, found = words(30), []
    for salt in [salts[0], salts[1], salts[0]]:
        id = world.submit(prompt, 2, salt=salt)
        world.settle()
        found.append(cached_tokens(world, id))
    assert found == [0, 0, 28]


def test_f05_equal_cold_prompts_are_computed_once() -> None:
    world = World(Settings(step_tokens=64, max_running=8), blocks=400, block_tokens=4)
    prompt = words(160)
    ids = [world.submit(prompt, 3) for _ in range(8)]
    world.settle()
    assert counter(world, "computed_tokens") <= 2 * (160 + 3 * 8)
    assert [cached_tokens(world, id) for id in ids] == [0, *[156] * 7]
    assert counter(world, "shared_waits") == 7


def test_f05_equal_prompts_on_disk_are_read_once() -> None:
    world = World(Settings(step_tokens=256, max_running=8), blocks=400, block_tokens=4, store=True)
    prompt = words(160)
    world.submit(prompt, 1)
    world.settle()
    world.store.spill()
    world.start_worker()
    ids = [world.submit(prompt, 3) for _ in range(8)]
    world.settle()
    assert world.store.reads == 39
    finishes = [world.sent[id].finish for id in ids]
    assert [finish.usage.cached_by_tier["disk"] for finish in finishes if finish] == [156, *[0] * 7]
    assert [finish.usage.cached_tokens for finish in finishes if finish] == [156] * 8


@pytest.mark.parametrize("when", ["computing", "looking up", "loading"])
def test_f05_the_others_go_on_when_the_first_dies(when: str) -> None:
    world = World(Settings(step_tokens=16, max_running=8), blocks=100, block_tokens=4, store=when != "computing")
    prompt = words(80)
    if when == "loading":
        world.submit(prompt, 1)
        world.settle()
        world.start_worker()
    ids = [world.submit(prompt, 3) for _ in range(4)]
    if when == "computing":
        world.finish_plan()
    elif when == "loading":
        world.answer_ask(next(i for i, ask in enumerate(world.asks) if isinstance(ask.message, Lookup)))
        assert world.transfers
    assert world.engine.statistics().counters["shared_waits"] == 3
    world.cancel(ids[0])
    world.settle()
    assert all(len(world.sent[id].tokens) == 3 for id in ids[1:])


def test_o01_random_prompts_with_retractions_are_no_hits() -> None:
    world = World(Settings(step_tokens=32, max_running=6), blocks=14, block_tokens=4)
    for i in range(50):
        world.submit(words(8 + i % 7, 1000 + i), 16)
    world.settle()
    assert counter(world, "retracted") > 10
    assert counter(world, "cached_device") == 0


def test_o03_cached_tokens_are_counted_once_a_request() -> None:
    world = World(Settings(step_tokens=16, retract_every=2), blocks=64, block_tokens=4, store=True)
    ids = []
    for i in range(6):
        ids.append(world.submit(words(33, i % 2), 12))
        world.settle()
    assert counter(world, "retracted") >= 12
    usages = [finish.usage for id in ids if (finish := world.sent[id].finish)]
    for tier in ("device", "host", "disk"):
        assert sum(usage.cached_by_tier[tier] for usage in usages) == counter(world, f"cached_{tier}")
    assert [usage.cached_tokens for usage in usages] == [0, 0, 32, 32, 32, 32]


def test_w04_a_wholly_cached_prompt_computes_its_last_token() -> None:
    for size in (1, 4):
        world = World(Settings(step_tokens=64), blocks=64, block_tokens=size)
        for length in (1, size, size + 1, 2 * size):
            ids = [world.submit(words(length, length), 4) for _ in range(3)]
            world.settle()
            assert {tuple(world.sent[id].tokens) for id in ids} == {tuple(world.sent[ids[0]].tokens)}
            assert cached_tokens(world, ids[2]) == (length - 1) // size * size


def test_k07_the_second_turn_reuses_what_was_generated() -> None:
    world = World(Settings(step_tokens=128), blocks=64, block_tokens=16)
    first = world.submit(words(100), 50)
    world.settle()
    second = world.submit(words(100) + world.sent[first].tokens + words(50, 9), 2)
    world.settle()
    assert cached_tokens(world, second) == 149 // 16 * 16


def test_a_restarted_scheduler_counts_prompts_with_their_hits() -> None:
    world = World(Settings(step_tokens=64, max_running=1))
    stem = words(12)
    world.submit([*stem, 1], 8)
    waiting = world.submit([*stem, 2], 3)
    for _ in range(3):
        world.turn()
    world.restart_scheduler()  # one was admitted by the life before, the other one will be by this
    world.settle()
    assert cached_tokens(world, waiting) == counter(world, "cached_device") == 12
    assert counter(world, "prompt_tokens") == 13
