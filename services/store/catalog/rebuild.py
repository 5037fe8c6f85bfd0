"""Orders by recency made anew from the rows, in numpy: after recovery, and after a clear of very many blocks."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.store.catalog.blocks import DISK, Blocks
from services.store.catalog.entries import DETACHED, LIVE, ON_DISK, Entries
from services.store.catalog.order import NONE
from services.store.catalog.slots import DIRTY


def rebuild_orders(blocks: Blocks) -> None:
    """Most recent first; of equal recency the nearer to the root first, as operation keeps it."""
    table, slots = blocks.entries, blocks.slots
    top = table.top
    flags = table.columns["flags"][:top]
    free_to_go = (flags & LIVE != 0) & (flags & DETACHED == 0) & (table.columns["pins"][:top] == 0)
    rank = _ranks(table.columns["tick"][:top], _depths(table))
    hosted = np.flatnonzero(free_to_go & (table.columns["host"][:top] != NONE))
    numbers = table.columns["host"][hosted]
    sizes = np.array(slots.extent_size, np.int64)[numbers // blocks.headers.geometry.slot_span]
    heads = 2 * sizes + (slots.columns["state"][numbers] == DIRTY)
    recent_first = np.argsort(rank[hosted])
    lists: dict[int, NDArray[Any]] = {
        head: hosted[recent_first[heads[recent_first] == head]] for head in np.unique(heads).tolist()
    }
    table.host_order.rebuild(lists)
    disk = np.flatnonzero(free_to_go & (flags & ON_DISK != 0))
    table.disk_order.rebuild({DISK: disk[np.argsort(rank[disk])]})


def _ranks(ticks: NDArray[np.uint64], depths: NDArray[np.uint32]) -> NDArray[np.int64]:
    """One number that sorts by recency, then by depth: one sort of plain numbers instead of two."""
    steps = int(depths.max(initial=0)) + 1
    newest = ticks.max(initial=0)
    age = newest - ticks
    if int(newest) < (1 << 63) // steps:
        return np.asarray(age.astype(np.int64) * steps + depths, np.int64)
    return np.argsort(np.lexsort((depths, age)))


def _depths(entries: Entries) -> NDArray[np.uint32]:
    """Blocks between each entry and the first of its chain, by pointer doubling."""
    live = entries.columns["flags"][: entries.top] & LIVE != 0
    jump = np.where(live, entries.columns["parent"][: entries.top], NONE).astype(np.int64)
    depth = (jump != NONE).astype(np.uint32)
    going = np.flatnonzero(jump != NONE)
    while len(going):
        via = jump[going]
        depth[going] += depth[via]
        jump[going] = jump[via]
        going = going[jump[going] != NONE]
    return np.asarray(depth, np.uint32)
