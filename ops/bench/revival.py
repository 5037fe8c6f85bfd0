"""After `kill -9` of everything: how much of what was complete comes back, and how soon the first hit answers.

kept    50 prompts of their own, everything killed behind the last answer, started again, the same 50 prompts:
tokens served from the cache against what the killed run's recorded commits say was complete
first   time to first token of the first hit after such a kill (models loaded), against hits of the same length
on the same tier in a run that nobody disturbs: there the pool is too small, so that they come from the host
"""

from collections.abc import Callable
from pathlib import Path

from ops.bench.measure import Spread, Timed, timed
from ops.client import connected
from ops.stack import Stack
from services.store.commits import whole_chains

PROMPTS = 50
PROMPT_BLOCKS = 8
FIRST_BLOCKS = 16
OTHERS = 4
"""Other prompts between two hits of an undisturbed run, which push a prompt out of the pool."""

PATIENT = {"PERDURE_SCHEDULER__LOOKUP_S": "2"}
"""A lookup that a busy machine answers late would count as a miss, and hide what was kept."""

Fresh = Callable[[int], list[int]]
Note = Callable[[str, Spread, Spread | None, float, str], None]


def _last_blocks(block: int, blocks: int) -> int:
    """Tokens of a prompt of so many full blocks: the rest makes sure that all of them may count as cached."""
    return block * blocks + block // 2


async def _host_hit(stack: Stack, ids: list[int], tokens: int) -> Timed:
    """The first request of a new client, its whole prefix from the host tier; RuntimeError if it was not."""
    async with connected(stack.places) as client:
        found = await timed(client, ids, 1)
    if found.finish.usage.cached_by_tier["host"] < tokens:
        raise RuntimeError(f"wanted {tokens} tokens from the host tier, got {found.finish.usage}")
    return found


async def block_tokens(stack: Stack) -> int:
    """Tokens a block, as the scheduler says."""
    scheduler = (await stack.snapshots())["scheduler"]
    if scheduler is None or not scheduler.data.get("block_tokens"):
        raise RuntimeError("the scheduler does not say how long its blocks are")
    return int(scheduler.data["block_tokens"])


async def kept(settings: dict[str, str], fresh: Fresh, note: Note) -> None:
    """Tokens that come back, of those that were complete."""
    with Stack(settings) as stack:
        commits = stack.base / "commits"
        stack.settings["PERDURE_FAULTS__RECORD_COMMITS"] = str(commits)
        await stack.start()
        block = await block_tokens(stack)
        prompts = [fresh(_last_blocks(block, PROMPT_BLOCKS)) for _ in range(PROMPTS)]
        async with connected(stack.places) as client:
            for ids in prompts:
                await timed(client, ids, 1)
        stack.kill_all()
        complete = block * len(whole_chains(Path(commits)))
        await stack.start()
        cached = 0
        async with connected(stack.places) as client:
            for ids in prompts:
                cached += (await timed(client, ids, 1)).finish.usage.cached_tokens
    ours, theirs = Spread.of([float(cached)]), Spread.of([float(complete)])
    whole = PROMPTS * PROMPT_BLOCKS * block
    note(
        f"tokens cached after kill -9 of everything, of those complete ({complete} of {whole})",
        ours, theirs, cached / max(complete, 1), ">= 0.99",
    )  # fmt: skip


async def first(settings: dict[str, str], fresh: Fresh, note: Note, rounds: int) -> None:
    """Time to first token of the first hit after a kill of everything."""
    revived, undisturbed = [], []
    with Stack(settings) as stack:
        await stack.start()
        block = await block_tokens(stack)
        stack.settings["PERDURE_FAULTS__MAX_POOL_BLOCKS"] = str(2 * FIRST_BLOCKS + 4)
        await stack.stop()
        await stack.start()
        tokens = block * FIRST_BLOCKS
        for _ in range(rounds):
            prompts = [fresh(_last_blocks(block, FIRST_BLOCKS)) for _ in range(OTHERS)]
            async with connected(stack.places) as client:
                for ids in prompts:
                    await timed(client, ids, 1)
            undisturbed += [(await _host_hit(stack, ids, tokens)).ttft_s for ids in prompts]
            stack.kill_all()
            await stack.start()
            revived.append((await _host_hit(stack, prompts[0], tokens)).ttft_s)
    ours, theirs = Spread.of(revived), Spread.of(undisturbed)
    name = f"first hit of {tokens} tokens after kill -9 of everything, TTFT, s (alternative: undisturbed host hit)"
    note(name, ours, theirs, ours.median / theirs.median, "<= 1.5")


async def revival(settings: dict[str, str], fresh: Fresh, note: Note, rounds: int) -> None:
    """Both figures, on stacks of their own."""
    settings = settings | PATIENT
    await kept(settings, fresh, note)
    await first(settings, fresh, note, rounds)
