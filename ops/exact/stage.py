"""A stack that can bring about each circumstance, and the answers that it gives there."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import trio

from ops.client import Client, Result, connected, new_id
from ops.exact.plan import Cell, Machine
from ops.stack import Stack
from shared.messages.base import pack_u32
from shared.messages.front import Generate, Sampling

TOKENS = 32
WHOLE = 8192
"""Tokens a step that hold any prompt of the matrix."""
SETTLED_S = 60.0
MIB = 1 << 20


class NotExercised(RuntimeError):
    """A request was not served from the tier that its cell is about, so it proves nothing."""


@dataclass(frozen=True)
class Answer:
    """Ids and the bits of their log-probabilities. `cached`: tokens by tier."""

    ids: tuple[int, ...]
    logprobs: tuple[str, ...]
    cached: dict[str, int]


def answer_of(result: Result) -> Answer:
    """The part of a result that must be equal, and where it came from."""
    if result.logprobs is None:
        raise RuntimeError("logprobs were asked for and did not come")
    bits = tuple(f"{one.chosen.hex()} {' '.join(x.hex() for x in one.top)}" for one in result.logprobs)
    return Answer(tuple(result.ids), bits, dict(result.finish.usage.cached_by_tier))


def settings(machine: Machine, source: str, prompts: Sequence[Sequence[int]], kv_bytes: int) -> dict[str, str]:
    """Of a stack whose every tier holds the KV of all prompts; `kv_bytes`: of one token."""
    room = 64 * MIB + sum(len(ids) + TOKENS + 128 for ids in prompts) * kv_bytes
    values = {
        "PERDURE_MODEL__SOURCE": source,
        "PERDURE_MODEL__THREADS": str(machine.threads),
        "PERDURE_SCHEDULER__STEP_TOKENS": str(machine.chunk or WHOLE),
        "PERDURE_SCHEDULER__LOOKUP_S": "20",
        "PERDURE_SCHEDULER__RESTORE": "load",  # each tier is to be seen, whatever is quicker
        "PERDURE_SCHEDULER__LOAD_S": "60",
        "PERDURE_KV__POOL_BYTES": str(2 * room),
        "PERDURE_STORE__HOST_BYTES": str(2 * room),
        "PERDURE_STORE__DISK_BYTES": str(3 * room),
    }
    return values | ({"PERDURE_CPU_ISA": machine.isa} if machine.isa else {})


class Stage:
    """Asks the prompts in one circumstance after another. Each stack's cache is its own: a home made for it."""

    def __init__(self, stack: Stack, prompts: Sequence[Sequence[int]]) -> None:
        self.stack = stack
        self.prompts = prompts
        self.filled = False

    async def answers(self, cell: Cell) -> list[Answer]:
        """One answer a prompt, all of them served as the cell says; NotExercised otherwise."""
        match cell.tier:
            case "cold":
                found = await self._ask(cell.load, no_read=True)
                self.filled = True
            case "device":
                await self._fill()
                found = await self._ask(cell.load)
            case "host":
                await self._fill()
                await self._settled()
                await self.stack.stop()
                await self.stack.start()
                found = await self._ask(cell.load)
            case "killed":
                await self._fill()
                self.stack.kill_all()
                await self.stack.start()
                found = await self._ask(cell.load)
            case "disk":
                await self._fill()
                await self._settled()
                await self.stack.stop()
                self.stack.remove_arena()
                await self.stack.start()
                found = await self._ask(cell.load)
            case other:
                raise ValueError(f"no such tier: {other}")
        self._check(cell, found)
        return found

    def _check(self, cell: Cell, found: list[Answer]) -> None:
        """A kill may cost what was still being saved, so there it is enough that something came back."""
        everywhere = cell.tier in ("cold", "killed")
        served = [sum(one.cached.values()) if everywhere else one.cached.get(cell.tier, 0) for one in found]
        proves = {"cold": not any(served), "killed": any(served)}.get(cell.tier, all(served))
        if not proves:
            raise NotExercised(f"{cell}: tokens from the cache by prompt: {[one.cached for one in found]}")

    async def _fill(self) -> None:
        """Every prompt's KV is somewhere in the cache."""
        if not self.filled:
            await self._ask(8)
            self.filled = True

    async def _settled(self) -> None:
        """Everything that was to be saved is saved, on disk too."""
        with trio.fail_after(SETTLED_S):
            while True:
                found = await self.stack.snapshots()
                scheduler, store = found["scheduler"], found["store"]
                if scheduler is not None and store is not None and _rests(scheduler.data, store.data):
                    return
                await trio.sleep(0.1)  # a poll of status

    async def _ask(self, load: int, *, no_read: bool = False) -> list[Answer]:
        """All prompts, at most `load` at a time; the last of them with company, so that there are always `load`."""
        found: list[Answer | None] = [None] * len(self.prompts)
        limit = trio.CapacityLimiter(load)
        async with connected(self.stack.places) as client, trio.open_nursery() as nursery:

            async def one(number: int) -> None:
                async with limit:
                    found[number] = answer_of(await _asked(client, self.prompts[number], no_read=no_read))

            async with trio.open_nursery() as asking:
                company = max(0, load - len(self.prompts))
                for number in range(company):
                    nursery.start_soon(_keep_busy, client, number, self.prompts[0])
                for number in range(len(self.prompts)):
                    asking.start_soon(one, number)
            nursery.cancel_scope.cancel()
        return [answer for answer in found if answer is not None]


def _rests(scheduler: dict[str, Any], store: dict[str, Any]) -> bool:
    requests = scheduler.get("requests", {"waiting": 1})
    busy = any(requests[name] for name in ("waiting", "running", "loading", "leaving", "in_flight", "saving"))
    return not busy and not store["tiers"]["host"]["dirty"]


async def _asked(client: Client, ids: Sequence[int], *, no_read: bool) -> Result:
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
    request = Generate(id=new_id(), ids=pack_u32(list(ids)), sampling=sampling, no_read=no_read)
    async with client.generate(request) as stream:
        return await stream.result()


async def _keep_busy(client: Client, number: int, ids: Sequence[int]) -> None:
    """Short requests of their own, drawn from `ids`, nothing of which is kept, one after the other."""
    rng = random.Random(f"company-{number}")
    while True:
        own = rng.choices(ids, k=rng.randrange(8, 64))
        sampling = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
        request = Generate(id=new_id(), ids=pack_u32(own), sampling=sampling, no_read=True, no_store=True)
        async with client.generate(request) as stream:
            await stream.result()
