"""Taking figures through the real client: what a user waits for, on the client's own clock."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from ops.bench.peers.interface import Timeline, whole_rate
from ops.client import Client
from ops.stack import Stack
from ops.supervise.silence import sign_of
from shared.messages.front import Finish, Sampling


@dataclass(frozen=True)
class Timed:
    """One request: seconds from sending it to its first token and to its last; its finish; its ids."""

    ttft_s: float
    total_s: float
    tokens: int
    finish: Finish

    @property
    def itl_s(self) -> float:
        """Mean seconds between tokens after the first."""
        return (self.total_s - self.ttft_s) / max(self.tokens - 1, 1)


def greedy(tokens: int) -> Sampling:
    """Exactly so many tokens."""
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)


async def timed(client: Client, ids: Sequence[int], tokens: int) -> Timed:
    """One greedy request of exactly `tokens` new tokens."""
    begun = time.perf_counter()
    first = 0.0
    async with client.generate(ids=ids, sampling=greedy(tokens)) as stream:
        async for chunk in stream:
            if chunk.end > 0:
                first = first or time.perf_counter() - begun
        total = time.perf_counter() - begun
        if stream.finish is None:
            raise RuntimeError("a stream ended without its finish")
        return Timed(first, total, stream.finish.usage.completion_tokens, stream.finish)


async def together(client: Client, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """All prompts at once; new tokens a second over the whole."""
    return whole_rate(await timelines(client, prompts, tokens))


async def timelines(client: Client, prompts: Sequence[Sequence[int]], tokens: int) -> list[Timeline]:
    """All prompts at once, `tokens` new ones each; the clock of all starts with the first request."""
    found: dict[int, Timeline] = {}
    begun = time.perf_counter()

    async def follow(number: int, ids: Sequence[int]) -> None:
        arrivals: list[float] = []
        async with client.generate(ids=ids, sampling=greedy(tokens)) as stream:
            async for chunk in stream:
                arrivals += [time.perf_counter() - begun] * (chunk.end - chunk.start)
        if len(arrivals) != tokens:
            raise RuntimeError(f"{len(arrivals)} of {tokens} tokens came")
        found[number] = Timeline(tuple(arrivals), tokens)

    async with trio.open_nursery() as nursery:
        for number, ids in enumerate(prompts):
            nursery.start_soon(follow, number, ids)
    return [found[number] for number in range(len(prompts))]


def cpu_s(stack: Stack, service: str) -> float:
    """CPU seconds of a service's process so far, in user and kernel mode."""
    return sign_of(stack.pid(service))[1]


def interleaved(runs: Sequence[Callable[[], None]], repeats: int, clock: Callable[[], float]) -> list[float]:
    """Median seconds of each, after one round that doesn't count."""
    taken: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats + 1):
        for side, run in enumerate(runs):
            begun = clock()
            run()
            if turn:
                taken[side].append(clock() - begun)
    return [statistics.median(seconds) for seconds in taken]


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of a few runs."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.low:.4g}-{self.high:.4g})"


async def pool_touched(stack: Stack) -> None:
    """Waits until the idle worker has touched its whole pool, so that no first touch falls into a measurement."""
    with trio.fail_after(120):
        while True:
            worker = (await stack.snapshots())["worker"]
            pool = worker.data["pool"] if worker is not None else {}
            if pool and pool["prefaulted"] >= pool["blocks"] * pool["block_bytes"]:
                return
            await trio.sleep(0.2)  # a poll of status


async def all_saved(stack: Stack, patience_s: float = 120.0) -> None:
    """Waits until everything that requests left behind is in the host tier and on disk, and nobody writes any more."""
    with trio.fail_after(patience_s):
        while True:
            found = await stack.snapshots()
            scheduler, store = found["scheduler"], found["store"]
            if scheduler is None or store is None:
                busy = True
            else:
                busy = scheduler.data["requests"]["saving"] or store.data["tiers"]["host"]["dirty"]
            if not busy:
                return
            await trio.sleep(0.05)  # a poll of status
