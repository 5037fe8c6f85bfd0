"""What stands still is noticed, bounded and got over: steps, the store, its disk."""

import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio

from ops.client import Client, Result
from ops.stack import StackError
from tests.e2e.kit import (
    BLOCK,
    DEADLINE_S,
    TOY,
    Look,
    Watched,
    aftermath,
    ask,
    ask_all,
    client_of,
    hooks,
    oracle,
    prompt,
    reckoned,
    settled,
    stack,
    watching,
)

FIVE = 5 * BLOCK


def by_tier(result: Result) -> dict[str, int]:
    return {tier: count for tier, count in result.finish.usage.cached_by_tier.items() if count}


async def until(look: Look, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Polls one service's status; bounded by the test's deadline."""
    with trio.fail_after(DEADLINE_S):
        while not holds(await look()):  # noqa: ASYNC110 - another process
            await trio.sleep(0.02)


async def empty_pool(made: Watched) -> None:
    """Another worker: what is cached can only come from the store."""
    async with watching(made) as look:
        before = await look.counter("worker_losses")
        made.kill("worker")
        await until(look, lambda data: data["counters"]["worker_losses"] > before and data["worker_ready"])


async def right(client: Client, number: int, tokens: int = 3, length: int = FIVE + 3) -> Result:
    ids = prompt(number, length)
    result = await ask(client, ids, tokens)
    assert result.ids == oracle(ids, tokens)
    return result


async def test_a_model_load_that_never_returns_ends_each_worker_in_words_and_then_the_stack() -> None:
    settings = {"PERDURE_SUPERVISE__LOAD_S": "0.5", "PERDURE_SUPERVISE__MAX_FAILURES": "2"}
    with Watched(TOY | settings | hooks(worker_in_start="hang:1")) as made, trio.fail_after(DEADLINE_S):
        with pytest.raises(StackError, match="it exited 2 times in a row before it was ready"):
            await made.start()
        assert made.log_path.read_text().count('"load_hung"') == 2


async def test_a_step_that_never_returns_ends_the_worker_and_is_computed_again() -> None:
    async with stack(PERDURE_SUPERVISE__STEP_S="0.5", **hooks(worker_in_step="hang:18")) as made:
        results = await ask_all(made, [prompt(1, 40), prompt(2, 40)], 25)
        assert [result.ids for result in results] == [oracle(prompt(number, 40), 25) for number in (1, 2)]
        async with watching(made) as look:
            assert await look.counter("worker_losses")
        log = made.log_path.read_text()
        assert '"what": "step"' in log
        assert '"code": 70' in log
        await settled(made)
        await reckoned(made)


async def test_s04_a07_a_stopped_store_costs_a_bounded_wait_each_and_then_none() -> None:
    """Nobody ends it: its supervisor is patient. Behind it stands a disk that writes a batch in 1.5 s, with a flood of
    writes: no decode waits for it.
    """
    settings = {
        "PERDURE_SUPERVISE__HANG_S": "600",
        "PERDURE_SCHEDULER__LOOKUP_S": "0.5",
        "PERDURE_FAULTS__MAX_POOL_BLOCKS": "24",
    }
    async with stack(**settings, **hooks(store_before_data="delay:1", store_commit_index="delay:0.5")) as made:
        async with client_of(made) as client:
            for number in range(8):
                await right(client, number)
            await settled(made)  # nothing is locked while the disk is busy
            async with watching(made, "store") as look:
                assert (await look())["tiers"]["host"]["dirty"] > 0
            ids = prompt(50, 24 * BLOCK - 2)
            assert (await ask(client, ids, 3)).ids == oracle(ids, 3)  # the whole pool, for one request
        await empty_pool(made)
        await stopped_store(made)
        await empty_pool(made)
        async with client_of(made) as client, watching(made) as look:
            for number in range(60, 100):  # a probe goes out with one of them, and is answered
                await right(client, number)
                if (await look())["store"]["breaker"] != "open":
                    break
                await trio.sleep(0.1)  # probes are half a second apart at first
            assert by_tier(await right(client, 7)) == {"host": FIVE}
        async with watching(made, "store") as look:
            await until(look, lambda data: data["leases"] == 0 and data["tiers"]["host"]["granted"] == 0)
        await aftermath(made)


async def stopped_store(made: Watched) -> None:
    """Six requests that the store would have had, while it is stopped; then it goes on."""
    made.kill("store", signal.SIGSTOP)
    async with client_of(made) as client, watching(made) as look:
        for number in range(6):
            assert (await right(client, number)).finish.usage.cached_tokens == 0
        data = await look()
    assert data["store"]["breaker"] == "open"
    assert "did not answer" in data["note"]
    assert data["counters"]["lookup_timeouts"] == 3
    assert data["counters"]["waits_refused"] >= 3
    assert data["requests"]["loading"] == 0
    made.kill("store", signal.SIGCONT)
    async with watching(made, "store") as store:  # questions from back then are past their deadline: no lease
        await until(store, lambda data: data["leases"] == 0 and data["drops"].get("deadline", 0) >= 3)


@pytest.fixture
async def slow_disk() -> AsyncIterator[Watched]:
    """Eight prompts on disk only; each read takes half a second, each copy into the pool a quarter."""
    async with stack(
        PERDURE_SCHEDULER__LOAD_S="0.3",
        PERDURE_SCHEDULER__LOOKUP_S="5",
        PERDURE_FAULTS__MAX_POOL_BLOCKS="24",
        **hooks(store_in_load="delay:0.5", worker_in_load="delay:0.25"),
    ) as made:
        for number in range(
            8
        ):  # one after the other: together they outgrow the pool, and blocks go before they are saved
            await ask_all(made, [prompt(number, FIVE + 3)], 1)
            await settled(made)
        async with watching(made, "store") as look:
            await until(look, lambda data: data["tiers"]["host"]["dirty"] == 0)
        await made.stop()
        made.remove_arena()
        await made.start()
        yield made


async def test_s04_w23_a06_loads_that_come_late_or_for_nobody_cost_a_bounded_wait_and_leave_nothing(
    slow_disk: Watched,
) -> None:
    made = slow_disk
    async with client_of(made) as client, watching(made) as look, watching(made, "store") as store:
        # the store answers and does not deliver in time
        first = await right(client, 0)
        assert first.finish.usage.cached_tokens == 0
        assert await look.counter("load_timeouts") == 1

        # aborted while the disk reads, then while the blocks are copied; somebody else wants the whole pool
        total = (await look())["pool"]["total"]
        for number, dropped in (90, 1), (91, 2):
            async with client.generate(ids=prompt(1, FIVE + 3)):
                await until(look, lambda data: data["requests"]["loading"] == 1 and data["pool"]["locked"] > 0)
            await until(look, lambda data, dropped=dropped: data["counters"]["loads_dropped"] == dropped)  # type: ignore[misc]
            ids = prompt(number, total * BLOCK - 2)
            assert (await ask(client, ids, 3)).ids == oracle(ids, 3)
            await until(store, lambda data: data["leases"] == 0 and data["tiers"]["host"]["staging"] == 0)
        await settled(made)

        # what was read late is in the arena now, and is served from there
        assert by_tier(await right(client, 1)) == {"host": FIVE}
    await aftermath(made)
