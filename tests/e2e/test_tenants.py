"""Cases of isolation and clearing on real stacks: salts, no_store, no_read, clears of every scope, many sessions."""

import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from ops.client import Client, Result, new_id
from ops.stream import joined
from shared.messages.base import pack_u32
from shared.messages.front import Generate, Sampling
from tests.e2e.kit import (
    BLOCK,
    Watched,
    aftermath,
    client_of,
    oracle,
    prompt,
    settled,
    shared_stack,
    stack,
    watching,
)
from tests.e2e.test_cases_restart import by_tier, written
from tests.e2e.test_commands import perdure

STEP_TOKENS = 64
"""These tests count hits exactly: on a busy machine an answer of the store may come late, which would be a miss."""


async def ask(client: Client, ids: Sequence[int], tokens: int, **fields: Any) -> Result:
    """A greedy request with other fields of Generate, checked against the oracle."""
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    request = Generate(id=new_id(), ids=pack_u32(ids), sampling=sampling, **fields)
    async with client.generate(request) as stream:
        result = await stream.result()
    assert result.ids == oracle(ids, tokens)
    return result


def cached(result: Result) -> int:
    return result.finish.usage.cached_tokens


async def kill_worker(made: Watched) -> None:
    """Empties the device tier, and waits until the scheduler knows."""
    async with watching(made) as look:
        before = await look.counter("worker_losses")
        made.kill("worker")
        while await look.counter("worker_losses") == before:
            pass


async def test_w10_a_salt_separates_on_every_tier_and_after_a_restart() -> None:
    ids = prompt(1, 10 * BLOCK)
    async with stack() as made:
        async with client_of(made) as client:
            assert cached(await ask(client, ids, 5, cache_salt="a")) == 0

        async def look_at(tier: str) -> None:
            async with client_of(made) as client:
                for salt in ("b", None, ""):
                    assert cached(await ask(client, ids, 5, cache_salt=salt, no_store=True)) == 0
                assert by_tier(await ask(client, ids, 5, cache_salt="a")) == {tier: 9 * BLOCK}
            await written(made)

        await look_at("device")
        await kill_worker(made)
        await look_at("host")
        await made.stop()
        made.remove_arena()
        await made.start()
        await look_at("disk")
        await aftermath(made)
        assert not made.complaints()


@pytest.fixture(scope="module")
def shared() -> Iterator[Watched]:
    with shared_stack(PERDURE_SCHEDULER__STEP_TOKENS=str(STEP_TOKENS)) as made:
        yield made


@pytest.fixture
async def made(shared: Watched) -> AsyncIterator[Watched]:
    yield shared
    await aftermath(shared)


async def test_a08_no_store_leaves_nothing_on_any_tier(made: Watched) -> None:
    ids = prompt(20, 5 * STEP_TOKENS)
    await written(made)
    before, pool = await tiers(made), (await settled(made))["pool"]
    async with client_of(made) as client:
        assert cached(await ask(client, ids, 10, no_store=True)) == 0
        assert cached(await ask(client, ids, 10, no_store=True)) == 0
        after = (await settled(made))["pool"]
        assert (after["free"], after["cached"]) == (pool["free"], pool["cached"])
        assert await tiers(made) == before
        assert cached(await ask(client, ids, 10)) == 0
        assert cached(await ask(client, ids, 10, no_store=True)) == len(ids) - BLOCK  # it may still use what is there


async def test_no_read_looks_nothing_up_and_is_counted(made: Watched) -> None:
    ids = prompt(21, 5 * STEP_TOKENS)
    async with client_of(made) as client, watching(made) as look:
        await ask(client, ids, 5)
        counted = [await look.counter(name) for name in ("lookups", "no_read", "no_store")]
        assert cached(await ask(client, ids, 5, no_read=True)) == 0
        assert cached(await ask(client, ids, 5, no_read=True, no_store=True)) == 0
        assert [await look.counter(name) for name in ("lookups", "no_read", "no_store")] == [
            counted[0],
            counted[1] + 2,
            counted[2] + 1,
        ]
        assert cached(await ask(client, ids, 5)) == len(ids) - BLOCK


async def tiers(made: Watched) -> dict[str, int]:
    """What the store holds and has served."""
    async with watching(made, "store") as look:
        found = (await look())["tiers"]
    return {f"{tier} {name}": found[tier][name] for tier in ("host", "disk") for name in ("used", "hits")}


TEXT = "A prompt of which the first block is named."


@pytest.mark.parametrize(
    ("options", "salt"),
    [
        ((), None),
        (("--model",), None),
        (("--salt", "s"), "s"),
        (("--user", "local"), "t"),
        (("--prefix", TEXT), None),
        (("--prompt-file", "FILE", "--salt", "s"), "s"),
    ],
)
async def test_w14_after_a_clear_no_tier_serves_the_prompt(
    made: Watched, options: tuple[str, ...], salt: str | None, tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_text(TEXT)
    options = tuple(str(tmp_path / "prompt") if word == "FILE" else word for word in options)
    ids, long = [*TEXT.encode(), *prompt(30, 6 * BLOCK)], prompt(31, 2 * BLOCK)
    async with client_of(made) as client, trio.open_nursery() as nursery:
        await ask(client, ids, 5, cache_salt=salt)
        await written(made)
        if "--prefix" in options:
            await kill_worker(made)  # all of it comes back by a load
            assert by_tier(await ask(client, ids, 5, cache_salt=salt)) == {"host": (len(ids) - 1) // BLOCK * BLOCK}
        begun = trio.Event()

        async def run_on() -> None:
            """A request that runs through the clear."""
            sampling = Sampling(max_tokens=600, temperature=0.0, ignore_eos=True)
            request = Generate(id=new_id(), ids=pack_u32(long), sampling=sampling, cache_salt=salt)
            async with client.generate(request) as stream:
                chunks = []
                async for chunk in stream:
                    chunks.append(chunk)
                    begun.set()
                assert joined(request.id, chunks).ids == oracle(long, 600)

        nursery.start_soon(run_on)
        await begun.wait()
        cleared = json.loads(await perdure(made, "cache", "clear", *options, "--json"))
        assert all(cleared["blocks"][tier] > 0 for tier in ("device", "host", "disk")), cleared
        size = cleared["bytes"]["device"] // cleared["blocks"]["device"]
        assert cleared["bytes"] == {tier: count * size for tier, count in cleared["blocks"].items()}
        before = await tiers(made)
        assert cached(await ask(client, ids, 5, cache_salt=salt)) == 0
        after = await tiers(made)
        assert {name: after[name] for name in after if "hits" in name} == {
            name: before[name] for name in before if "hits" in name
        }


async def test_stats_and_refusals_as_a_user_types_them(made: Watched) -> None:
    async with client_of(made) as client:
        await ask(client, prompt(40, 100), 5)
    await written(made)
    stats = json.loads(await perdure(made, "cache", "stats", "--json"))
    assert stats["away"] == []
    for tier in ("device", "host", "disk"):
        assert 0 < stats[tier]["bytes"] <= stats[tier]["capacity_bytes"]
        size = BLOCK * 64 if tier != "disk" else 8192  # there a page of padding and a page of footer are counted too
        assert stats[tier]["bytes"] == stats[tier]["blocks"] * size
        assert {"hit_tokens", "saves", "evictions"} <= stats[tier].keys()
    assert stats["host"]["dirty"] == 0
    shown = await perdure(made, "cache", "stats")
    for word in ("device", "host", "disk", "evictions", "leases", "hit tokens"):
        assert word in shown
    said = await perdure(made, "cache", "clear", "--prefix-ids", "1,2,3", code=3)
    assert "the prefix is 3 tokens; the cache holds blocks of 16; give 13 more" in said
    assert "device: 0 blocks, 0 bytes cleared" in await perdure(made, "cache", "clear", "--user", "nobody")


async def test_w19_sessions_that_are_paged_through_a_small_host_tier_keep_their_secrets() -> None:
    """Only a few tokens near the start differ: whoever gets another's blocks answers with another's secret."""
    dice, sessions, blocks = random.Random(19), 8, 20
    rest = prompt(50, blocks * BLOCK)
    prompts = [[*rest[:24], *(dice.randrange(256) for _ in range(8)), *rest[24:]] for _ in range(sessions)]
    small = {
        "PERDURE_KV__POOL_BYTES": str(90 * BLOCK * 64),
        "PERDURE_FAULTS__MAX_HOST_BLOCKS": str(sessions * blocks // 4),
    }
    async with stack(**small) as made:
        async with client_of(made) as client:
            gate = trio.CapacityLimiter(4)

            async def come_back(number: int) -> None:
                async with gate:
                    await ask(client, prompts[number], 12)

            for _ in range(5):
                async with trio.open_nursery() as nursery:
                    for number in dice.sample(range(sessions), sessions):
                        nursery.start_soon(come_back, number)
        served = await tiers(made)
        assert served["disk hits"] > 0, "nothing was paged"
        assert served["host used"] <= sessions * blocks // 4
        await aftermath(made)
        assert not made.complaints()
