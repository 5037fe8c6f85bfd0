"""The one lane in which the disk tier changes: write-behind, eviction, clear, recovery, one after the other.

    dirty blocks ─ batch (pinned) ─► room made ─► bytes, flush, index ─► clean
    clear        ─ waits its turn, so no write is under way ─► catalogue, disk, epoch ─► durable ─► answer
    trouble      ─► the batch is dirty again; the lane rests, tries again, and says so once
    gone         ─► the directory was removed or replaced under us: closed, and opened anew when it can be

All IO is in a thread of its own; the catalogue is touched by the event loop alone.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import trio
import xxhash

from services.store.arena.arena import Arena
from services.store.catalog.behind import WriteOrder
from services.store.catalog.catalog import Catalog
from services.store.catalog.recovery import Recovery, forget_disk, forget_on_disk
from services.store.clearing import begun_clear, clear_tiers
from services.store.disk.block import Block
from services.store.disk.errors import DiskFault, DiskFull, DiskGone, DiskTierError
from services.store.disk.tier import DiskTier
from services.store.disk.troubles import Trouble, kind_of
from services.store.say_once import SayOnce
from shared.faults import Faults
from shared.scope import Scope
from shared.threads import Threads

BATCH_BLOCKS = 256
BATCH_BYTES = 8 << 20
REST_S = 1.0
SYNC_S = 1.0
SLACK = 64
"""A full disk makes room for one batch and up to a 64th of itself, so that eviction is not a transaction a block."""

REBUILD_BLOCKS = 512
"""Blocks that a rebuild tells the catalogue at a time; more would keep the event loop from answering."""

EVICTED_AT_ONCE = 4096

FORGOTTEN_AT_ONCE = 4096
"""Blocks; between them the event loop answers."""


@dataclass
class LaneCounters:
    """Since the start."""

    written: int = 0
    written_bytes: int = 0
    damaged: int = 0
    cleared: int = 0
    failures: int = 0
    full: int = 0
    rebuilds: int = 0


class Turn(Enum):
    """How a step ended: there may be more to do; there is nothing to do; there is no use in trying at once."""

    BUSY = 1
    IDLE = 2
    TROUBLED = 3


class DiskLane:
    """Owns the disk tier's changes. `reopen` opens a tier that could not be used before; `freed` is called when host
    slots that it held may be evicted again; `nice`: of its thread.
    """

    def __init__(
        self,
        arena: Arena,
        catalog: Catalog,
        recovery: Recovery,
        *,
        reopen: Callable[[], tuple[DiskTier | None, str]],
        attached: Callable[[DiskTier | None], None],
        faults: Faults,
        log: Any,
        nice: int = 0,
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        self._arena = arena
        self._freed = freed
        self._catalog = catalog
        self._recovery = recovery
        self._reopen = reopen
        self._attached = attached
        self._faults = faults
        self._log = log
        self._once = SayOnce(log, trio.current_time)
        self._known_troubles: dict[str, Trouble] = {}
        self.disk: DiskTier | None = None
        self.wanted = True
        self.state = "off"
        self.reason = ""
        self.counters = LaneCounters()
        self._lock = trio.Lock()
        self._wake = trio.Event()
        self._thread = Threads("disk-lane", 1, nice)
        self._to_delete: list[bytes] = []
        self._synced = 0.0
        self._ending = False

    def attach(self, disk: DiskTier | None, reason: str, *, wanted: bool) -> None:
        """What opening brought."""
        self.disk, self.reason, self.wanted = disk, reason, wanted
        self._known_troubles = {}
        self.state = "ready" if disk is not None else ("unusable" if wanted else "off")
        if disk is None and wanted:
            self._once.warn(f"unusable: {reason}", "disk_tier_trouble", state=self.state, reason=reason)
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

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """Inside, no write, eviction or clear is under way."""
        async with self._lock:
            yield

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
        disk = self.disk
        try:
            status = disk.statistics().state
            if status == "damaged":
                await self._heal(disk)
            if status in ("recovering", "rebuilding", "damaged"):
                return await self._rebuild_step(disk)
            if await self._finish_clear(disk):
                return Turn.BUSY
            return await self._write(disk)
        except DiskTierError as error:
            gone = await self._in_thread(disk.place.gone)
            if gone is not None:
                await self._let_go(disk, gone)
            else:
                self._trouble(error)
            return Turn.TROUBLED
        finally:
            if self.disk is disk:
                self._tell_troubles(disk)

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._thread.run(function, *args)

    # --- writing ---------------------------------------------------------------------------------------------

    async def _write(self, disk: DiskTier) -> Turn:
        if not self._catalog.behind.length or trio.current_time() - self._synced > SYNC_S:
            self._synced = trio.current_time()
            lost = await self._in_thread(disk.sync)
            for start in range(0, len(lost), FORGOTTEN_AT_ONCE):
                forget_on_disk(self._catalog, lost[start : start + FORGOTTEN_AT_ONCE])
                await trio.lowlevel.checkpoint()
            await self._shrink(disk)
        await self._delete(disk, [])
        batch = self._catalog.behind.next_batch(BATCH_BLOCKS, BATCH_BYTES)
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
        done = [order for order in batch if order.identity in saved]
        rest = [order for order in batch if order.identity not in saved]
        strays = self._catalog.behind.written(done, [True] * len(done))
        self._catalog.behind.put_back(rest)
        self.counters.written += len(done)
        self.counters.written_bytes += sum(order.length for order in done)
        self._freed()
        await self._delete(disk, strays)
        if rest:
            raise DiskFull(disk.reason or "no room on disk")
        self._is_well()
        return Turn.BUSY

    async def _shrink(self, disk: DiskTier) -> None:
        """Back below the capacity, when that was lowered."""
        facts = disk.statistics()
        excess = await self._in_thread(disk.excess)
        if excess and facts.blocks:
            victims = min(EVICTED_AT_ONCE, -(-excess * facts.blocks // facts.bytes))
            await self._delete(disk, self._catalog.blocks.evict_disk(victims, older_than=self._catalog.blocks.tick + 1))

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
        missing = await self._in_thread(disk.shortage, batch[0].length, len(batch))
        if missing is None:
            raise DiskFull("no room on disk: the free-space floor would not be kept were all of the cache given up")
        if missing > 0:
            slack = min(BATCH_BLOCKS, disk.statistics().blocks // SLACK)
            newest = max(order.recency for order in batch)
            victims = self._catalog.blocks.evict_disk(min(missing + slack, EVICTED_AT_ONCE), older_than=newest)
            await self._delete(disk, victims)

    def _save(self, disk: DiskTier, batch: Sequence[WriteOrder]) -> set[bytes]:
        """In a thread: identities of what is on disk now."""
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
        return {entry.identity for entry in disk.save(blocks)}

    # --- clear -----------------------------------------------------------------------------------------------

    async def clear(self, scope: Scope) -> tuple[dict[str, int], dict[str, int]]:
        """(blocks, bytes) by tier, durably gone. DiskTierError when the disk could not be cleared: try again."""
        async with self._lock:
            if self.disk is None and self.wanted:  # what lies there would be served again once it can be opened
                raise DiskFault(f"it is {self.state} and may hold such blocks: {self.reason}")
            return await self._clear(self.disk, scope)

    async def _clear(self, disk: DiskTier | None, scope: Scope) -> tuple[dict[str, int], dict[str, int]]:
        done = await clear_tiers(self._catalog, disk, scope, self._in_thread, self._faults)
        self.counters.cleared += done.disk_blocks
        blocks = {"host": done.host_blocks, "disk": done.disk_blocks}
        return blocks, {"host": done.host_bytes, "disk": done.disk_bytes}

    async def _finish_clear(self, disk: DiskTier) -> bool:
        """A clear that an earlier life began; False when there is none."""
        scope = begun_clear(disk)
        if scope is None:
            return False
        blocks, _ = await self._clear(disk, scope)
        self._log.warning("clear_finished", note="the store had died in it", blocks=blocks)
        return True

    # --- recovery and trouble --------------------------------------------------------------------------------

    async def _try_open(self) -> Turn:
        if not self.wanted:
            return Turn.IDLE
        disk, reason = await self._in_thread(self._reopen)
        if disk is None:
            self.attach(None, reason, wanted=True)
            return Turn.TROUBLED
        self._log.info("disk_tier_back", was=self.reason)
        headers = self._catalog.blocks.headers
        starts = max(headers.starts, disk.get_number("starts") + 1)
        self._catalog.catch_up(starts, disk.get_number("epoch"))
        with suppress(DiskTierError):  # told with the other troubles
            await self._in_thread(disk.put_meta, {"starts": starts.to_bytes(8, "little")})
        self.attach(disk, "", wanted=True)
        return Turn.BUSY

    async def _let_go(self, disk: DiskTier, error: DiskGone) -> None:
        """What the disk tier holds can't be reached under its name any more: it is closed, and opened anew."""
        self.attach(None, error.reason, wanted=True)
        self._to_delete = []
        await self._in_thread(partial(disk.close, clean=False))
        await self._forget_all()

    async def _heal(self, disk: DiskTier) -> None:
        self.state, self.reason = "rebuilding", disk.reason
        self.counters.rebuilds += 1
        await self._in_thread(disk.heal)
        await self._forget_all()

    async def _forget_all(self) -> None:
        while forget_disk(self._catalog, FORGOTTEN_AT_ONCE):
            await trio.lowlevel.checkpoint()

    async def _rebuild_step(self, disk: DiskTier) -> Turn:
        if self.state != "rebuilding":
            self.state, self.reason = "rebuilding", disk.reason
        batch = await self._in_thread(disk.recover_step, REBUILD_BLOCKS)
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
        full = isinstance(error, DiskFull)
        self.counters.full += full
        self.counters.failures += not full
        self.state, self.reason = "full" if full else "failing", error.reason
        kind = kind_of(type(error).__name__, error.reason)
        self._once.warn(kind, "disk_tier_trouble", state=self.state, reason=error.reason)

    def _tell_troubles(self, disk: DiskTier) -> None:
        """Whatever went wrong since the last turn, in this lane or in a load: said once, not once a second."""
        for kind, trouble in disk.statistics().troubles.items():
            if trouble != self._known_troubles.get(kind):
                self._known_troubles[kind] = trouble
                self._once.warn(kind, "disk_tier_trouble", state=self.state, reason=trouble.reason)

    async def close(self) -> None:
        """Syncs and closes the disk tier; no turn is under way any more."""
        async with self._lock:
            disk, self.disk, self.wanted = self.disk, None, False
            self._attached(None)
            if disk is not None:
                await self._in_thread(disk.close)
