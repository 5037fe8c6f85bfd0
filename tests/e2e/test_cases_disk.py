"""Cases of a disk tier that is slow, or that has to serve more than the host tier holds."""

import trio

from tests.e2e.kit import (
    BLOCK,
    DEADLINE_S,
    aftermath,
    ask,
    ask_all,
    client_of,
    hooks,
    oracle,
    prompt,
    settled,
    stack,
    watching,
)
from tests.e2e.test_cases_restart import by_tier, written


async def test_f08_an_answer_waits_for_no_disk_write() -> None:
    ids, tokens = prompt(1, 4 * BLOCK), 60 * BLOCK
    async with stack(**hooks(store_before_data="hang:1")) as made, client_of(made) as client:
        assert (await ask(client, ids, tokens)).ids == oracle(ids, tokens)  # all of it while one write lasts
        async with watching(made, "store") as look:
            with trio.fail_after(DEADLINE_S):
                while not (tiers := (await look())["tiers"])["host"]["dirty"]:
                    pass
        assert tiers["disk"]["written"] == 0


async def test_f08_disk_writes_and_index_commits_that_take_half_a_second_each_end_as_they_should() -> None:
    ids, tokens = prompt(1, 4 * BLOCK), 60 * BLOCK
    slow = hooks(store_before_data="delay:0.5", store_commit_index="delay:0.5")
    async with stack(**slow) as made, client_of(made) as client:
        assert (await ask(client, ids, tokens)).ids == oracle(ids, tokens)
        assert await written(made) > 60
        await aftermath(made)


async def test_s10_a_host_tier_a_quarter_of_the_device_tier_still_brings_blocks_to_disk_and_back() -> None:
    prompts = [prompt(number, 5 * BLOCK + 1) for number in range(50)]
    async with stack(PERDURE_FAULTS__MAX_POOL_BLOCKS="160", PERDURE_FAULTS__MAX_HOST_BLOCKS="40") as made:
        for first in range(0, 50, 5):
            for ids, result in zip(
                prompts[first : first + 5], await ask_all(made, prompts[first : first + 5], 3), strict=True
            ):
                assert result.ids == oracle(ids, 3)
            await written(made)
        pool = (await settled(made))["pool"]
        assert pool["total"] == 160
        await made.stop()
        made.remove_arena()
        await made.start()
        found = 0
        for first in range(25, 50, 5):
            for ids, result in zip(
                prompts[first : first + 5], await ask_all(made, prompts[first : first + 5], 3), strict=True
            ):
                assert result.ids == oracle(ids, 3)
                found += by_tier(result).get("disk", 0)
        assert found >= 25 * 5 * BLOCK // 2
        with trio.fail_after(DEADLINE_S):
            async with watching(made, "store") as look:
                host = (await look())["tiers"]["host"]
        assert host["used"] <= host["capacity"] == 40
        assert host["losses"] == 0
        await aftermath(made)
