"""The one lane in which the disk tier changes: write-behind, eviction, clear, recovery, one after the other.

    dirty blocks ─ batch (pinned) ─► room made ─► bytes, flush, index ─► clean
    clear        ─ waits its turn, so no write is under way ─► catalogue, disk, epoch ─► durable ─► answer
    trouble      ─► the batch is dirty again; the lane rests, tries again, and says so once

All IO is in threads; the catalogue is touched by the event loop alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import trio
import xxhash

from services.store.arena.arena import Arena
from services.store.catalog.behind import WriteOrder
from services.store.catalog.catalog import Catalog
from services.store.catalog.recovery import Recovery, forget_disk
from services.store.disk.block import Block
from services.store.disk.errors import DiskFull, DiskTierError
from services.store.disk.tier import DiskTier

BATCH_BLOCKS = 256
BATCH_BYTES = 8 << 20
REST_S = 1.0
SYNC_S = 1.0
SLACK = 64
"""A full disk makes room for one batch and up to a 64th of itself, so that eviction is not a transaction a block."""


@dataclass
class LaneCounters:
    """Since the start."""

    written: int = 0
    written_bytes: int = 0
    damaged: int = 0
    failures: int = 0
    full: int = 0
    rebuilds: int = 0


class Turn(Enum):
    """How a step ended: there may be more to do; there is nothing to do; there is no use in trying at once."""

    BUSY = 1
    IDLE = 2
    TROUBLED = 3


class DiskLane:
    """Owns the disk tier's changes. `reopen` opens a tier that could not be used before."""

    def __init__(
        self,
        arena: Arena,
        catalog: Catalog,
        recovery: Recovery,
        *,
        reopen: Callable[[], tuple[DiskTier | None, str]],
        attached: Callable[[DiskTier | None], None],
        log: Any,
    ) -> None:
        self._arena = arena
        self._catalog = catalog
        self._recovery = recovery
        self._reopen = reopen
        self._attached = attached
        self._log = log
        self.disk: DiskTier | None = None
        self.wanted = True
        self.state = "off"
        self.reason = ""
        self.counters = LaneCounters()
        self._lock = trio.Lock()
        self._wake = trio.Event()
        self._limiter = trio.CapacityLimiter(1)
        self._to_delete: list[bytes] = []
        self._synced = 0.0
        self._ending = False

    def attach(self, disk: DiskTier | None, reason: str, *, wanted: bool) -> None:
        """What opening brought."""
        self.disk, self.reason, self.wanted = disk, reason, wanted
        self.state = "ready" if disk is not None else ("unusable" if wanted else "off")
        self._attached(disk)

    def wake(self) -> None:
        """There are dirty blocks."""
        self._wake.set()

    async def run(self) -> None:
        """Works until `flush` takes over."""
        while not self._ending:
            async with self._lock:
                outcome = await self._turn()
            if outcome is Turn.TROUBLED:
                await trio.sleep(REST_S)
            elif outcome is Turn.IDLE:
                with trio.move_on_after(REST_S):
                    await self._wake.wait()
                self._wake = trio.Event()

    async def flush(self) -> None:
        """The last writes of this life: returns once nothing that can be written is left, or the caller's time is up.

        A turn can't be cut short, so none is begun that, judged by the longest before it, would end too late.
        """
        self._ending = True
        outcome, longest = Turn.BUSY, 0.0
        while outcome is Turn.BUSY and self.disk is not None and self._catalog.behind.length:
            async with self._lock:
                began = trio.current_time()
                if began + longest > trio.current_effective_deadline():
                    return
                outcome = await self._turn()
                longest = max(longest, trio.current_time() - began)

    async def _turn(self) -> Turn:
        """One step of whatever is due."""
        if self.disk is None:
            return await self._try_open()
        try:
            status = self.disk.statistics().state
            if status == "damaged":
                await self._heal(self.disk)
            if status in ("recovering", "rebuilding", "damaged"):
                return await self._rebuild_step(self.disk)
            return await self._write(self.disk)
        except DiskTierError as error:
            self._trouble(error)
            return Turn.TROUBLED

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await trio.to_thread.run_sync(function, *args, limiter=self._limiter)

    # --- writing ---------------------------------------------------------------------------------------------

    async def _write(self, disk: DiskTier) -> Turn:
        await self._delete(disk, [])
        batch = self._catalog.behind.next_batch(BATCH_BLOCKS, BATCH_BYTES)
        if not batch or trio.current_time() - self._synced > SYNC_S:
            self._synced = trio.current_time()
            try:
                await self._in_thread(disk.sync)
            except DiskTierError:
                self._catalog.behind.put_back(batch)
                raise
        if not batch:
            self._is_well()
            return Turn.IDLE
        try:
            sound, damaged = await self._in_thread(self._verify, batch)
            for order in damaged:
                self.counters.damaged += 1
                self._catalog.behind.damaged(order)
            batch = sound
            if not batch:
                return Turn.BUSY
            await self._make_room(disk, batch)
            saved = await self._in_thread(self._save, disk, batch)
        except DiskTierError:
            self._catalog.behind.put_back(batch)
            raise
        done, rest = batch[:saved], batch[saved:]
        strays = self._catalog.behind.written(done, [True] * saved)
        self._catalog.behind.put_back(rest)
        self.counters.written += saved
        self.counters.written_bytes += sum(order.length for order in done)
        await self._delete(disk, strays)
        if rest:
            raise DiskFull(disk.reason or "no room on disk")
        self._is_well()
        return Turn.BUSY

    async def _delete(self, disk: DiskTier, identities: Sequence[bytes]) -> None:
        """Drops blocks that the catalogue has given up; what fails is dropped before anything else is done."""
        self._to_delete += identities
        if self._to_delete:
            await self._in_thread(disk.delete, self._to_delete)
            self._to_delete = []

    def _verify(self, batch: Sequence[WriteOrder]) -> tuple[list[WriteOrder], list[WriteOrder]]:
        """In a thread: (whole, damaged). Bytes that went bad in memory must not become durable."""
        sound: list[WriteOrder] = []
        damaged: list[WriteOrder] = []
        for order in batch:
            payload = self._arena.payload(order.offset, order.length)[: order.length]
            (sound if xxhash.xxh3_64_intdigest(payload) == order.checksum else damaged).append(order)
        return sound, damaged

    async def _make_room(self, disk: DiskTier, batch: Sequence[WriteOrder]) -> None:
        length = batch[0].length
        room = await self._in_thread(disk.room, length)
        missing = len(batch) - room
        if missing > 0:
            slack = min(BATCH_BLOCKS, disk.statistics().blocks // SLACK)
            newest = max(order.recency for order in batch)
            victims = self._catalog.blocks.evict_disk(missing + slack, older_than=newest)
            await self._delete(disk, victims)

    def _save(self, disk: DiskTier, batch: Sequence[WriteOrder]) -> int:
        blocks = [
            Block(
                identity=order.identity,
                parent=order.parent,
                root=order.root,
                generation=order.generation,
                checksum=order.checksum,
                recency=order.recency,
                length=order.length,
                payload=self._arena.payload(order.offset, order.length),
            )
            for order in batch
        ]
        return len(disk.save(blocks))

    # --- clear -----------------------------------------------------------------------------------------------

    async def clear(self, root: bytes | None) -> tuple[dict[str, int], dict[str, int]]:
        """(blocks, bytes) by tier, durably gone. DiskTierError when the disk could not be cleared: try again."""
        async with self._lock:
            host_blocks, host_bytes = self._catalog.clear(root)
            blocks, nbytes = {"host": host_blocks, "disk": 0}, {"host": host_bytes, "disk": 0}
            if self.disk is not None:
                blocks["disk"], nbytes["disk"] = await self._in_thread(self._clear, self.disk, root)
            return blocks, nbytes

    def _clear(self, disk: DiskTier, root: bytes | None) -> tuple[int, int]:
        disk.put_meta({"epoch": self._catalog.epoch.to_bytes(8, "little")})
        return disk.clear(root)

    # --- recovery and trouble --------------------------------------------------------------------------------

    async def _try_open(self) -> Turn:
        if self.wanted:
            disk, reason = await self._in_thread(self._reopen)
            if disk is not None:
                self._log.info("disk_tier_back", was=self.reason)
                self.attach(disk, "", wanted=True)
                return Turn.BUSY
            self.reason = reason
            return Turn.TROUBLED
        return Turn.IDLE

    async def _heal(self, disk: DiskTier) -> None:
        self._log.warning("disk_index_damaged", reason=disk.reason)
        self.counters.rebuilds += 1
        await self._in_thread(disk.heal)
        forget_disk(self._catalog)

    async def _rebuild_step(self, disk: DiskTier) -> Turn:
        self.state = "rebuilding"
        batch = await self._in_thread(disk.recover_step)
        if batch is not None:
            await self._delete(disk, self._recovery.adopt_disk_live(batch))
            return Turn.BUSY
        self._recovery.finish_live()
        self._log.info("disk_index_rebuilt", blocks=disk.statistics().blocks)
        self._is_well()
        return Turn.BUSY

    def _is_well(self) -> None:
        if self.state != "ready":
            self._log.info("disk_tier_ready", was=self.state, reason=self.reason)
        self.state, self.reason = "ready", ""

    def _trouble(self, error: DiskTierError) -> None:
        """Counted; said once per kind of trouble, not once a second."""
        full = isinstance(error, DiskFull)
        self.counters.full += full
        self.counters.failures += not full
        state = "full" if full else "failing"
        if self.state != state:
            self._log.warning("disk_tier_trouble", state=state, reason=error.reason)
        self.state, self.reason = state, error.reason

    async def close(self) -> None:
        """Syncs and closes the disk tier; no turn is under way any more."""
        async with self._lock:
            disk, self.disk, self.wanted = self.disk, None, False
            self._attached(None)
            if disk is not None:
                await self._in_thread(disk.close)
