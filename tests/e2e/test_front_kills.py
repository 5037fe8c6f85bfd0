"""Front services as processes, killed or stopped at exact moments; `test_deaths.py` has the whole stack.

The answer must be the toy oracle's whatever is killed, and a request must exist once.
"""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from ops.client import Client, Result, Stream, connected
from shared.messages.base import pack_u32
from shared.messages.front import Generate, Sampling
from shared.model.toy import toy_decode, toy_generate
from shared.paths import Places
from tests.e2e.processes import FRONT, SEED, Processes, processes

PROMPT = list(b"the quick brown fox jumps over the lazy dog")
TOKENS = 400
WANTED = toy_generate(SEED, PROMPT, TOKENS)


def request(request_id: str = "ab" * 16) -> Generate:
    return Generate(id=request_id, ids=pack_u32(PROMPT), sampling=Sampling(max_tokens=TOKENS))


@asynccontextmanager
async def serving(places: Places, *but: str) -> AsyncIterator[tuple[Processes, Client]]:
    """All front services but some, and a client. Every token is a step of its own, and so many moments to die at."""
    async with processes(places, {"PERDURE_SCHEDULER__BURST_S": "0"}) as running, connected(places) as client:
        for role in FRONT:
            if role not in but:
                await running.start(role)
        yield running, client


def check(result: Result) -> None:
    assert list(result.ids) == WANTED
    assert result.text == toy_decode(WANTED)
    assert result.finish.reason == "length"
    assert result.finish.usage.completion_tokens == TOKENS
    assert result.finish.usage.prompt_tokens == len(PROMPT)


async def result_of(stream: Stream) -> Result:
    with trio.fail_after(60):
        return await stream.result()


@pytest.mark.parametrize("hook", ["tokenizer_before_submit", "tokenizer_after_journaled"])
async def test_the_tokenizer_dies_around_its_submit_and_the_client_sends_again(places: Places, hook: str) -> None:
    async with serving(places, "tokenizer") as (running, client):
        await running.start("tokenizer", **{hook: "exit"})
        async with client.generate(request()) as stream:
            await running.wait_end("tokenizer")
            await running.start("tokenizer")
            check(await result_of(stream))
        scheduler = await running.snapshot("scheduler")
        assert scheduler is not None
        assert scheduler.data["requests"]["retained"] == 1


async def test_each_service_is_killed_in_turn_while_one_answer_streams(places: Places) -> None:
    async with serving(places) as (running, client), client.generate(request()) as stream:
        chunks = []
        for role in FRONT:
            chunks.append(await anext(stream))
            await running.replace(role)
        rest = await result_of(stream)
    ids = b"".join(chunk.ids for chunk in chunks) + pack_u32(rest.ids)
    assert ids == pack_u32(WANTED)
    assert "".join(chunk.text for chunk in chunks) + rest.text == toy_decode(WANTED)


async def test_i05_a_stopped_detokenizer_loses_no_delta_of_twenty_streams(places: Places) -> None:
    async with serving(places) as (running, client):
        results: dict[int, Result] = {}

        async def one(n: int) -> None:
            async with client.generate(request(f"{n:032x}")) as stream:
                results[n] = await result_of(stream)

        async with trio.open_nursery() as nursery:
            for n in range(20):
                nursery.start_soon(one, n)
            detokenizer = running._running["detokenizer"]
            detokenizer.send_signal(signal.SIGSTOP)
            journaled = 0
            with trio.fail_after(60):
                while journaled < 20 * TOKENS // 2:  # the engine goes on meanwhile
                    snapshot = await running.snapshot("scheduler")
                    assert snapshot is not None
                    journaled = snapshot.data["counters"]["output_tokens"]
            detokenizer.send_signal(signal.SIGCONT)
        for result in results.values():
            check(result)
