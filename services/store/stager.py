"""Disk -> arena: reader threads bring leased blocks into slots of ours; owners are told in order.

    Lookup ─ orders ─► queue ─► READERS tasks, each: one thread call for as many as one read of the disk may take
                                  └─► catalogue ─ Staged ─► the lease's owner

The event loop never reads a disk. A read that nobody waits for any more is not begun.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import trio

from services.store.arena.arena import Arena
from services.store.catalog.catalog import Catalog
from services.store.catalog.leases import StagedRun, StageOrder
from services.store.disk.errors import DiskTierError
from services.store.disk.footer import slot_bytes
from services.store.disk.slot_io import RUN_BYTES
from services.store.disk.tier import DiskTier, Entry

READERS = 8
"""Threads that read: while one verifies what it has read, the disk works for the others."""


class _Outcome(NamedTuple):
    ok: bool
    checksum: int = 0
    parent: bytes = bytes(32)
    lost: bool = True


class Stager:
    """Owns the reads under way. `tell` hands a lease's news to its owner."""

    def __init__(self, arena: Arena, catalog: Catalog, tell: Callable[[StagedRun], None]) -> None:
        self._arena = arena
        self._catalog = catalog
        self._tell = tell
        self.disk: DiskTier | None = None
        self._send, self._receive = trio.open_memory_channel[list[StageOrder]](math.inf)
        self._limiter = trio.CapacityLimiter(READERS)
        self.pending = 0

    def begin(self, orders: list[StageOrder]) -> None:
        """Queues reads, in the order in which they are needed."""
        batch: list[StageOrder] = []
        nbytes = 0
        for order in orders:
            if batch and nbytes + slot_bytes(order.length) > RUN_BYTES:
                self._send.send_nowait(batch)
                batch, nbytes = [], 0
            batch.append(order)
            nbytes += slot_bytes(order.length)
        if batch:
            self._send.send_nowait(batch)
        self.pending += len(orders)

    async def stop(self) -> None:
        """Begins no more reads, and returns once none is under way: the disk tier may be closed."""
        self.disk = None
        for _ in range(READERS):
            await self._limiter.acquire_on_behalf_of(object())

    async def run(self) -> None:
        """Reads for ever."""
        async with trio.open_nursery() as nursery:
            for _ in range(READERS):
                nursery.start_soon(self._read_on)

    async def _read_on(self) -> None:
        async for batch in self._receive:
            wanted = [order for order in batch if self._catalog.leases.is_wanted(order)]
            outcomes = dict.fromkeys(batch, _Outcome(False, lost=False))
            disk = self.disk
            if wanted and disk is not None:
                async with self._limiter:
                    read = await trio.to_thread.run_sync(self._read, disk, wanted)
                outcomes.update(zip(wanted, read, strict=True))
            self.pending -= len(batch)
            for order, outcome in outcomes.items():
                news = self._catalog.staged(
                    order, ok=outcome.ok, checksum=outcome.checksum, parent=outcome.parent, lost=outcome.lost
                )
                for run in news:
                    self._tell(run)

    def _read(self, disk: DiskTier, orders: list[StageOrder]) -> list[_Outcome]:
        """In a thread: bytes of many blocks into the arena, verified by the disk tier."""
        entries = [disk.lookup(order.identity) for order in orders]
        found: list[tuple[StageOrder, Entry]] = [
            (order, entry)
            for order, entry in zip(orders, entries, strict=True)
            if entry is not None and entry.length == order.length
        ]
        try:
            held = disk.load(
                [entry for _, entry in found], [self._arena.payload(order.offset, order.length) for order, _ in found]
            )
        except (OSError, DiskTierError):
            return [_Outcome(False, lost=False)] * len(orders)
        good = {
            order: _Outcome(ok, entry.checksum, entry.parent) for (order, entry), ok in zip(found, held, strict=True)
        }
        missing = _Outcome(False, lost=disk.can_tell)
        return [good.get(order, missing) for order in orders]
