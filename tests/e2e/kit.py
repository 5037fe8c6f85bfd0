"""A real stack on the toy model: strict equality, no torch, up in a second or two."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from ops.client import Client, Result, connected
from ops.stack import Stack
from services.scheduler.ledger_rows import read_ledger
from shared.messages.front import Sampling
from shared.model.toy import toy_generate

SEED = 7
BLOCK = 16
DEADLINE_S = 60.0
TOY = {
    "PERDURE_MODEL__SOURCE": f"toy:{SEED}",
    "PERDURE_KV__POOL_BYTES": "1 MiB",
    "PERDURE_STORE__HOST_BYTES": "4 MiB",
    "PERDURE_STORE__DISK_BYTES": "16 MiB",
}


def hooks(**steps: str) -> dict[str, str]:
    """Settings that set fault hooks, e.g. `hooks(worker_in_step="exit:10")`."""
    return {f"PERDURE_FAULTS__HOOKS__{name.upper()}": action for name, action in steps.items()}


def prompt(number: int, tokens: int) -> list[int]:
    """Token ids that share no block with another number's."""
    return [(number * 37 + position * (number + 3) + position * position) % 256 for position in range(tokens)]


def oracle(ids: Sequence[int], tokens: int) -> tuple[int, ...]:
    """What the model says, computed without any cache, batch or process."""
    return tuple(toy_generate(SEED, list(ids), tokens))


@asynccontextmanager
async def stack(**settings: str) -> AsyncIterator[Stack]:
    """A started toy stack that is removed at the end. `settings` in environment form."""
    with Stack(TOY | settings, share_models=False) as made:
        with trio.fail_after(DEADLINE_S):
            await made.start()
        yield made


async def ask(client: Client, ids: Sequence[int], tokens: int) -> Result:
    """One greedy request, read to its end."""
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    async with client.generate(ids=ids, sampling=sampling) as stream:
        return await stream.result()


async def ask_all(made: Stack, prompts: Sequence[Sequence[int]], tokens: int) -> list[Result]:
    """All prompts at once, through one client that waits for services as long as the test may last."""
    results: list[Result | None] = [None] * len(prompts)
    with trio.fail_after(DEADLINE_S):
        async with connected(made.places, recovery_timeout_s=DEADLINE_S) as client, trio.open_nursery() as nursery:

            async def one(index: int) -> None:
                results[index] = await ask(client, prompts[index], tokens)

            for index in range(len(prompts)):
                nursery.start_soon(one, index)
    return [result for result in results if result is not None]


async def settled(made: Stack) -> dict[str, dict[str, int]]:
    """The scheduler's own numbers once it is idle: nothing locked, nothing waiting, every block accounted for."""
    with trio.fail_after(DEADLINE_S):
        while True:
            snapshot = (await made.snapshots())["scheduler"]
            if snapshot is not None and snapshot.data.get("worker_ready"):
                pool, requests = snapshot.data["pool"], snapshot.data["requests"]
                busy = [requests[name] for name in ("waiting", "running", "loading", "leaving", "in_flight", "saving")]
                if not any(busy) and pool["locked"] == 0:
                    assert pool["free"] + pool["cached"] + pool["locked"] == pool["total"]
                    return {"pool": pool, "requests": requests, "counters": snapshot.data["counters"]}
            await trio.sleep(0.05)  # a poll of status, bounded by the test's deadline


async def ledger_rows(made: Stack, count: int) -> list[dict[str, Any]]:
    """The ledger once it holds `count` requests: it follows behind the journal."""
    while len(rows := read_ledger(made.places.ledger, limit=count + 1)) < count:  # noqa: ASYNC110 - another process's file
        await trio.sleep(0.05)
    return rows
