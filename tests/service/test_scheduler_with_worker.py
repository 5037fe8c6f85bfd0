"""The real scheduler and the real worker on the toy model: whatever happens, the oracle's tokens come out."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.store.actor import Store
from services.worker.actor import Worker
from shared.config import Config, FaultsConfig, KVConfig, ModelConfig, SchedulerConfig, StoreConfig
from shared.messages.engine import CancelRequest
from shared.messages.front import Cancelled
from shared.model.toy import toy_generate
from shared.paths import Places
from shared.testing import running
from tests.service.scheduler_kit import Stage, a_submit, staged, submit

SEED = 7
BLOCK_BYTES = 1024


def config_of(blocks: int, *, step_tokens: int = 64, retract_every: int = 0, policy: str = "fcfs") -> Config:
    return Config(
        model=ModelConfig(source=f"toy:{SEED}"),
        kv=KVConfig(pool_bytes=blocks * BLOCK_BYTES),
        store=StoreConfig(host_bytes=1 << 20, disk_bytes=1 << 20),
        scheduler=SchedulerConfig(step_tokens=step_tokens, policy=policy, store_wait_s=0.0),
        faults=FaultsConfig(retract_every=retract_every, max_pool_blocks=blocks),
    )


@asynccontextmanager
async def a_stage(places: Places, config: Config) -> AsyncIterator[Stage]:
    async with staged(places, config) as stage, running(Worker, places, config):
        await stage.until(lambda: stage.scheduler.worker.ready)
        yield stage


async def generate(stage: Stage, prompts: dict[str, list[int]], count: int) -> dict[str, list[int]]:
    """All at once; their tokens when all have ended."""
    tokenizer, detokenizer = await stage.tokenizer(), await stage.detokenizer()
    for id, prompt in prompts.items():
        await submit(tokenizer, a_submit(id, prompt, max_tokens=count))
    await detokenizer.finished(*prompts)
    return {id: detokenizer.tokens_of(id) for id in prompts}


def at_rest(stage: Stage) -> bool:
    """Nothing runs, and nothing is being saved: what is pins its blocks."""
    return stage.scheduler.core.idle and not stage.scheduler.core.statistics().saving


def check_idle(stage: Stage) -> None:
    stage.scheduler.core.check_integrity()
    kv = stage.scheduler.core.statistics().kv
    assert kv is not None
    assert kv.locked == 0
    assert kv.free + kv.cached == kv.total


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
async def test_w16_a_tiny_pool_under_many_requests_with_shared_prefixes_is_always_right(
    places: Places, policy: str
) -> None:
    shared = [list(range(i, i + 40)) for i in (0, 60, 120)]
    prompts = {f"{i:032x}": [*shared[i % 3][: 16 + i % 25], i % 256] for i in range(24)}
    async with a_stage(places, config_of(8, policy=policy)) as stage:
        out = await generate(stage, prompts, 12)
        assert out == {id: toy_generate(SEED, prompt, 12) for id, prompt in prompts.items()}
        await stage.until(lambda: at_rest(stage))
        check_idle(stage)
        assert stage.scheduler.core.statistics().kv.evicted > 0


async def test_w17_two_equal_cold_prompts_and_a_third_that_takes_what_is_free(places: Places) -> None:
    same = list(range(65))
    prompts = {"a" * 32: same, "b" * 32: same, "c" * 32: list(range(100, 180))}
    async with a_stage(places, config_of(24)) as stage:
        out = await generate(stage, prompts, 40)
        assert out == {id: toy_generate(SEED, prompt, 40) for id, prompt in prompts.items()}


async def test_w25_forced_retraction_with_small_chunks_changes_nothing(places: Places) -> None:
    prompts = {f"{i:032x}": list(range(i, i + 30 + i)) for i in range(6)}
    async with a_stage(places, config_of(64, step_tokens=16, retract_every=3)) as stage:
        out = await generate(stage, prompts, 20)
        assert out == {id: toy_generate(SEED, prompt, 20) for id, prompt in prompts.items()}
        assert stage.scheduler.core.statistics().counters["retracted_by_force"] > 0


async def test_w04_prompts_around_the_block_length_sent_three_times(places: Places) -> None:
    async with a_stage(places, config_of(64)) as stage:
        tokenizer, detokenizer = await stage.tokenizer(), await stage.detokenizer()
        for length in (1, 15, 16, 17, 32):
            for time in range(3):
                id = f"{length:016x}{time:016x}"
                await submit(tokenizer, a_submit(id, list(range(length)), max_tokens=4))
                await detokenizer.finished(id)
                assert detokenizer.tokens_of(id) == toy_generate(SEED, list(range(length)), 4)
                usage = detokenizer.stories[id].finish.usage
                assert usage.cached_tokens <= length - 1
                assert usage.cached_tokens == (length - 1) // 16 * 16 or not time


async def test_k07_generated_tokens_are_reused_by_the_next_turn(places: Places) -> None:
    async with a_stage(places, config_of(64)) as stage:
        tokenizer, detokenizer = await stage.tokenizer(), await stage.detokenizer()
        first = list(range(100))
        await submit(tokenizer, a_submit("a" * 32, first, max_tokens=50))
        await detokenizer.finished("a" * 32)
        second = first + detokenizer.tokens_of("a" * 32) + list(range(50))
        await submit(tokenizer, a_submit("b" * 32, second, max_tokens=4))
        await detokenizer.finished("b" * 32)
        assert detokenizer.stories["b" * 32].finish.usage.cached_tokens >= 149 // 16 * 16
        assert detokenizer.tokens_of("b" * 32) == toy_generate(SEED, second, 4)


async def test_z03_a_shared_prefix_counts_by_whole_blocks(places: Places) -> None:
    async with a_stage(places, config_of(64)) as stage:
        tokenizer, detokenizer = await stage.tokenizer(), await stage.detokenizer()
        base = list(range(200, 240))
        for i, (shared, hit) in enumerate([(40, 0), (15, 0), (16, 16), (17, 16)]):
            id = f"{i:032x}"
            await submit(tokenizer, a_submit(id, base[:shared] + [i] * 5, max_tokens=1))
            await detokenizer.finished(id)
            assert detokenizer.stories[id].finish.usage.cached_by_tier["device"] == hit


async def test_cancels_at_any_moment_leave_no_block_behind(places: Places) -> None:
    async with a_stage(places, config_of(16)) as stage:
        tokenizer, detokenizer = await stage.tokenizer(), await stage.detokenizer()
        ids = [f"{i:032x}" for i in range(12)]
        for i, id in enumerate(ids):
            await submit(tokenizer, a_submit(id, list(range(i, i + 20)), max_tokens=60))
            if i % 2:
                await tokenizer.ask(CancelRequest(id=ids[i - 1], principal="local"), Cancelled, deadline_s=5)
        await detokenizer.finished(*ids)
        for i, id in enumerate(ids):
            whole = toy_generate(SEED, list(range(i, i + 20)), 60)
            assert detokenizer.tokens_of(id) == whole[: len(detokenizer.tokens_of(id))]
        await stage.until(lambda: at_rest(stage))
        check_idle(stage)


async def test_a10_a_request_that_outgrows_the_pool_ends_alone(places: Places) -> None:
    async with a_stage(places, config_of(8)) as stage:
        tokenizer, detokenizer = await stage.tokenizer(), await stage.detokenizer()
        await submit(tokenizer, a_submit("a" * 32, list(range(96)), max_tokens=1000))
        await detokenizer.finished("a" * 32)
        assert detokenizer.stories["a" * 32].finish.reason == "length"
        await submit(tokenizer, a_submit("b" * 32, [1, 2, 3], max_tokens=4))
        await detokenizer.finished("b" * 32)
        assert detokenizer.tokens_of("b" * 32) == toy_generate(SEED, [1, 2, 3], 4)


async def test_w07_a_prefix_comes_back_from_the_host_tier_after_scheduler_and_worker_went(places: Places) -> None:
    config, prompt = config_of(32), list(range(5 * 16 + 3))
    async with running(Store, places, config):
        async with a_stage(places, config) as stage:
            await stage.until(lambda: stage.scheduler.store.opened)
            await generate(stage, {"a" * 32: prompt}, 4)
            await stage.until(lambda: stage.scheduler.core.statistics().counters["save_committed"] == 5)
        async with staged(places, config, incarnation=2) as stage, running(Worker, places, config, incarnation=2):
            await stage.until(lambda: stage.scheduler.worker.ready and stage.scheduler.store.opened)
            tokenizer, detokenizer = await stage.tokenizer(), await stage.detokenizer()
            longer = [*prompt, 9, 8, 7]
            await submit(tokenizer, a_submit("b" * 32, longer, max_tokens=32))
            await detokenizer.finished("b" * 32)
            assert detokenizer.tokens_of("b" * 32) == toy_generate(SEED, longer, 32)
            usage = detokenizer.stories["b" * 32].finish.usage
            assert usage.cached_by_tier == {"device": 0, "host": 80, "disk": 0}
            await stage.until(lambda: at_rest(stage))
            check_idle(stage)
