"""Cases of tiers: a host tier smaller than the device's, what comes back from disk, what counts as cached."""

import trio

from ops.client import Result
from shared.model.toy import TOKEN_BYTES
from tests.e2e.kit import (
    BLOCK,
    DEADLINE_S,
    Watched,
    aftermath,
    ask,
    ask_all,
    client_of,
    hooks,
    ledger_rows,
    oracle,
    prompt,
    reckoned,
    settled,
    stack,
    watching,
)

THREE = 3 * BLOCK


def by_tier(result: Result) -> dict[str, int]:
    return {tier: count for tier, count in result.finish.usage.cached_by_tier.items() if count}


async def all_on_disk(made: Watched) -> None:
    await settled(made)
    with trio.fail_after(DEADLINE_S):
        async with watching(made, "store") as look:
            while (await look())["tiers"]["host"]["dirty"]:  # noqa: ASYNC110 - another process
                await trio.sleep(0.02)


async def test_s10_p13_a_host_tier_a_quarter_of_the_device_hands_everything_on_to_disk() -> None:
    prompts = [prompt(number, THREE + 1) for number in range(50)]
    async with stack(PERDURE_FAULTS__MAX_POOL_BLOCKS="64", PERDURE_FAULTS__MAX_HOST_BLOCKS="16") as made:
        for start in range(0, 50, 5):  # at most what the host tier holds at once
            await ask_all(made, prompts[start : start + 5], 1)
            await all_on_disk(made)

        async with client_of(made) as client, watching(made, "store") as store, watching(made) as look:
            before, hits = (await store())["tiers"]["disk"], (await look())["hits"]
            again = await ask(client, prompts[0], 2)  # long gone from device and host
            assert again.ids == oracle(prompts[0], 2)
            assert by_tier(again) == {"disk": THREE}
            after = (await store())["tiers"]["disk"]
            assert after["staged_bytes"] - before["staged_bytes"] == THREE * TOKEN_BYTES
            assert after["staged"] - before["staged"] == after["hits"] - before["hits"] == 3
            assert (await look())["hits"]["disk"] - hits["disk"] == THREE
        await made.stop()

        made.remove_arena()
        await made.start()
        found = []
        for start in range(34, 50, 5):  # the arena holds the blocks of five while they are on their way
            found += await ask_all(made, prompts[start : start + 5], 1)
        back = sum(result.finish.usage.cached_by_tier["disk"] for result in found)
        assert back >= 16 * THREE // 2
        assert [result.ids for result in found] == [oracle(ids, 1) for ids in prompts[-16:]]
        await aftermath(made)


async def test_a_prefix_of_five_times_the_host_tier_comes_back_from_disk_whole() -> None:
    slots = 8
    whole = prompt(60, 5 * slots * BLOCK + 1)
    async with stack(PERDURE_FAULTS__MAX_HOST_BLOCKS=str(slots)) as made:
        for end in range(4 * BLOCK, len(whole) + 1, 4 * BLOCK):  # at most half of what the host tier holds at once
            await ask_all(made, [whole[: end + 1]], 1)
            await all_on_disk(made)
        for _ in range(2):
            made.kill("worker")
            await made.wait_serving()
            async with client_of(made) as client:
                again = await ask(client, whole, 3)
            assert again.ids == oracle(whole, 3)
            assert again.finish.usage.cached_tokens == 5 * slots * BLOCK
            assert again.finish.usage.cached_by_tier["disk"] >= 4 * slots * BLOCK
        await aftermath(made)


async def test_a_prefix_computed_from_the_front_and_loaded_from_the_back_gives_the_same_tokens() -> None:
    whole = prompt(61, 40 * BLOCK + 1)
    settings = hooks(store_in_load="delay:0.05") | {
        "PERDURE_SCHEDULER__RESTORE": "both",
        "PERDURE_SCHEDULER__STEP_TOKENS": str(2 * BLOCK),
        "PERDURE_FAULTS__MAX_HOST_BLOCKS": "8",
    }
    async with stack(**settings) as made:
        for end in range(4 * BLOCK, len(whole) + 1, 4 * BLOCK):
            await ask_all(made, [whole[: end + 1]], 1)
            await all_on_disk(made)
        made.kill("worker")
        await made.wait_serving()
        async with client_of(made) as client, watching(made) as look:
            before = (await look())["counters"]
            again = await ask(client, whole, 3)
            after = (await look())["counters"]
        assert again.ids == oracle(whole, 3)
        beside = after["beside_tokens"] - before["beside_tokens"]
        assert beside > 0
        assert again.finish.usage.cached_tokens + beside == 40 * BLOCK
        await aftermath(made)


async def test_o03_retractions_count_no_token_twice_and_the_ledger_adds_up_to_the_metric() -> None:
    shared = prompt(70, 4 * BLOCK)
    prompts = [[*shared, *prompt(71 + number, 10)] for number in range(6)]
    async with stack(PERDURE_FAULTS__RETRACT_EVERY="2", PERDURE_SCHEDULER__STEP_TOKENS="32") as made:
        results = await ask_all(made, prompts, 20)
        results += await ask_all(made, prompts[:3], 20)
        for ids, result in zip(prompts + prompts[:3], results, strict=True):
            assert result.ids == oracle(ids, 20)
            assert 0 <= result.finish.usage.cached_tokens <= len(ids) - 1
        async with watching(made) as look:
            data = await look()
        assert data["counters"]["retracted_by_force"] >= len(prompts)
        rows = await ledger_rows(made, len(made.accepted()))
        for tier in ("device", "host", "disk"):
            assert sum(row[f"cached_{tier}"] for row in rows) == data["hits"][tier]
        assert data["hits"]["device"] > 0
        await settled(made)
        await reckoned(made)


async def test_an_arena_removed_under_traffic_costs_no_request_and_a_new_worker_finds_the_next_one() -> None:
    prompts = [prompt(number, THREE + 1) for number in range(90, 96)]
    async with stack() as made:
        await ask_all(made, prompts, 2)
        made.remove_arena()
        made.kill("worker")  # the next one has no other way to the blocks than the file's name
        with trio.fail_after(DEADLINE_S):
            while (made.places.incarnations / "store").read_text().strip() == "1":
                results = await ask_all(made, prompts, 8)
                assert [result.ids for result in results] == [oracle(ids, 8) for ids in prompts]
        await made.wait_serving()
        assert made.places.arena().exists()
        await ask_all(made, prompts, 2)
        await all_on_disk(made)
        made.kill("worker")
        await made.wait_serving()
        results = await ask_all(made, prompts, 8)
        assert [result.ids for result in results] == [oracle(ids, 8) for ids in prompts]
        assert all(result.finish.usage.cached_tokens == THREE for result in results)  # all of it through the arena
        assert made.log_path.read_text().count('"arena_trouble"') == 1
        await aftermath(made)
