"""Orders by recency made anew from the rows, in numpy: after recovery, and after a clear of very many blocks."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.store.catalog.blocks import DISK, Blocks
from services.store.catalog.entries import DETACHED, LIVE, ON_DISK, Entries
from services.store.catalog.order import NONE
from services.store.catalog.slots import DIRTY


def rebuild_orders(blocks: Blocks, near: NDArray[np.intp] | None = None) -> None:
    """Most recent first; of equal recency the nearer to the root first, as operation keeps it.

    `near`: all rows, in an order in which most stand right behind their parents; by recency if none is at hand.
    """
    table, slots = blocks.entries, blocks.slots
    top = table.top
    flags = table.columns["flags"][:top]
    free_to_go = (flags & LIVE != 0) & (flags & DETACHED == 0) & (table.columns["pins"][:top] == 0)
    rank = _ranks(table.columns["tick"][:top], _depths(table, near))
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


def _depths(entries: Entries, near: NDArray[np.intp] | None) -> NDArray[np.uint32]:
    """Blocks between each entry and the first of its chain.

    Runs in which each row stands behind its parent are counted at once, the runs themselves by pointer doubling. The
    order of rows would do as well, but each round would jump about in memory.
    """
    top = entries.top
    if near is None:
        near = np.argsort(entries.columns["tick"][:top], kind="stable")
    numbers = np.arange(top)
    place = np.empty(top, np.intp)
    place[near] = numbers
    parent = entries.columns["parent"][near]
    linked = (entries.columns["flags"][near] & LIVE != 0) & (parent != NONE)
    up = numbers.copy()
    up[linked] = place[parent[linked]]
    begins = up != numbers - 1
    begins[:1] = True
    heads = np.flatnonzero(begins)
    run = np.cumsum(begins) - 1
    above = run[up[heads]]  # the run of what a run's first row hangs on, at most its own
    steps = up[heads] - heads[above] + linked[heads]
    while (more := steps[above]).any():
        steps += more
        above = above[above]
    depths = np.empty(top, np.uint32)
    depths[near] = numbers - heads[run] + steps[run]
    return depths
