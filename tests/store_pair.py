"""A whole store without its sockets: arena, catalogue, disk tier and lane, opened as the service opens them, on seams.

`Life` is one incarnation over a directory; `io` counts and kills it. An engine's part (copying bytes, checksums) is
done here as a worker does it. After a death, `Life.end` is what the kernel does; `boot` names the machine's boot.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import trio
import trio.lowlevel
import xxhash

import services.store.arena.arena
import services.store.disk.index_place
import services.store.opening
from services.store.arena.arena import Arena
from services.store.arena.records import FREE, VALID
from services.store.catalog.catalog import Catalog, Grant
from services.store.catalog.entries import DETACHED, ON_DISK
from services.store.catalog.integrity import check_integrity
from services.store.catalog.order import NONE
from services.store.catalog.slots import CLEAN, DIRTY
from services.store.clearing import begun_clear
from services.store.disk.tier import DiskTier
from services.store.disk_lane import DiskLane
from services.store.opening import open_disk, open_store
from services.store.stager import Stager, _Places
from shared.config import Config, FaultsConfig, StoreConfig
from shared.faults import Faults
from shared.messages.store import COMMIT_DONE, RESERVE_GRANTED, RESERVE_HAVE
from shared.paths import Places
from shared.scope import EVERYTHING, of_root
from tests.durable_io import DurableIO, SteppedHeaders

LENGTH = 4096
OWNER = ("e0", 1)
HOST_BYTES = 256 << 10
DISK_BYTES = 1 << 20
SEGMENT_BYTES = 17 * 4096


class Quiet:
    """A log that nobody reads."""

    def info(self, event: str, **facts: object) -> None: ...

    def warning(self, event: str, **facts: object) -> None: ...


def root_of(label: str) -> bytes:
    return hashlib.sha256(f"root {label}".encode()).digest()


def chain(label: str, count: int, root: bytes) -> list[tuple[bytes, bytes]]:
    """(identity, parent) of a prefix, from its front."""
    names = [root, *(hashlib.sha256(root + f"{label}/{n}".encode()).digest() for n in range(count))]
    return [(names[n + 1], names[n]) for n in range(count)]


def payload_of(identity: bytes) -> bytes:
    """The bytes that a block of this name has, and no other."""
    return hashlib.shake_128(identity).digest(LENGTH)


def _boot(name: str) -> Any:
    """The machine's boot as index and arena see it; plain functions, for mocks are slow."""

    def boot_id() -> str:
        return name

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(services.store.disk.index_place, "boot_id", boot_id))
    stack.enter_context(mock.patch.object(services.store.arena.arena, "boot_id", boot_id))
    stack.enter_context(mock.patch.object(services.store.arena.arena, "is_memory", return_value=False))
    return stack


class Life:
    """One incarnation. `known`: root of each identity that anybody may ask for."""

    def __init__(
        self, home: Path, io: DurableIO, *, max_host: int = 0, max_disk: int = 0, boot: str = "boot", disk: bool = True
    ) -> None:
        self.io = io
        self.boot = boot
        self.max_host, self.max_disk = max_host, max_disk
        self.config = Config(
            store=StoreConfig(
                host_bytes=HOST_BYTES, disk_bytes=DISK_BYTES if disk else 0, disk_floor=0.0, arena_dir=str(home)
            ),
            faults=FaultsConfig(max_host_blocks=max_host, max_disk_blocks=max_disk),
        )
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.places = Places(home)
        self.arena: Arena | None = None
        self.disk: DiskTier | None = None
        tier = functools.partial(self._tier, io=io, segment_bytes=SEGMENT_BYTES, map_bytes=256 << 10)
        with (
            mock.patch.object(services.store.opening, "open_arena", self._arena),
            mock.patch.object(services.store.opening, "DiskTier", tier),
            _boot(boot),
        ):
            faults, log = Faults(self.config.faults), Quiet()
            self.opened = open_store(self.places, self.config, faults, log)
            assert self.opened.arena is not None
            assert self.opened.catalog is not None
            assert self.opened.recovery is not None
            self.catalog: Catalog = self.opened.catalog
            self.stager = Stager(self.opened.arena, self.catalog, lambda run: None)
            self.lane = DiskLane(
                self.opened.arena,
                self.catalog,
                self.opened.recovery,
                reopen=lambda: open_disk(self.places.store, self.config, faults),
                attached=lambda disk: setattr(self.stager, "disk", disk),
                faults=faults,
                log=log,
            )
            self.lane.attach(self.opened.disk, self.opened.disk_reason, wanted=disk)

    def _arena(self, path: Path, wanted: int) -> Arena:
        arena = _open_arena(path, wanted, self.io)
        self.arena = arena
        arena.headers = SteppedHeaders(arena.buffer, arena.geometry, self.io)
        return arena

    def _tier(self, *arguments: Any, **options: Any) -> DiskTier:
        self.disk = DiskTier(*arguments, **options)
        return self.disk

    def run(self, work: Callable[[], Any]) -> None:
        """An async part of the service, to its end; it syncs the index first, whatever the clock says."""
        self.lane._synced = 0.0
        with _boot(self.boot):
            trio.run(work)

    def end(self, *, clean: bool = False) -> None:
        """The process is gone: the kernel closes its files, nothing more is written. `clean`: an orderly stop."""
        self.io.dead = False
        if self.disk is not None:
            with _boot(self.boot):
                self.disk.close(clean=clean)
        if self.arena is not None:
            self.arena.close()

    # --- what an engine does

    def reserve(self, blocks: Sequence[tuple[bytes, bytes]], root: bytes) -> list[Grant]:
        return self.catalog.reserve(OWNER, root=root, epoch=self.catalog.epoch, length=LENGTH, blocks=blocks)

    def copy(self, identity: bytes, grant: Grant) -> int:
        """A worker's save copy; the checksum."""
        assert self.arena is not None
        data = payload_of(identity)
        self.io.mark("copy")
        self.arena.payload(grant.offset, LENGTH)[:] = data
        return int(xxhash.xxh3_64_intdigest(data))

    def save(self, blocks: Sequence[tuple[bytes, bytes]], root: bytes) -> list[bytes]:
        """Into the host tier; the identities that are committed or held now."""
        held = []
        for (identity, _), grant in zip(blocks, self.reserve(blocks, root), strict=True):
            if grant.status == RESERVE_GRANTED:
                checksum = self.copy(identity, grant)
                if self.catalog.commit(OWNER, grant.slot, grant.generation, checksum) != COMMIT_DONE:
                    continue
            elif grant.status != RESERVE_HAVE:
                continue
            held.append(identity)
        return held

    def flush(self) -> None:
        """Everything dirty to disk."""
        self.run(self.lane.flush)
        self.lane._ending = False

    def clear(self, root: bytes | None) -> None:
        self.run(functools.partial(self.lane.clear, EVERYTHING if root is None else of_root(root)))

    def settle(self) -> None:
        """Lets the lane work until a rebuild has ended and nothing is left to write."""

        async def until_ready() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.lane.run)
                with trio.fail_after(30):
                    while not self._is_settled():
                        self.lane.wake()
                        await trio.sleep(0.001)  # a loop that never rests keeps the lane's thread from the interpreter
                nursery.cancel_scope.cancel()

        self.run(until_ready)

    def _is_settled(self) -> bool:
        told = self.disk is None or self.disk.statistics().state == "ready"
        if self.disk is not None and begun_clear(self.disk) is not None:
            return False
        idle = not self.catalog.behind.length or self.lane.state == "full"  # what is older than all on disk stays
        return bool(told and idle and not self.catalog.statistics().pinned and self.lane.state != "rebuilding")

    def load(self, identities: Sequence[bytes]) -> list[bytes]:
        """Looks up a run, stages what is on disk, checks and copies as a worker does; payloads of what arrives."""
        assert self.arena is not None
        found = self.catalog.lookup(OWNER, list(identities))
        if found.lease is None:
            return []
        leases, lease, orders = self.catalog.leases, found.lease, found.orders
        here = {index: place for index, place in enumerate(found.places) if place.staged}
        got: dict[int, bytes] = {}
        bad: list[int] = []
        while here or orders:
            for index, place in here.items():
                data = bytes(self.arena.payload(place.offset, LENGTH))
                if xxhash.xxh3_64_intdigest(data) == place.checksum:
                    got[index] = data
                else:
                    bad.append(index)
            leases.taken(lease.number, OWNER, set(here) - set(bad))
            orders += leases.more()
            if orders:
                assert self.disk is not None
                outcomes = self.stager._read(self.disk, orders, _Places(orders))
                for order, outcome in zip(orders, outcomes, strict=True):
                    leases.staged(
                        order, ok=outcome.ok, checksum=outcome.checksum, parent=outcome.parent, lost=outcome.lost
                    )
            orders = leases.more()
            news = [run for run in leases.take_news() if not run.failed]
            here = {index: place for run in news for index, place in enumerate(run.places, run.first)}
        leases.release(lease.number, OWNER, tuple(bad))
        return [got[index] for index in range(next(i for i in range(len(got) + 1) if i not in got))]

    # --- what must hold

    def visible(self) -> dict[bytes, tuple[bool, bool]]:
        """Blocks that a lookup may find: (on host, on disk)."""
        entries, state = self.catalog.blocks.entries, self.catalog.blocks.slots.state
        seen = {}
        for entry in np.flatnonzero(entries.columns["flags"]).tolist():
            slot, flags = entries.host[entry], entries.flags[entry]
            host = slot != NONE and state[slot] in (DIRTY, CLEAN)
            if not flags & DETACHED and (host or flags & ON_DISK):
                seen[entries.identity(entry)] = (bool(host), bool(flags & ON_DISK))
        return seen

    def check(self, *, exact: bool = True) -> dict[bytes, tuple[bool, bool]]:
        """Nothing dangles, nothing is counted twice, every block there is has its bytes; what is visible.

        `exact` False: a block may prove to be a miss (the device kept its footer and lost its bytes).
        """
        check_integrity(self.catalog)
        seen = self.visible()
        if self.disk is not None:
            self.disk.check_integrity()
            facts = self.disk.statistics()
            assert facts.state in ("ready", "rebuilding"), facts
            if facts.state == "ready":
                assert facts.blocks == sum(on_disk for _, on_disk in seen.values()), "disk slots without a name"
            assert self.disk.taken_bytes() <= DISK_BYTES
        headers = self.catalog.blocks.headers.recover()
        assert {int(state) for state in headers["state"]} <= {FREE, VALID, 1}
        used = self.catalog.statistics().host_used
        assert used <= (self.max_host or used)
        may_miss = not exact or bool(self.max_host)  # reading one from disk may evict another, a counted loss
        for identity in seen:
            got = self.load([identity])
            assert got == [payload_of(identity)] or (got == [] and may_miss), f"{identity.hex()[:8]} holds other bytes"
        check_integrity(self.catalog)
        return seen


_open_arena = services.store.opening.open_arena


def identities(blocks: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    return [identity for identity, _ in blocks]
