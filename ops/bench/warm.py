"""A prefix of 6,000 cached tokens and 32 new ones: from the device, after `kill -9` of the worker, from a cold disk.

The cold disk: the whole stack stops, host tier and page cache are given up as a reboot would, everything starts again,
and the request comes once all is ready. What it may take beyond the warm one is what the disk takes for its bytes, at
the rate of plain direct reads of the same files in the same round.
"""

import os
from collections.abc import Callable
from pathlib import Path

import trio

from ops.bench.direct_reads import direct_rate, forget_pages
from ops.bench.measure import Spread, Timed, all_saved, timed
from ops.client import connected
from ops.stack import Stack

CACHED, NEW = 6000, 32
SLACK = 1.15
"""Of the disk's own time."""
DROP_CACHES = Path("/proc/sys/vm/drop_caches")

Fresh = Callable[[int], list[int]]
Note = Callable[[str, Spread, Spread | None, float, str], None]


async def warm(stack: Stack, fresh: Fresh, note: Note, rounds: int) -> None:
    """All of it, `rounds` times; the stack is left running."""
    cold, device, killed, disk = list[float](), list[float](), list[float](), list[float]()
    allowed, rates, nbytes = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        prefix = fresh(CACHED)
        cold.append((await _asked(stack, prefix + fresh(NEW))).ttft_s)
        device.append((await _asked(stack, prefix + fresh(NEW), "device")).ttft_s)
        await all_saved(stack)
        stack.kill("worker")
        await stack.wait_serving()
        killed.append((await _asked(stack, prefix + fresh(NEW), "host")).ttft_s)
        await all_saved(stack)
        await stack.stop()
        stack.remove_arena()
        rates.append(await trio.to_thread.run_sync(direct_rate, stack.places.store / "segments"))
        await trio.to_thread.run_sync(forget_everything, stack.places.store)
        await stack.start()
        found = await _asked(stack, prefix + fresh(NEW), "disk")
        disk.append(found.ttft_s)
        nbytes.append(found.finish.usage.cached_by_tier["disk"] * await _token_bytes(stack))
        allowed.append(device[-1] + SLACK * nbytes[-1] / rates[-1])
    base, ours = Spread.of(cold), Spread.of(device)
    name = f"{CACHED:,} cached + {NEW} new, TTFT, s"
    note(f"{name} (alternative: cold)", ours, base, ours.median / base.median, "<= 0.05")
    after = Spread.of(killed)
    note(f"{name}, after kill -9 of the worker (alternative: cold)", after, base, after.median / base.median, "<= 0.1")
    note(f"{name}, after kill -9 of the worker (alternative: warm)", after, ours, after.median / ours.median, "<= 1.25")
    late, most = Spread.of(disk), Spread.of(allowed)
    name += f", from a cold disk (alternative: warm + {SLACK} x the disk's own time)"
    note(name, late, most, late.median / most.median, "<= 1")
    note("bytes of that prefix, MB", Spread.of([each / 1e6 for each in nbytes]), None, 1.0, "none")
    rate = Spread.of([each / 1e9 for each in rates])
    note("plain direct reads of its files, GB/s", rate, None, rate.median, "none")


async def _asked(stack: Stack, ids: list[int], tier: str = "") -> Timed:
    """Time to the first token; RuntimeError unless most of the prefix came from `tier`."""
    async with connected(stack.places) as client:
        await client.tokenizer.wait_up()
        await client.detokenizer.wait_up()
        found = await timed(client, ids, 1)
    usage = found.finish.usage
    if tier and usage.cached_by_tier.get(tier, 0) < CACHED // 2:
        raise RuntimeError(f"wanted {CACHED} tokens from the {tier} tier, got {usage}")
    return found


async def _token_bytes(stack: Stack) -> int:
    """Bytes of KV a token, as the worker says."""
    worker = (await stack.snapshots())["worker"]
    if worker is None:
        raise RuntimeError("the worker does not answer")
    pool, block_tokens = worker.data["pool"], worker.data["block_tokens"]
    return int(pool["block_bytes"]) // int(block_tokens)


def forget_everything(store: Path) -> None:
    """Makes reads cold: of everything where we may (root), else of the store's own files."""
    os.sync()
    try:
        DROP_CACHES.write_text("3")
    except OSError:
        forget_pages(store)
