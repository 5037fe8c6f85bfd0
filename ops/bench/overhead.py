"""What cache, tiers and persistence cost when nothing is ever hit: all on, against journal and write-through off, and
against all off.

Three stacks, alike but for that, take the same kind of work in turn. Clocks are the scheduler's own, from
acceptance to the last token, and no client follows a request while it runs, so that no client is measured.
"""

from collections.abc import Callable
from dataclasses import dataclass

import trio

from ops.admin import SERVICES
from ops.bench.bare_stack import BareStack
from ops.bench.measure import Spread, cpu_s, pool_touched
from ops.client import Client, connected, new_id
from ops.stack import Stack
from shared.messages.base import pack_u32
from shared.messages.front import Finish, Generate, Sampling

PROMPT = 128
TOKENS = 256
BATCHES = (1, 8)
OFF = {
    "PERDURE_KV__PREFIX_CACHE": "false",
    "PERDURE_STORE__HOST_BYTES": "0",
    "PERDURE_STORE__DISK_BYTES": "0",
}
"""What the other side leaves off beside journal, ledger and write-through."""
POLL_S = 0.25

Fresh = Callable[[int], list[int]]
Note = Callable[[str, Spread, Spread | None, float, str], None]


@dataclass(frozen=True)
class Cost:
    """Tokens a second, and the CPU seconds that all services took together, of one batch."""

    rate: float
    cpu_s: float


def _cpu_s(stack: Stack) -> float:
    return sum(cpu_s(stack, service) for service in SERVICES)


async def _ended(stack: Stack) -> int:
    scheduler = (await stack.snapshots())["scheduler"]
    return int(scheduler.data["counters"]["finished_length"]) if scheduler is not None else 0


async def _finish(client: Client, request_id: str) -> Finish:
    async with client.follow(request_id, start=TOKENS - 1) as stream:
        return (await stream.result()).finish


async def cost(stack: Stack, prompts: list[list[int]]) -> Cost:
    """Of so many detached requests at once."""
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    before, used_s = await _ended(stack), _cpu_s(stack)
    async with connected(stack.places) as client:
        requests = [Generate(id=new_id(), ids=pack_u32(ids), sampling=sampling, detached=True) for ids in prompts]
        for request in requests:
            async with client.generate(request) as stream:
                await stream.accepted()
        while await _ended(stack) < before + len(prompts):  # noqa: ASYNC110 - other processes
            await trio.sleep(POLL_S)
        used_s = _cpu_s(stack) - used_s
        finishes = [await _finish(client, request.id) for request in requests]
    cached = sum(finish.usage.cached_tokens for finish in finishes)
    if cached:
        raise RuntimeError(f"{cached} tokens came from the cache, which was to have nothing")
    return Cost(len(prompts) * TOKENS / max(finish.timing.total_s for finish in finishes), used_s)


async def overhead(settings: dict[str, str], fresh: Fresh, note: Note, rounds: int) -> None:
    """Both batches, in turn on all stacks, the order turned each round."""
    with Stack(settings) as durable, BareStack(settings) as forgetful, BareStack(settings | OFF) as bare:
        stacks: list[Stack] = [durable, forgetful, bare]
        found: dict[tuple[Stack, int], list[Cost]] = {(stack, n): [] for stack in stacks for n in BATCHES}
        for stack in stacks:
            await stack.start()
            await pool_touched(stack)
            await cost(stack, [fresh(PROMPT)])
        for _ in range(rounds):
            for batch in BATCHES:
                for stack in stacks:
                    found[stack, batch].append(await cost(stack, [fresh(PROMPT) for _ in range(batch)]))
            stacks.append(stacks.pop(0))
        for other, without, least in (
            (forgetful, "journal and write-through off", 0.97),
            (bare, "cache, tiers, journal off", 0.98),
        ):
            for batch in BATCHES:
                name = f"batch {batch}, nothing ever hit: all on, {{}} (alternative: {without})"
                ours, theirs = found[durable, batch], found[other, batch]
                _compare(note, name.format("tokens/s"), [c.rate for c in ours], [c.rate for c in theirs], f">= {least}")
                used = [c.cpu_s for c in ours], [c.cpu_s for c in theirs]
                _compare(note, name.format("CPU s of all services"), *used, "none: says why")


def _compare(note: Note, name: str, ours: list[float], theirs: list[float], bar: str) -> None:
    mine, other = Spread.of(ours), Spread.of(theirs)
    note(name, mine, other, mine.median / other.median, bar)
