"""Disk -> arena: reader threads bring leased blocks into slots of ours; owners are told as they arrive.

    Lookup, room ─ orders ─► queue ─► READERS tasks, each: one thread call for as many as one read of the disk may take
                                        └─► catalogue ─ Staged ─► the lease's owner

The event loop never reads a disk. A read that nobody waits for any more is not begun.
"""

import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import trio

from services.store.arena.arena import Arena
from services.store.catalog.catalog import Catalog
from services.store.catalog.leases import StagedRun
from services.store.catalog.staging import StageOrder
from services.store.disk.errors import DiskTierError
from services.store.disk.footer import slot_bytes
from services.store.disk.slot_io import RUN_BYTES
from services.store.disk.tier import DiskTier, Entry
from shared.threads import Threads

READERS = 8
"""Threads that read: while one verifies what it has read, the disk works for the others."""


class _Outcome(NamedTuple):
    ok: bool
    checksum: int = 0
    parent: bytes = bytes(32)
    lost: bool = True


class _Places:
    """Where the blocks of one lookup lie, asked of the index all at once by the first reader that comes.

    A page of the index that is not in memory is read in no time while the disk is idle, and behind some tens of MB
    once the others have begun. What is being staged is pinned, so its place stands until it is read.
    """

    def __init__(self, orders: list[StageOrder]) -> None:
        self._orders = orders
        self._asked: DiskTier | None = None
        self._known: dict[StageOrder, Entry] = {}
        self._lock = threading.Lock()

    def of(self, disk: DiskTier) -> dict[StageOrder, Entry]:
        """In a thread: entries of those that are there, with the length that is expected."""
        with self._lock:
            if self._asked is not disk:  # it may have been closed and opened anew since
                self._asked = disk
                found = ((order, disk.lookup(order.identity)) for order in self._orders)
                self._known = {o: entry for o, entry in found if entry is not None and entry.length == o.length}
            return self._known


class Stager:
    """Owns the reads under way. `tell` hands a lease's news to its owner; `nice`: of the threads that read."""

    def __init__(self, arena: Arena, catalog: Catalog, tell: Callable[[StagedRun], None], *, nice: int = 0) -> None:
        self._arena = arena
        self._catalog = catalog
        self._tell = tell
        self.disk: DiskTier | None = None
        self._send, self._receive = trio.open_memory_channel[tuple[list[StageOrder], _Places]](math.inf)
        self._limiter = trio.CapacityLimiter(READERS)
        self._threads = Threads("stager", READERS, nice)
        self.pending = 0

    def begin(self, orders: list[StageOrder]) -> None:
        """Queues reads, in the order in which they are needed."""
        places = _Places(orders)
        batch: list[StageOrder] = []
        nbytes = 0
        for order in orders:
            if batch and nbytes + slot_bytes(order.length) > RUN_BYTES:
                self._send.send_nowait((batch, places))
                batch, nbytes = [], 0
            batch.append(order)
            nbytes += slot_bytes(order.length)
        if batch:
            self._send.send_nowait((batch, places))
        self.pending += len(orders)

    def go_on(self) -> None:
        """Something was given back, or has arrived: begins the reads that there is room for now, and tells the news."""
        self.begin(self._catalog.leases.more())
        for run in self._catalog.leases.take_news():
            self._tell(run)

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
        async for batch, places in self._receive:
            wanted = [order for order in batch if self._catalog.leases.is_wanted(order)]
            outcomes = dict.fromkeys(batch, _Outcome(False, lost=False))
            disk = self.disk
            if wanted and disk is not None:
                async with self._limiter:
                    read = await self._threads.run(self._read, disk, wanted, places)
                outcomes.update(zip(wanted, read, strict=True))
            self.pending -= len(batch)
            for order, outcome in outcomes.items():
                self._catalog.staged(
                    order, ok=outcome.ok, checksum=outcome.checksum, parent=outcome.parent, lost=outcome.lost
                )
            self.go_on()

    def _read(self, disk: DiskTier, orders: list[StageOrder], places: _Places) -> list[_Outcome]:
        """In a thread: bytes of many blocks into the arena, verified by the disk tier."""
        known = places.of(disk)
        found = [(order, known[order]) for order in orders if order in known]
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
