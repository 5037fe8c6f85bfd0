"""Copies between pool and arena: one thread executes them in order, beside the steps.

    save  block locked by the scheduler, slot GRANTED   pool ─copy─► arena ─XXH3 of the arena's bytes─► Transferred
    load  slot leased, block allocated, not attached    arena ─copy─► pool ─XXH3 of the pool's bytes─► Transferred

The checksum is taken where the bytes arrive, so it covers the copy itself. A copy that fails is one `ok` = 0: the
scheduler abandons that slot, or counts a miss. If we die in the middle, a slot stays GRANTED, a pool is gone; nothing
was published.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import xxhash

from services.worker.arena_map import ArenaMap, Arenas, ArenaUnusable
from services.worker.page_store import BlockOutOfRange, PageStore
from shared.faults import Faults
from shared.messages.base import pack_u64
from shared.messages.engine import Copy, Transfer, Transferred


@dataclass(frozen=True)
class TransferStatistics:
    """Totals since start: copies that held, bytes they moved, copies that failed, seconds in batches."""

    saved: int
    loaded: int
    bytes_saved: int
    bytes_loaded: int
    failed: int
    mismatched: int
    seconds: float


class Transfers:
    """Executes batches. `execute` belongs to the copy thread; the counters may be read from any."""

    def __init__(self, pool: PageStore, faults: Faults) -> None:
        self._pool = pool
        self._faults = faults
        self._arenas = Arenas()
        self._log = structlog.get_logger(part="transfer")
        self._saved = self._loaded = self._failed = self._mismatched = 0
        self._seconds = 0.0

    def execute(self, batch: Transfer, wanted: Callable[[], bool]) -> Transferred | None:
        """All copies of `batch`, or None when it was no longer `wanted()`, which is asked before each copy."""
        started = time.perf_counter()
        try:
            arena = self._arenas.open(batch.arena, batch.arena_key)
        except ArenaUnusable as error:
            self._log.warning("arena_unusable", reason=str(error), copies=len(batch.copies))
            arena = None
        checksums: list[int] = []
        ok = bytearray()
        for copy in batch.copies:
            if not wanted():
                return None
            checksum = None if arena is None else self._attempt(arena, copy, batch.save)
            checksums.append(checksum or 0)
            ok.append(checksum is not None)
        self._failed += ok.count(0)
        seconds = time.perf_counter() - started
        self._seconds += seconds
        return Transferred(
            epoch=batch.epoch, seq=batch.seq, checksums=pack_u64(checksums), ok=bytes(ok), seconds=seconds
        )

    def _attempt(self, arena: ArenaMap, copy: Copy, save: bool) -> int | None:
        """One copy; its checksum, or None when it did not hold."""
        facts = {"save": save, "block": copy.block, "offset": copy.offset}
        try:
            return self._save(arena, copy) if save else self._load(arena, copy)
        except (OSError, BlockOutOfRange) as error:  # ArenaUnusable and injected faults are OSErrors
            self._log.warning("copy_failed", **facts, reason=str(error))
        except Exception as error:  # unforeseen: still one copy, never the answer to the whole batch
            self._log.error("copy_failed", **facts, exc_info=error)
        return None

    def _save(self, arena: ArenaMap, copy: Copy) -> int:
        payload = arena.payload(copy.offset, self._pool.block_bytes)
        self._pool.copy_out(copy.block, payload)
        self._faults.at("worker_in_save")
        self._saved += 1
        return int(xxhash.xxh3_64_intdigest(payload.data))

    def _load(self, arena: ArenaMap, copy: Copy) -> int | None:
        self._pool.copy_in(copy.block, arena.payload(copy.offset, self._pool.block_bytes))
        self._faults.at("worker_in_load")
        checksum = int(xxhash.xxh3_64_intdigest(self._pool.block(copy.block).data))
        if checksum != copy.checksum:
            self._mismatched += 1
            self._log.warning("checksum_mismatch", block=copy.block, offset=copy.offset, found=f"{checksum:016x}")
            return None
        self._loaded += 1
        return checksum

    def statistics(self) -> TransferStatistics:
        """Totals, for status."""
        return TransferStatistics(
            saved=self._saved,
            loaded=self._loaded,
            bytes_saved=self._saved * self._pool.block_bytes,
            bytes_loaded=self._loaded * self._pool.block_bytes,
            failed=self._failed,
            mismatched=self._mismatched,
            seconds=self._seconds,
        )
