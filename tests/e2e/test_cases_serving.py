"""Cases of reuse, streams and overload on one real stack: each test is named after the fault that people met."""

import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio

from ops.cli.exits import NO_STACK
from ops.client import RequestRejected, Result, new_id
from ops.stream import joined
from shared.messages.base import pack_u32
from shared.messages.front import Chunk, Generate, Rejected, Sampling
from tests.e2e.kit import (
    BLOCK,
    Look,
    Watched,
    aftermath,
    ask,
    client_of,
    oracle,
    prompt,
    settled,
    shared_stack,
    watching,
)

STEP_TOKENS = 64
CHOSEN = {"PERDURE_SCHEDULER__STEP_TOKENS": str(STEP_TOKENS), "PERDURE_SUPERVISE__HANG_S": "60"}


@pytest.fixture(scope="module")
def shared() -> Iterator[Watched]:
    with shared_stack(**CHOSEN) as made:
        yield made


@pytest.fixture
async def made(shared: Watched) -> AsyncIterator[Watched]:
    yield shared
    await aftermath(shared)


def greedy(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def cached(result: Result) -> int:
    return result.finish.usage.cached_tokens


def ids_of(chunk: Chunk) -> list[int]:
    return list(memoryview(chunk.ids).cast("I"))


def resident(made: Watched, service: str) -> int:
    pages = int((Path("/proc") / str(made.pid(service)) / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- what is cached -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
async def test_w04_a_prompt_that_is_wholly_cached_is_answered_three_times_alike(made: Watched, size: int) -> None:
    ids = prompt(200 + size, size)
    async with client_of(made) as client:
        results = [await ask(client, ids, 20) for _ in range(3)]
    assert [result.ids for result in results] == [oracle(ids, 20)] * 3
    assert [cached(result) for result in results] == [0, *[(size - 1) // BLOCK * BLOCK] * 2]


async def test_k07_the_second_turn_reuses_what_the_first_generated(made: Watched) -> None:
    first = prompt(30, 100)
    async with client_of(made) as client:
        answer = await ask(client, first, 50)
        second = [*first, *answer.ids, *prompt(31, 50)]
        result = await ask(client, second, 10)
    assert cached(result) == 149 // BLOCK * BLOCK
    assert result.ids == oracle(second, 10)


async def test_z03_a_shared_prefix_hits_from_one_block_on_and_the_minimum_is_told(made: Watched) -> None:
    base = prompt(40, 64)
    hits = []
    async with client_of(made) as client:
        await ask(client, base, 4)
        for shared_tokens in (BLOCK - 1, BLOCK, BLOCK + 1):
            other = [*base[:shared_tokens], *((token + 1 + shared_tokens) % 256 for token in base[shared_tokens:])]
            result = await ask(client, other, 4)
            assert result.ids == oracle(other, 4)
            hits.append(cached(result))
    assert hits == [0, BLOCK, BLOCK]
    async with watching(made) as look:
        assert (await look())["block_tokens"] == BLOCK
    lines = [line[line.index("{") :] for line in made.log_path.read_text().splitlines() if "worker_up" in line]
    assert [json.loads(line)["shortest_shared_prefix"] for line in lines] == [BLOCK]


# --- what is refused ------------------------------------------------------------------------------------------------


async def test_s07_a_priority_is_refused_by_name_while_the_others_go_on(made: Watched) -> None:
    async with client_of(made) as client, client.generate(ids=prompt(50, 40), sampling=greedy(500)) as busy:
        await busy.accepted()
        urgent = Generate(id=new_id(), ids=pack_u32([1, 2]), sampling=greedy(2), priority=1)
        with pytest.raises(RequestRejected, match="priority is 1") as refused:
            async with client.generate(urgent) as stream:
                await stream.result()
        assert refused.value.rejected.code == "unsupported"
        assert refused.value.rejected.numbers == {"priority": 1}
        assert (await busy.result()).ids == oracle(prompt(50, 40), 500)


async def test_a04_several_choices_are_refused_and_a_closed_stream_leaves_nothing(made: Watched) -> None:
    async with watching(made) as look, client_of(made) as client:
        four = Generate(id=new_id(), ids=pack_u32([1, 2]), sampling=greedy(400), choices=4)
        with pytest.raises(RequestRejected, match="choices is 4"):
            async with client.generate(four) as stream:
                await stream.result()
        before = await look.counter("finished_cancelled")
        for _ in range(4):
            async with client.generate(ids=prompt(51, 60), sampling=greedy(3000)) as stream:
                await anext(stream)
        await settled(made)
        assert await look.counter("finished_cancelled") == before + 4
        assert not client.streams
        async with watching(made, "detokenizer") as detokenizer:
            assert (await detokenizer())["live"] == 0


async def test_i03_a_second_stack_on_one_home_is_refused_and_changes_nothing(made: Watched) -> None:
    command = [sys.executable, "-m", "ops.cli", "serve"]
    second = await trio.run_process(command, env=made.environ, capture_stderr=True, check=False)
    assert second.returncode == NO_STACK
    assert b"is taken by process" in second.stderr
    async with client_of(made) as client:
        assert (await ask(client, [1, 2, 3], 3)).ids == oracle([1, 2, 3], 3)


# --- streams --------------------------------------------------------------------------------------------------------


async def test_s09_a_long_prefill_takes_no_step_from_the_streams(made: Watched) -> None:
    tokens, seen, long = 400, 20, prompt(60, 2000)
    async with watching(made) as look, client_of(made) as client:
        async with trio.open_nursery() as nursery:
            running = [trio.Event() for _ in range(3)]

            async def follow(index: int) -> None:
                ids: list[int] = []
                async with client.generate(ids=prompt(61 + index, 20), sampling=greedy(tokens)) as stream:
                    async for chunk in stream:
                        ids += ids_of(chunk)
                        if len(ids) >= seen:
                            running[index].set()
                assert tuple(ids) == oracle(prompt(61 + index, 20), tokens)

            for index in range(3):
                nursery.start_soon(follow, index)
            for event in running:
                await event.wait()
            before = await look.counter("steps")
            assert (await ask(client, long, 1)).ids == oracle(long, 1)
        steps = await look.counter("steps") - before
    chunks = -(-len(long) // (STEP_TOKENS - 3))
    assert chunks > 20
    assert steps <= tokens - seen + 5  # each step gave each stream a token: the prefill had no step of its own


async def test_t07_a_slow_reader_gets_every_word(made: Watched) -> None:
    ids = prompt(70, 30)
    async with watching(made) as look, client_of(made) as client:
        wanted = await ask(client, ids, 300)
        chunks: list[Chunk] = []
        async with client.generate(ids=ids, sampling=greedy(300), credit=1) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                seen = await look.counter("output_tokens")
                while (await look())["requests"]["running"] and await look.counter("output_tokens") < seen + 40:
                    pass  # the reader sleeps over 40 tokens
    assert len(chunks) < 30
    slow = joined(wanted.id, chunks)
    assert (slow.ids, slow.text) == (wanted.ids, wanted.text)
    assert slow.ids == oracle(ids, 300)


async def test_i10_reads_that_are_cancelled_at_random_lose_and_double_nothing(made: Watched) -> None:
    rng = random.Random(10)
    ids: list[int] = []
    cancelled = 0
    async with client_of(made) as client, client.generate(ids=prompt(80, 30), sampling=greedy(1000)) as stream:
        while stream.finish is None:
            with trio.move_on_after(rng.random() * 0.005) as scope:
                chunk = await anext(stream)
                assert chunk.start == len(ids)
                ids += ids_of(chunk)
            cancelled += scope.cancelled_caught
    assert tuple(ids) == oracle(prompt(80, 30), 1000)
    assert cancelled > 0


# --- too much at once -----------------------------------------------------------------------------------------------


async def until_output(look: Look, tokens: int) -> None:
    """Until that many more tokens have been generated, or all is over."""
    seen = await look.counter("output_tokens")
    while (await look())["requests"]["running"] and await look.counter("output_tokens") < seen + tokens:
        pass


async def test_i05_a_stopped_detokenizer_costs_no_token_and_little_memory(made: Watched) -> None:
    count, tokens = 20, 500
    prompts = [prompt(100 + index, 20) for index in range(count)]
    results: dict[int, Result] = {}
    async with watching(made) as look, client_of(made) as client, trio.open_nursery() as nursery:
        started = [trio.Event() for _ in prompts]

        async def follow(index: int) -> None:
            async with client.generate(ids=prompts[index], sampling=greedy(tokens)) as stream:
                chunks = [await anext(stream)]
                started[index].set()
                results[index] = joined(stream.id, chunks + [chunk async for chunk in stream])

        for index in range(count):
            nursery.start_soon(follow, index)
        for event in started:
            await event.wait()
        before = resident(made, "scheduler")
        pid = made.kill("detokenizer", signal.SIGSTOP)
        try:
            await until_output(look, count * tokens * 3 // 4)
            grown = resident(made, "scheduler") - before
        finally:
            os.kill(pid, signal.SIGCONT)
    assert grown < 32 << 20
    assert [results[index].ids for index in range(count)] == [oracle(ids, tokens) for ids in prompts]
    assert made.pid("detokenizer") == pid


async def test_i05_two_thousand_requests_of_a_client_that_reads_only_afterwards(made: Watched) -> None:
    count, tokens = 2000, 2
    prompts = [[index % 256, index // 256, 7] for index in range(count)]
    before = {service: resident(made, service) for service in ("tokenizer", "scheduler", "detokenizer")}
    async with client_of(made) as client, trio.open_nursery() as nursery:
        over = trio.Event()
        accepted = [trio.Event() for _ in prompts]

        async def follow(index: int) -> None:
            async with client.generate(ids=prompts[index], sampling=greedy(tokens), credit=1) as stream:
                await stream.accepted()
                accepted[index].set()
                await over.wait()
                assert (await stream.result()).ids == oracle(prompts[index], tokens)

        for index in range(count):
            nursery.start_soon(follow, index)
        for event in accepted:
            await event.wait()
        await settled(made)
        grown = {service: resident(made, service) - size for service, size in before.items()}
        over.set()
    assert all(size < 48 << 20 for size in grown.values()), grown


@pytest.mark.parametrize(("characters", "code"), [(27 << 20, "body_too_large"), (1 << 20, "context_too_long")])
async def test_i11_a_book_as_a_prompt_is_refused_while_the_streams_go_on(
    made: Watched, characters: int, code: str
) -> None:
    book = "a word " * (characters // 7)
    async with watching(made) as look, client_of(made) as client, trio.open_nursery() as nursery:

        async def refused() -> Rejected:
            with pytest.raises(RequestRejected) as caught:
                async with client.generate(prompt=book) as stream:
                    await stream.result()
            return caught.value.rejected

        await refused()
        made.before["tokenizer"] = made.footprints()["tokenizer"]  # its heap keeps the room of one book, and no more
        started = [trio.Event() for _ in range(3)]

        async def follow(index: int) -> None:
            async with client.generate(ids=prompt(130 + index, 20), sampling=greedy(4000)) as stream:
                async for _ in stream:
                    started[index].set()

        for index in range(3):
            nursery.start_soon(follow, index)
        for event in started:
            await event.wait()
        before = await look.counter("output_tokens")
        answer = await refused()
        assert (answer.code, len(answer.numbers)) == (code, 2)
        assert await look.counter("output_tokens") >= before + 3 * 5
        assert (await look())["requests"]["running"] == 3
        nursery.cancel_scope.cancel()
