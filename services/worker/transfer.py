"""Copies between pool and arena: two threads execute them beside the steps, loads before saves.

    save  block locked by the scheduler, slot GRANTED   pool ─copy─► arena ─XXH3 of the arena's bytes─► Transferred
    load  slot leased, block allocated, not attached    arena ─copy─► pool ─XXH3 of the pool's bytes─► Transferred

The checksum is taken where the bytes arrive, so it covers the copy itself, and piece by piece, while a piece still
lies in the core's cache. Saves let loads go first between two blocks. A copy that fails is one `ok` = 0: the
scheduler abandons that slot, or counts a miss. If we die in the middle, a slot stays GRANTED, a pool is gone; nothing
was published.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog
import xxhash
from numpy.typing import NDArray

from services.worker.arena_map import ArenaMap, Arenas, ArenaUnusable
from services.worker.page_store import BlockOutOfRange, PageStore
from shared.faults import Faults
from shared.messages.base import pack_u64
from shared.messages.engine import Copy, Transfer, Transferred

PIECE = 256 << 10
"""Bytes copied, then checksummed, at a time; both without the GIL."""


def copy_checked(into: NDArray[np.uint8], source: NDArray[np.uint8]) -> int:
    """Copies uint8 [n] to uint8 [n]; XXH3-64 of what has arrived."""
    checksum = xxhash.xxh3_64()
    for start in range(0, len(into), PIECE):
        piece = into[start : start + PIECE]
        np.copyto(piece, source[start : start + PIECE])
        checksum.update(piece.data)
    return int(checksum.intdigest())


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
    """Executes batches, one of loads and one of saves at a time; the counters may be read from any thread."""

    def __init__(self, pool: PageStore, faults: Faults) -> None:
        self._pool = pool
        self._faults = faults
        self._arenas = Arenas()
        self._log = structlog.get_logger(part="transfer")
        self._saved = self._loaded = self._failed = self._mismatched = 0
        self._seconds = 0.0
        self._totals = threading.Lock()

    def execute(
        self, batch: Transfer, wanted: Callable[[], bool], give_way: Callable[[], None] | None = None
    ) -> Transferred | None:
        """All copies of `batch`, or None when it was no longer `wanted()`, which is asked before each copy.

        `give_way`: called before each copy of a save; what it does is not this batch's time.
        """
        started = time.perf_counter()
        try:
            arena = self._arenas.open(batch.arena, batch.arena_key)
        except ArenaUnusable as error:
            self._log.warning("arena_unusable", reason=str(error), copies=len(batch.copies))
            arena = None
        checksums: list[int] = []
        ok = bytearray()
        for copy in batch.copies:
            if batch.save and give_way is not None:
                paused = time.perf_counter()
                give_way()
                started += time.perf_counter() - paused
            if not wanted():
                return None
            checksum = None if arena is None else self._attempt(arena, copy, batch.save)
            checksums.append(checksum or 0)
            ok.append(checksum is not None)
        seconds = time.perf_counter() - started
        with self._totals:
            self._failed += ok.count(0)
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
        checksum = copy_checked(arena.payload(copy.offset, self._pool.block_bytes), self._pool.block(copy.block))
        self._faults.at("worker_in_save")
        self._saved += 1
        return checksum

    def _load(self, arena: ArenaMap, copy: Copy) -> int | None:
        checksum = copy_checked(self._pool.block(copy.block), arena.payload(copy.offset, self._pool.block_bytes))
        self._faults.at("worker_in_load")
        if checksum != copy.checksum:
            self._mismatched += 1
            self._log.warning("checksum_mismatch", block=copy.block, offset=copy.offset, found=f"{checksum:016x}")
            return None
        self._loaded += 1
        return checksum

    def populate(self, nbytes: int) -> bool:
        """Fills page tables of the arena in use; True when all are filled."""
        return self._arenas.populate(nbytes)

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
