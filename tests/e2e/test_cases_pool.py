"""Cases of a pool that is too small: what cannot fit, what waits, what is evicted, and that every block comes back."""

import random
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
import trio

from ops.client import Client, RequestRejected, Result, new_id
from shared.messages.base import pack_u32
from shared.messages.front import Generate, Sampling
from tests.e2e.kit import (
    BLOCK,
    Watched,
    aftermath,
    client_of,
    hooks,
    oracle,
    prompt,
    reckoned,
    settled,
    shared_stack,
    stack,
    watching,
)


def greedy(tokens: int, **options: object) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, **options)  # type: ignore[arg-type]


async def answer(client: Client, ids: Sequence[int], tokens: int, *, no_read: bool = False) -> Result:
    request = Generate(id=new_id(), ids=pack_u32(list(ids)), sampling=greedy(tokens), no_read=no_read)
    async with client.generate(request) as stream:
        return await stream.result()


# --- 20 blocks; steps of 3 ms or more, so that there is a meanwhile ------------------------------------------------


@pytest.fixture(scope="module")
def shared_twenty() -> Iterator[Watched]:
    with shared_stack(
        PERDURE_FAULTS__MAX_POOL_BLOCKS="20",
        PERDURE_MODEL__MAX_CONTEXT=str(64 * BLOCK),
        **hooks(worker_in_step="delay:0.003"),
    ) as made:
        yield made


@pytest.fixture
async def twenty(shared_twenty: Watched) -> AsyncIterator[Watched]:
    yield shared_twenty
    await aftermath(shared_twenty)


async def test_s01_a_prompt_larger_than_the_pool_is_refused_with_numbers_and_blocks_nobody(twenty: Watched) -> None:
    async with client_of(twenty) as client:
        with pytest.raises(RequestRejected, match="480 tokens; the KV pool holds 320") as refused:
            await answer(client, prompt(1, 30 * BLOCK), 1)
        assert refused.value.rejected.code == "never_fits"
        assert refused.value.rejected.numbers == {"prompt_tokens": 480, "pool_tokens": 320}
        for number in (2, 3, 4):
            assert (await answer(client, prompt(number, 40), 5)).ids == oracle(prompt(number, 40), 5)


async def test_s02_small_requests_pass_a_heavy_one_that_is_served_in_its_turn(twenty: Watched) -> None:
    long, big = prompt(10, 13 * BLOCK), prompt(11, 10 * BLOCK)
    ended: list[str] = []
    async with client_of(twenty) as client, trio.open_nursery() as nursery:

        async def queue(name: str, ids: list[int]) -> None:
            assert (await answer(client, ids, 2)).ids == oracle(ids, 2)
            ended.append(name)

        async with client.generate(ids=long, sampling=greedy(90)) as stream:
            await anext(stream)
            nursery.start_soon(queue, "big", big)
            async with watching(twenty) as look:
                while (await look())["requests"]["waiting"] < 1:
                    pass
            for number in range(5):
                nursery.start_soon(queue, "tiny", prompt(20 + number, 10))
            rest = [chunk async for chunk in stream]
            ended.append("long")
    assert ended == [*["tiny"] * 5, "long", "big"]
    assert rest[-1].end == 90


@pytest.mark.parametrize("no_read", [False, True])
async def test_w17_equal_cold_prompts_at_once_beside_a_third_that_takes_free_blocks(
    twenty: Watched, no_read: bool
) -> None:
    """Without reading the cache the second computes and inserts the very blocks that the first inserts."""
    same, third = prompt(30 + no_read, 4 * BLOCK), prompt(32 + no_read, 5 * BLOCK)
    results: dict[str, Result] = {}
    async with watching(twenty) as look:
        before = (await look())["pool"]
    async with client_of(twenty) as client, trio.open_nursery() as nursery:

        async def one(name: str, ids: list[int], no_read: bool) -> None:
            results[name] = await answer(client, ids, 64, no_read=no_read)

        nursery.start_soon(one, "first", same, False)
        nursery.start_soon(one, "second", same, no_read)
        nursery.start_soon(one, "third", third, False)
    assert results["first"].ids == results["second"].ids == oracle(same, 64)
    assert results["third"].ids == oracle(third, 64)
    async with watching(twenty) as look:
        after = (await look())["pool"]
    assert after["evicted"] > before["evicted"]  # the third had to take blocks that others gave back
    assert after["duplicates"] > before["duplicates"]  # the same output, at least, is computed and inserted twice


async def test_w32_a_partial_hit_goes_on_over_scattered_blocks(twenty: Watched) -> None:
    """Every other block of the pool is given back while its neighbours are in use, then filled by one request."""
    prefix = prompt(70, 2 * BLOCK)
    hit = [*prefix, *prompt(71, 5)]
    async with client_of(twenty) as client, trio.open_nursery() as nursery:
        await answer(client, [*prefix, 1], 1)

        async def one(number: int, tokens: int) -> None:
            ids = prompt(72 + number, 5)
            assert (await answer(client, ids, tokens)).ids == oracle(ids, tokens)

        async with trio.open_nursery() as short:
            for number in range(3):
                nursery.start_soon(one, 2 * number, 60)
                short.start_soon(one, 2 * number + 1, 2)
        result = await answer(client, hit, 40)
    assert result.finish.usage.cached_tokens == 2 * BLOCK
    assert result.ids == oracle(hit, 40)


# --- 8 blocks ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_eight() -> Iterator[Watched]:
    with shared_stack(PERDURE_FAULTS__MAX_POOL_BLOCKS="8", PERDURE_FAULTS__MAX_HOST_BLOCKS="16") as made:
        yield made


@pytest.fixture
async def eight(shared_eight: Watched) -> AsyncIterator[Watched]:
    yield shared_eight
    await aftermath(shared_eight)


async def test_a10_a_request_that_outgrows_the_pool_ends_in_its_own_reply(eight: Watched) -> None:
    ids = prompt(1, 6 * BLOCK)
    fitting = 8 * BLOCK - 6 * BLOCK + 1  # the last token needs no KV
    async with watching(eight) as look, client_of(eight) as client:
        before = await look.counter("outgrown")
        result = await answer(client, ids, 1000)
        assert (result.finish.reason, result.finish.error) == ("length", None)
        assert result.ids == oracle(ids, fitting)
        assert await look.counter("outgrown") == before + 1
        assert (await answer(client, prompt(2, 20), 4)).ids == oracle(prompt(2, 20), 4)


async def test_w16_evicted_blocks_never_answer_for_their_old_prefix(eight: Watched) -> None:
    rng = random.Random(16)
    cuts = [(prompt(40 + number, 3 * BLOCK), cut) for number in range(3) for cut in range(4)]
    prompts = [stem[: cut * BLOCK] + prompt(60 + number, 10 + 8 * cut) for number, (stem, cut) in enumerate(cuts)]
    wanted = [oracle(ids, 3) for ids in prompts]
    asked = [rng.randrange(12) for _ in range(300)]
    async with watching(eight) as look, client_of(eight) as client, trio.open_nursery() as nursery:

        async def some(numbers: list[int]) -> None:
            for number in numbers:
                assert (await answer(client, prompts[number], 3)).ids == wanted[number]

        for start in range(4):
            nursery.start_soon(some, asked[start::4])
    async with watching(eight) as look:
        data = await look()
        assert data["pool"]["evicted"] > 100
        assert data["counters"]["cached_device"] > 0


# --- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [16, 128])
async def test_a01_five_hundred_mixed_requests_give_every_block_back(block: int) -> None:
    """Lengths of 1 to 5 blocks, ends by length and by stop string, aborts; the pool holds a few of them."""
    rng = random.Random(block)
    async with stack(PERDURE_KV__BLOCK_TOKENS=str(block), PERDURE_FAULTS__MAX_POOL_BLOCKS="40") as made:
        reasons: dict[str, int] = {}

        async def some(client: Client) -> None:
            for _ in range(25):
                stem, length = rng.randrange(6), rng.randint(1, 5 * block)
                ids = prompt(stem, length)
                tokens = rng.randint(1, 12)
                kind = rng.choice(["plain", "plain", "stop", "abort"])
                sampling = greedy(200 if kind == "abort" else tokens, stop=("a", "e", "<3") if kind == "stop" else ())
                async with client.generate(ids=ids, sampling=sampling) as stream:
                    if kind == "abort":
                        await anext(stream)
                        continue
                    result = await stream.result()
                reasons[result.finish.reason] = reasons.get(result.finish.reason, 0) + 1
                assert result.ids == oracle(ids, len(result.ids))

        async with client_of(made) as client, trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(some, client)
        async with watching(made) as look:
            counters = (await look())["counters"]
        assert reasons.keys() == {"length", "stop"}
        assert counters["finished_cancelled"] >= 5  # a toy may be through before its client's news arrives
        assert counters["accepted"] == 500
        numbers = await settled(made)
        assert numbers["pool"]["locked"] == 0
        assert numbers["pool"]["free"] + numbers["pool"]["cached"] == numbers["pool"]["total"] == 40
        if block == BLOCK:
            await aftermath(made)
        await reckoned(made)
        assert not made.complaints()


async def test_a02_without_a_prefix_cache_every_block_is_free_after_hundreds_of_requests() -> None:
    async with stack(PERDURE_KV__PREFIX_CACHE="false", PERDURE_FAULTS__MAX_POOL_BLOCKS="40") as made:
        for count in (300, 100):
            async with client_of(made) as client, trio.open_nursery() as nursery:

                async def some(client: Client, numbers: range) -> None:
                    for number in numbers:
                        ids = prompt(number % 7, 1 + number % 60)
                        result = await answer(client, ids, 1 + number % 5)
                        assert result.ids == oracle(ids, 1 + number % 5)
                        assert result.finish.usage.cached_tokens == 0

                for start in range(10):
                    nursery.start_soon(some, client, range(start, count, 10))
            pool = (await settled(made))["pool"]
            assert (pool["free"], pool["cached"], pool["locked"]) == (40, 0, 0)
        await aftermath(made)
        await reckoned(made)
