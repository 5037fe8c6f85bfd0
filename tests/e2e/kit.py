"""A real stack on the toy model: strict equality, no torch, up in a second or two."""

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio

from ops.admin import SERVICES, admin, reach
from ops.client import Client, Result, Stream, connected
from ops.stack import Stack
from services.scheduler.ledger_rows import read_ledger
from shared.messages.front import Sampling
from shared.messages.hello import Snapshot, Status
from shared.model.toy import toy_generate

SEED = 7
BLOCK = 16
DEADLINE_S = 60.0
PATIENT = {
    # A machine that is busy with something else is no miss; tests of these deadlines set their own.
    "PERDURE_SCHEDULER__LOOKUP_S": "20",
    "PERDURE_SCHEDULER__LOAD_S": "20",
    "PERDURE_SCHEDULER__RESTORE": "load",  # the toy computes quicker than anything is loaded
}
TOY = PATIENT | {
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


class Watched(Stack):
    """A stack that remembers what was sent to it, and how large its services were before."""

    def __init__(self, settings: dict[str, str]) -> None:
        super().__init__(settings, share_models=False)
        self.streams: list[Stream] = []
        self.before: dict[str, tuple[int, int]] = {}

    def accepted(self) -> list[str]:
        """Ids of the requests that were promised an answer."""
        return [stream.id for stream in self.streams if stream.prompt_tokens is not None]

    def footprints(self) -> dict[str, tuple[int, int]]:
        """Open files and resident bytes of each service."""
        found = {}
        for service in SERVICES:
            proc = Path("/proc") / str(self.pid(service))
            pages = int((proc / "statm").read_text().split()[1])
            found[service] = len(list((proc / "fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE")
        return found

    def complaints(self) -> list[str]:
        """What the services logged as errors."""
        return [line for line in self.log_path.read_text().splitlines() if '"level": "error"' in line]


@asynccontextmanager
async def stack(**settings: str) -> AsyncIterator[Watched]:
    """A started toy stack that is removed at the end. `settings` in environment form."""
    with Watched(TOY | settings) as made:
        with trio.fail_after(DEADLINE_S):
            await made.start()
        yield made


@contextmanager
def shared_stack(**settings: str) -> Iterator[Watched]:
    """A stack for all tests of a file, for a fixture of module scope; at its end the ledger is compared."""
    with Watched(TOY | settings) as made:
        trio.run(made.start)
        yield made
        trio.run(reckoned, made)
        assert not made.complaints()


@asynccontextmanager
async def client_of(made: Stack) -> AsyncIterator[Client]:
    """A client that waits for services as long as the test may last, and notes its requests in a Watched stack."""
    with trio.fail_after(DEADLINE_S):
        async with connected(made.places, recovery_timeout_s=DEADLINE_S) as client:
            if isinstance(made, Watched):
                generate, streams = client.generate, made.streams

                def noted(*args: Any, **options: Any) -> Stream:
                    streams.append(generate(*args, **options))
                    return streams[-1]

                client.generate = noted  # type: ignore[method-assign]
            yield client


async def ask(client: Client, ids: Sequence[int], tokens: int) -> Result:
    """One greedy request, read to its end."""
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    async with client.generate(ids=ids, sampling=sampling) as stream:
        return await stream.result()


async def ask_all(made: Stack, prompts: Sequence[Sequence[int]], tokens: int) -> list[Result]:
    """All prompts at once, through one client."""
    results: list[Result | None] = [None] * len(prompts)
    async with client_of(made) as client, trio.open_nursery() as nursery:

        async def one(index: int) -> None:
            results[index] = await ask(client, prompts[index], tokens)

        for index in range(len(prompts)):
            nursery.start_soon(one, index)
    return [result for result in results if result is not None]


@asynccontextmanager
async def watching(made: Stack, service: str = "scheduler") -> AsyncIterator["Look"]:
    """For looking at one service again and again."""
    async with admin(made.places) as node:
        yield Look(node, service)


class Look:
    """Asks one service for its own numbers."""

    def __init__(self, node: Any, service: str) -> None:
        self._node = node
        self._service = service

    async def __call__(self) -> dict[str, Any]:
        """What `perdure status` shows of it."""
        peer = await reach(self._node, self._service, deadline_s=DEADLINE_S)
        assert peer is not None
        snapshot: Snapshot = await peer.ask(Status(), Snapshot, deadline_s=DEADLINE_S)
        return snapshot.data

    async def counter(self, name: str) -> int:
        """A counter of the scheduler."""
        return int((await self())["counters"][name])


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


async def reckoned(made: Watched) -> None:
    """The ledger holds each promised request once, and nothing else."""
    accepted = made.accepted()
    with trio.fail_after(DEADLINE_S):
        rows = await ledger_rows(made, len(accepted))
    assert sorted(row["id"] for row in rows) == sorted(accepted)


PATIENCE_S = 20.0
SLACK_FILES = 3
"""A connection of the test's own that is being closed, or a status query."""
SLACK_BYTES = 48 << 20


async def aftermath(made: Watched) -> None:
    """What must hold after any test of a stack that is idle again; the first call only looks at the sizes."""
    await settled(made)
    async with client_of(made) as client:
        small = [len(made.streams) % 256, 1, 2]
        assert (await ask(client, small, 3)).ids == oracle(small, 3)
    await settled(made)
    homes = [made.places.home, made.places.run]
    assert not [path for home in homes for path in home.rglob("*") if path.suffix in (".tmp", ".part")]
    shm = [path.name for path in made.places.arena().parent.glob(f"perdure-{made.places.home_hash}*")]
    assert shm == [made.places.arena().name]
    made.before = made.before or made.footprints()
    with trio.move_on_after(PATIENCE_S):
        while larger(made):  # noqa: ASYNC110 - other processes notice one by one that connections were closed
            await trio.sleep(0.05)
    grown = larger(made)
    assert not grown, grown


def larger(made: Watched) -> dict[str, str]:
    """Services with more open files or memory than before, beyond the slack."""
    grown = {}
    for service, (files, size) in made.footprints().items():
        files_before, size_before = made.before[service]
        if files > files_before + SLACK_FILES or size > size_before + SLACK_BYTES:
            grown[service] = f"{files_before} -> {files} files, {size_before >> 20} -> {size >> 20} MiB"
    return grown
