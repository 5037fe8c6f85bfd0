"""What running streams notice while the tokenizer encodes a prompt of a megabyte: seconds between their tokens."""

import statistics
from collections.abc import Callable
from itertools import pairwise

import trio

from ops.bench.measure import Spread, greedy
from ops.client import Client, RequestRejected, connected
from ops.prompts import passage
from ops.stack import Stack

STREAMS = 4
TOKENS = 512
PROMPT = 128
MEGABYTE = 1_000_000

Fresh = Callable[[int], list[int]]
Note = Callable[[str, Spread, Spread | None, float, str], None]


async def encoding(stack: Stack, fresh: Fresh, note: Note, rounds: int) -> None:
    """Each round: streams run, and after a while a prompt is sent that is too long, which only encoding can tell."""
    text = passage(1, MEGABYTE)[:MEGABYTE]
    quiet, busy = list[float](), list[float]()
    async with connected(stack.places) as client:
        for _ in range(rounds):
            gaps = await _gaps(client, [fresh(PROMPT) for _ in range(STREAMS)], text)
            for found, kept in zip(gaps, (quiet, busy), strict=True):
                kept.append(statistics.fmean(found))
    a, b = Spread.of(busy), Spread.of(quiet)
    name = f"seconds between tokens of {STREAMS} streams while 1 MB is encoded (alternative: before)"
    note(name, a, b, a.median / b.median, "<= 1.3")


async def _gaps(client: Client, prompts: list[list[int]], text: str) -> tuple[list[float], list[float]]:
    """Gaps between tokens before the long prompt is sent, and until it is refused."""
    arrivals: list[list[float]] = [[] for _ in prompts]
    span: list[float] = []
    quarter = trio.Event()
    async with trio.open_nursery() as nursery:

        async def follow(number: int, ids: list[int]) -> None:
            async with client.generate(ids=ids, sampling=greedy(TOKENS)) as stream:
                async for chunk in stream:
                    arrivals[number] += [trio.current_time()] * (chunk.end - chunk.start)
                    if min(map(len, arrivals)) >= TOKENS // 4:
                        quarter.set()

        for number, ids in enumerate(prompts):
            nursery.start_soon(follow, number, ids)
        await quarter.wait()
        span.append(trio.current_time())
        try:
            async with client.generate(prompt=text) as stream:
                await stream.accepted()
            raise RuntimeError("a megabyte of text was taken for a prompt")
        except RequestRejected as refused:
            if refused.rejected.code != "context_too_long":
                raise
        span.append(trio.current_time())
    begun = max(each[0] for each in arrivals)
    before: list[float] = []
    during: list[float] = []
    for each in arrivals:
        for earlier, later in pairwise(each):
            if begun < earlier and later < span[0]:
                before.append(later - earlier)
            elif earlier < span[1] and span[0] < later:
                during.append(later - earlier)
    if not during:
        raise RuntimeError("the streams were over before the prompt was encoded")
    return before, during
