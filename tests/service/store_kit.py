"""An engine as the store sees it: reserves, writes into the arena, commits, looks up, reads, releases."""

import mmap
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio
import xxhash

from services.store.actor import Store
from shared.config import Config, FaultsConfig, StoreConfig
from shared.identity import chain, root
from shared.messages.base import pack_u32, pack_u64, unpack_u32, unpack_u64
from shared.messages.hello import Snapshot, Status
from shared.messages.store import (
    COMMIT_DONE,
    RESERVE_GRANTED,
    TIER_DISK,
    TIER_HOST,
    Clear,
    Cleared,
    Commit,
    Committed,
    EngineOpened,
    Found,
    Lookup,
    OpenEngine,
    Release,
    Reserve,
    Reserved,
    Staged,
    Taken,
)
from shared.paths import Places
from shared.peers import Peer
from shared.scope import EVERYTHING, Scope, of_root
from shared.testing import TestPeer, dialled, running

KEY = b"k" * 32
SLOT = 6000
"""Payload bytes of a block: two pages of arena."""

MIB = 1 << 20
REPOSITORY = Path(__file__).parents[2]


def root_of(name: str, salt: bytes = b"") -> bytes:
    return root(KEY, name.encode().ljust(32, b"\0"), salt=salt)


def names(of: bytes, blocks: int, prompt: int = 0) -> list[bytes]:
    """Identities of a prompt of so many blocks of 16 tokens."""
    tokens = b"".join((prompt * 1000 + i).to_bytes(4, "little") for i in range(16 * blocks))
    return list(chain(KEY, of, tokens, 16))


def payload(identity: bytes, size: int = SLOT) -> bytes:
    """The bytes of a block: nothing else has them."""
    return (identity * (size // 32 + 1))[:size]


def config(**store: Any) -> Config:
    faults = store.pop("faults", FaultsConfig())
    return Config(store=StoreConfig(**({"host_bytes": MIB, "disk_bytes": 64 * MIB} | store)), faults=faults)


class Engine:
    """One scheduler's conversation with the store, and its worker's hands in the arena."""

    def __init__(self, node: TestPeer, peer: Peer, size: int = SLOT) -> None:
        self.node = node
        self.peer = peer
        self.size = size
        self.ask_s = 20.0
        self.opened: EngineOpened
        self.memory: mmap.mmap
        self.early: list[Staged] = []

    async def open(self, held: list[tuple[int, int]] = []) -> EngineOpened:  # noqa: B006
        message = OpenEngine(
            slot_bytes=self.size,
            held_slots=pack_u32(slot for slot, _ in held),
            held_generations=pack_u64(generation for _, generation in held),
        )
        self.opened = await self.ask(message, EngineOpened)
        if self.opened.arena:
            fd = os.open(self.opened.arena, os.O_RDWR)
            self.memory = mmap.mmap(fd, 0)
            os.close(fd)
        return self.opened

    async def ask(self, message: Any, kind: Any) -> Any:
        return await self.peer.ask(message, kind, deadline_s=self.ask_s)

    async def reserve(self, of: bytes, identities: list[bytes], first: int = 0) -> Reserved:
        parents = [of, *identities[:-1]]
        message = Reserve(
            identities=b"".join(identities[first:]),
            parents=b"".join(parents[first:]),
            root=of,
            epoch=self.opened.epoch,
        )
        reserved: Reserved = await self.ask(message, Reserved)
        return reserved

    def write(self, offset: int, identity: bytes) -> int:
        """What a worker's save copy does; the checksum."""
        data = payload(identity, self.size)
        self.memory[offset : offset + self.size] = data
        return int(xxhash.xxh3_64_intdigest(data))

    async def commit(self, reserved: Reserved, sums: list[int], epoch: int | None = None) -> Committed:
        granted = [i for i, status in enumerate(reserved.status) if status == RESERVE_GRANTED]
        slots, generations = unpack_u32(reserved.slots), unpack_u64(reserved.generations)
        message = Commit(
            incarnation=reserved.incarnation,
            epoch=self.opened.epoch if epoch is None else epoch,
            slots=pack_u32(slots[i] for i in granted),
            generations=pack_u64(generations[i] for i in granted),
            checksums=pack_u64(sums),
        )
        committed: Committed = await self.ask(message, Committed)
        return committed

    async def save(self, of: bytes, identities: list[bytes]) -> Reserved:
        """Saves what is granted of a chain; the answers to its Reserve."""
        reserved = await self.reserve(of, identities)
        offsets = unpack_u64(reserved.offsets)
        sums = [
            self.write(offsets[i], identity)
            for i, identity in enumerate(identities)
            if reserved.status[i] == RESERVE_GRANTED
        ]
        committed = await self.commit(reserved, sums)
        assert set(committed.status) <= {COMMIT_DONE}
        return reserved

    async def look_up(self, identities: list[bytes]) -> Found:
        found: Found = await self.ask(Lookup(identities=b"".join(identities)), Found)
        return found

    async def load(self, identities: list[bytes], bad: tuple[int, ...] = (), *, bent: bool = False) -> tuple[int, int]:
        """Loads what is held of a run and checks every byte: (blocks that were on host, that came from disk).

        What has been checked is given back while more is to come, but for `bad` ones. Those it calls bad afterwards;
        `bent`: with reason.
        """
        found = await self.look_up(identities)
        assert all(tier in (TIER_HOST, TIER_DISK) for tier in found.tiers)
        waiting = {i for i, tier in enumerate(found.tiers) if tier == TIER_DISK}
        places = dict(enumerate(zip(unpack_u64(found.offsets), unpack_u64(found.checksums), strict=True)))
        here = {i: place for i, place in places.items() if i not in waiting}
        on_host, from_disk = len(here), 0
        while True:
            for i, (offset, checksum) in here.items():
                data = self.memory[offset : offset + self.size]
                assert data == payload(identities[i], self.size), f"block {i} holds other bytes"
                assert xxhash.xxh3_64_intdigest(data) == checksum
            if not waiting:
                break
            self.peer.send(Taken(lease=found.lease, blocks=pack_u32(i for i in here if i not in bad)))
            staged = await self.staged(found.lease)
            news = zip(unpack_u64(staged.offsets), unpack_u64(staged.checksums), strict=True)
            told = dict(enumerate(news, staged.first))
            places |= told
            assert waiting.issuperset(told), "told twice"
            waiting -= set(told)
            here = {} if staged.failed else told
            from_disk += len(here)
        for i in bad if bent else ():
            self.memory[places[i][0]] ^= 1
        if found.lease:
            self.peer.send(Release(lease=found.lease, bad=pack_u32(bad)))
        if bad:
            await self.until(lambda facts: facts["leases"] == 0)  # it looks for itself first
        return on_host, from_disk

    async def staged(self, lease: int) -> Staged:
        for i, early in enumerate(self.early):
            if early.lease == lease:
                return self.early.pop(i)
        while True:
            staged: Staged = await self.node.receive(Staged)
            if staged.lease == lease:
                return staged
            self.early.append(staged)

    async def clear(self, of: bytes | Scope = EVERYTHING) -> Cleared:
        scope = of if isinstance(of, Scope) else of_root(of)
        cleared: Cleared = await self.ask(Clear(scope=scope), Cleared)
        return cleared

    async def facts(self) -> dict[str, Any]:
        snapshot: Snapshot = await self.ask(Status(), Snapshot)
        return snapshot.data

    async def until(self, holds: Any) -> dict[str, Any]:
        """Asks for the snapshot until `holds(it)`: the store is at work meanwhile."""
        with trio.fail_after(20):
            while not holds(facts := await self.facts()):
                await trio.lowlevel.checkpoint()
        return facts

    async def all_on_disk(self) -> dict[str, Any]:
        return await self.until(lambda facts: facts["tiers"]["host"]["dirty"] == 0)


@asynccontextmanager
async def engine(
    places: Places,
    name: str = "e0",
    *,
    incarnation: int = 1,
    size: int = SLOT,
    held: list[tuple[int, int]] = [],  # noqa: B006
) -> AsyncIterator[Engine]:
    async with dialled("scheduler", "store", places, engine=name, incarnation=incarnation) as (node, peer):
        one = Engine(node, peer, size)
        await one.open(held)
        yield one


@asynccontextmanager
async def store(places: Places, settings: Config | None = None, *, incarnation: int = 1) -> AsyncIterator[Engine]:
    """A running store and an engine that is opened there."""
    async with running(Store, places, settings or config(), incarnation=incarnation), engine(places) as one:
        yield one


@contextmanager
def store_process(
    places: Places, incarnation: int, environ: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A real `python -m services.store`; killed at the end if it still runs."""
    settings = {
        "PERDURE_HOME": str(places.home),
        "PERDURE_INCARNATION": str(incarnation),
        "PERDURE_STORE__HOST_BYTES": "1 MiB",
        "PERDURE_STORE__DISK_BYTES": "64 MiB",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "services.store"],
        cwd=REPOSITORY,
        env={**os.environ, **settings, **(environ or {})},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
