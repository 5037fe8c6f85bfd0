"""What durability costs a cache that never hits: journal and write-through on, against both off.

Two stacks, alike but for the bench switch, take the same kind of work in turn. Clocks are the scheduler's own, from
acceptance to the last token, and no client follows a request while it runs, so that no client is measured.
"""

from collections.abc import Callable

import trio

from ops.bench.bare_stack import BareStack
from ops.bench.measure import Spread, pool_touched
from ops.client import Client, connected, new_id
from ops.stack import Stack
from shared.messages.base import pack_u32
from shared.messages.front import Finish, Generate, Sampling

PROMPT = 128
TOKENS = 128
BATCHES = (1, 8)
POLL_S = 0.25

Fresh = Callable[[int], list[int]]
Note = Callable[[str, Spread, Spread | None, float, str], None]


async def _ended(stack: Stack) -> int:
    scheduler = (await stack.snapshots())["scheduler"]
    return int(scheduler.data["counters"]["finished_length"]) if scheduler is not None else 0


async def _finish(client: Client, request_id: str) -> Finish:
    async with client.follow(request_id, start=TOKENS - 1) as stream:
        return (await stream.result()).finish


async def rate(stack: Stack, prompts: list[list[int]]) -> float:
    """New tokens a second of so many detached requests at once."""
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    before = await _ended(stack)
    async with connected(stack.places) as client:
        requests = [Generate(id=new_id(), ids=pack_u32(ids), sampling=sampling, detached=True) for ids in prompts]
        for request in requests:
            async with client.generate(request) as stream:
                await stream.accepted()
        while await _ended(stack) < before + len(prompts):  # noqa: ASYNC110 - other processes
            await trio.sleep(POLL_S)
        finishes = [await _finish(client, request.id) for request in requests]
    cached = sum(finish.usage.cached_tokens for finish in finishes)
    if cached:
        raise RuntimeError(f"{cached} tokens came from the cache, which was to have nothing")
    return len(prompts) * TOKENS / max(finish.timing.total_s for finish in finishes)


async def overhead(settings: dict[str, str], fresh: Fresh, note: Note, rounds: int) -> None:
    """Both batches, in turn on both stacks, the order swapped each round."""
    with Stack(settings) as durable, BareStack(settings) as bare:
        found: dict[tuple[Stack, int], list[float]] = {(stack, n): [] for stack in (durable, bare) for n in BATCHES}
        for stack in (durable, bare):
            await stack.start()
            await pool_touched(stack)
            await rate(stack, [fresh(PROMPT)])
        for number in range(rounds):
            for batch in BATCHES:
                for stack in (durable, bare) if number % 2 else (bare, durable):
                    found[stack, batch].append(await rate(stack, [fresh(PROMPT) for _ in range(batch)]))
        for batch in BATCHES:
            ours, theirs = Spread.of(found[durable, batch]), Spread.of(found[bare, batch])
            name = f"batch {batch}, journal and write-through on, tokens/s (alternative: both off)"
            note(name, ours, theirs, ours.median / theirs.median, ">= 0.97")
