"""Orders by recency made anew from the rows, in numpy: after recovery, and after a clear of very many blocks."""

import numpy as np
from numpy.typing import NDArray

from services.store.catalog.blocks import DISK, Blocks
from services.store.catalog.entries import DETACHED, LIVE, ON_DISK, Entries
from services.store.catalog.order import NONE
from services.store.catalog.slots import DIRTY


def rebuild_orders(blocks: Blocks, near: NDArray[np.intp] | None = None) -> None:
    """Most recent first; of equal recency a block before what continues it, as operation keeps it.

    `near`: all rows, in an order in which most stand right behind their parents; by recency if none is at hand.
    """
    table, slots = blocks.entries, blocks.slots
    recent = _recent_first(table, near)
    flags = table.columns["flags"][recent]
    free_to_go = (flags & LIVE != 0) & (flags & DETACHED == 0) & (table.columns["pins"][recent] == 0)
    hosts = table.columns["host"][recent]
    on_host = np.flatnonzero(free_to_go & (hosts != NONE))
    hosted, numbers = recent[on_host], hosts[on_host]
    sizes = np.array(slots.extent_size, np.int64)[numbers // blocks.headers.geometry.slot_span]
    heads = 2 * sizes + (slots.columns["state"][numbers] == DIRTY)
    table.host_order.rebuild({head: hosted[heads == head] for head in np.unique(heads).tolist()})
    table.disk_order.rebuild({DISK: recent[free_to_go & (flags & ON_DISK != 0)]})


def _recent_first(entries: Entries, near: NDArray[np.intp] | None) -> NDArray[np.intp]:
    """All rows, by recency and then by their distance from the first block of their chain.

    Sorted are not rows, of which there are very many, but runs: rows of one recency of which each stands behind its
    parent in `near`. How far a run is from the first block of its chain is found by pointer doubling.
    """
    top = entries.top
    if near is None:
        near = np.argsort(entries.columns["tick"][:top], kind="stable")
    numbers, ticks = np.arange(top), entries.columns["tick"][near]
    place = np.empty(top, np.intp)
    place[near] = numbers
    parent = entries.columns["parent"][near]
    linked = (entries.columns["flags"][near] & LIVE != 0) & (parent != NONE)
    up = numbers.copy()
    up[linked] = place[parent[linked]]
    begins = up != numbers - 1
    begins[1:] |= ticks[1:] != ticks[:-1]
    begins[:1] = True
    heads, run = np.flatnonzero(begins), np.cumsum(begins) - 1
    above = run[up[heads]]  # the run of what a run's first row hangs on; its own when that hangs on nothing
    steps = up[heads] - heads[above] + linked[heads]
    while (more := steps[above]).any():
        steps += more
        above = above[above]
    order = np.lexsort((steps, ticks.max(initial=0) - ticks[heads]))
    lengths = np.diff(heads, append=top)[order]
    firsts = heads[order] - (np.cumsum(lengths) - lengths)
    return near[np.repeat(firsts, lengths) + numbers]
