"""One clear over both tiers: either done or not, whatever dies in it.

    noted on disk (scope, new epoch) ─► catalogue and arena headers ─► index, slots, holes ─► note taken away ─► answer
    a death anywhere after the note: the next start finds it and does all of it again

Without a disk tier there is nothing to note: what was dropped stays dropped.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.store.catalog.catalog import Catalog
from services.store.catalog.clearing import unplaced
from services.store.disk.tier import DiskTier
from shared.faults import Faults
from shared.scope import EVERYTHING, Scope, of_root

NOTE = "clearing"
"""Name of the disk tier's small record of the clear that is under way."""


@dataclass(frozen=True)
class Done:
    """What a clear dropped."""

    host_blocks: int
    host_bytes: int
    disk_blocks: int = 0
    disk_bytes: int = 0


async def clear_tiers(
    catalog: Catalog,
    disk: DiskTier | None,
    scope: Scope,
    in_thread: Callable[..., Awaitable[Any]],
    faults: Faults,
) -> Done:
    """Durable when it returns. No write to disk may be under way, nor begin. DiskTierError: try again."""
    firsts: set[bytes] = set()
    if disk is not None:
        if scope.line and disk.statistics().state != "ready":
            scope = of_root(scope.pattern)  # what continues the line is not known until all has been read
        epoch = (catalog.epoch + 1).to_bytes(8, "little")
        await in_thread(disk.put_meta, {"epoch": epoch, NOTE: msgspec.msgpack.encode(scope)})
        if scope.line:
            firsts = await in_thread(_firsts, disk, scope, unplaced(catalog.blocks, scope))
    faults.at("store_clear_noted")
    dropped = catalog.clear(scope, firsts)
    faults.at("store_clear_host")
    if disk is None:
        return Done(dropped.blocks, dropped.nbytes)
    blocks, nbytes = await in_thread(disk.clear, scope, dropped.on_disk)
    faults.at("store_clear_disk")
    await in_thread(disk.put_meta, {NOTE: b""})
    return Done(dropped.blocks, dropped.nbytes, blocks, nbytes)


def _firsts(disk: DiskTier, scope: Scope, candidates: Sequence[bytes]) -> set[bytes]:
    """In a thread: those that follow the scope's root."""
    entries = [disk.lookup(identity) for identity in candidates]
    return {entry.identity for entry in entries if entry is not None and entry.parent == scope.pattern}


def begun_clear(disk: DiskTier) -> Scope | None:
    """What a clear that was cut short was to drop."""
    stored = disk.get_meta(NOTE)
    if not stored:
        return None
    try:
        return msgspec.msgpack.decode(stored, type=Scope)
    except msgspec.MsgspecError:
        return EVERYTHING  # of a version that names scopes otherwise: too much is a miss, too little is not
