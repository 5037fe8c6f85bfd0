"""Coming up: the arena, the disk tier, and a catalogue that knows what both hold. Runs in a thread, before ready.

arena    re-attached, or made; in store.arena_dir, else a file in the home with a warning, else no host tier
disk     opened, or off with a reason that status shows; a damaged index is rebuilt while we serve
"""

import contextlib
import ctypes
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from services.store.arena.arena import Arena, ArenaRefused, open_arena
from services.store.arena.records import HOME_AT, pack_home
from services.store.arena.size import STAGING_BYTES
from services.store.catalog.catalog import Catalog
from services.store.catalog.recovery import Recovery
from services.store.disk.errors import DiskTierError
from services.store.disk.tier import DiskTier
from shared.config import Config, StoreConfig
from shared.faults import Faults
from shared.large_memory import LargeMemory, Wish
from shared.paths import Places

BATCH = 1 << 15
"""Index rows adopted at a time."""

AHEAD = 4
"""Batches of 4 MiB that may lie read and not yet adopted."""


class Log(Protocol):
    """What we need of a logger."""

    def warning(self, event: str, **facts: object) -> object:
        """One line."""


@dataclass
class Opened:
    """What a store starts with. `catalog` is None without an arena; `disk` None with `disk_reason`."""

    arena: Arena | None
    catalog: Catalog | None
    disk: DiskTier | None
    disk_reason: str
    recovery: Recovery | None = None
    notes: list[str] = field(default_factory=list)
    adopted: dict[str, int] = field(default_factory=dict)
    large: LargeMemory | None = None


def _open_arena(places: Places, config: StoreConfig, log: Log, notes: list[str]) -> Arena | None:
    wanted = config.host_bytes or (STAGING_BYTES if config.disk_bytes else 0)
    if not wanted:
        return None
    shared = places.arena(config.arena_dir)
    fallback = places.store / "arena"
    for path in (shared, fallback):
        try:
            if path is fallback:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            arena = open_arena(path, wanted)
        except OSError as error:  # ArenaRefused, and a home that can't be written
            notes.append(str(error))
            log.warning("arena_refused", reason=str(error))
            continue
        home = pack_home(os.fsencode(places.home))
        arena.buffer[HOME_AT : HOME_AT + len(home)] = home
        for note in arena.notes:
            log.warning("arena", note=note)
        if path is fallback:
            log.warning("arena_on_disk", path=str(path), note="the host tier is a file in the home: slower, and kept")
        else:
            with contextlib.suppress(OSError):  # of a start without another place; the disk tier has its blocks
                fallback.unlink()
        notes += arena.notes
        return arena
    return None


def _large(arena: Arena, config: StoreConfig, log: Log) -> LargeMemory:
    wish = Wish(config.huge_pages, config.lock_memory)
    large = LargeMemory(f"the arena {arena.path}", "store", arena.buffer, wish, arena.path)
    for warning in large.warnings:
        log.warning("arena_memory", reason=warning)
    return large


def open_disk(directory: Path, config: Config, faults: Faults) -> tuple[DiskTier | None, str]:
    """(tier, "") or (None, why there is none)."""
    if not config.store.disk_bytes:
        return None, "off: store.disk_bytes is 0"
    try:
        tier = DiskTier(
            directory,
            capacity=config.store.disk_bytes,
            floor=config.store.disk_floor,
            faults=faults,
            max_blocks=config.faults.max_disk_blocks,
            nice=config.store.nice,
        )
    except DiskTierError as error:
        return None, error.reason
    return tier, ""


def open_store(places: Places, config: Config, faults: Faults, log: Log) -> Opened:
    """Both tiers and the catalogue, recovered. ConfigError for a key that means nothing."""
    Wish(config.store.huge_pages).checked("store")
    notes: list[str] = []
    arena = _open_arena(places, config.store, log, notes)
    if arena is None:
        return Opened(None, None, None, "off: there is no arena to stage in", notes=notes)
    disk, reason = open_disk(places.store, config, faults)
    starts, epoch = arena.headers.starts, arena.headers.epoch
    if disk is not None:
        starts, epoch = max(starts, disk.get_number("starts")), max(epoch, disk.get_number("epoch"))
    catalog = Catalog(arena.headers, starts=starts + 1, epoch=epoch, max_slots=config.faults.max_host_blocks)
    opened = Opened(arena, catalog, disk, reason, notes=notes, large=_large(arena, config.store, log))
    recovery = Recovery(catalog)
    recovery.expect(disk.statistics().blocks if disk is not None else 0)
    readable: DiskTier | None = None
    if disk is not None:
        with contextlib.suppress(DiskTierError):  # the lane goes on from here, and says why
            disk.put_meta({"starts": (starts + 1).to_bytes(8, "little")})
            readable = disk
    with _IndexReader(readable) as index:
        recovery.adopt_host()
        opened.adopted["host"] = catalog.blocks.entries.live
        if damaged := arena.headers.damaged:
            opened.notes.append(f"headers of the arena torn by a kill, or damaged, their blocks dropped: {damaged}")
            log.warning("arena", note=opened.notes[-1])
        with contextlib.suppress(DiskTierError):  # as above
            opened.adopted["disk"] = index.adopt_into(recovery)
    recovery.finish()
    _trim()
    opened.recovery = recovery
    return opened


def _trim() -> None:
    """Gives the memory of recovery's temporaries back: half of what a catalogue of a million blocks takes."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class _IndexReader:
    """Reads a sound index in a thread, some batches ahead of what is adopted; a damaged one is left for later."""

    def __init__(self, disk: DiskTier | None) -> None:
        self._disk = disk
        self._thread = ThreadPoolExecutor(1)
        self._ahead: deque[Future[Any]] = deque()
        if disk is not None and disk.statistics().state == "recovering":
            for _ in range(AHEAD):
                self._read_on(disk)

    def _read_on(self, disk: DiskTier) -> None:
        self._ahead.append(self._thread.submit(disk.recover_step, BATCH))

    def adopt_into(self, recovery: Recovery) -> int:
        """All of it; how many blocks. DiskTierError where reading ended."""
        count = 0
        while self._ahead and self._disk is not None:
            batch = self._ahead.popleft().result()
            if batch is None:
                break
            self._read_on(self._disk)
            recovery.adopt_disk(batch)
            count += len(batch)
        return count

    def __enter__(self) -> "_IndexReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)


__all__ = ["ArenaRefused", "Opened", "open_disk", "open_store"]
