"""Dropping all blocks of a scope: one by one when they are few, in numpy when they are many.

Pinned blocks lose their names at once and their slots when they are let go; what is granted is never published.

A line is the tree below one first block. A block whose parent is not held can't be placed in it or outside: it may
continue the line, and would be found again once what stands before it is back. Such orphans of the root go with any
of its lines; nobody can find them now, so nothing is lost but work.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.store.arena.records import FLAG_DOOMED
from services.store.catalog.blocks import Blocks
from services.store.catalog.entries import DETACHED, LIVE, ON_DISK, Entries
from services.store.catalog.order import NONE
from services.store.catalog.rebuild import rebuild_orders
from services.store.catalog.slots import CLEAN, DIRTY, FREE, GRANTED
from shared.scope import Scope

MANY = 4096
"""Above that the orders are sorted anew (a second a million) instead of changed block by block (ten)."""


class Dropped(NamedTuple):
    """Blocks and bytes that were on the host; of a line the names of those that the disk holds."""

    blocks: int
    nbytes: int
    on_disk: list[bytes]


def clear_blocks(blocks: Blocks, scope: Scope, firsts: Collection[bytes] = ()) -> Dropped:
    """`firsts`: what the disk says of `unplaced`, those that are the first blocks of their chains."""
    entries, slots = blocks.entries, blocks.slots
    inside = _inside(entries, scope)
    on_disk: list[bytes] = []
    if scope.line:
        inside = _line(blocks, inside, scope, firsts)
        held = np.flatnonzero(inside & (entries.columns["flags"][: entries.top] & ON_DISK != 0))
        on_disk = [entries.identity(entry) for entry in held.tolist()]
    # Chains lie in one root, and a line is all of a tree: no link leaves the scope.
    entries.columns["parent"][: entries.top][inside] = NONE
    entries.columns["children"][: entries.top][inside] = 0
    chosen = np.flatnonzero(inside)
    hosts = entries.columns["host"][chosen]
    hosted = hosts != NONE
    on_host = np.zeros(len(chosen), bool)
    on_host[hosted] = np.isin(slots.columns["state"][hosts[hosted]], (DIRTY, CLEAN))
    blocks.headers.free_many(hosts[on_host])
    nbytes = int(entries.columns["length"][chosen[on_host]].sum())
    many = len(chosen) > MANY
    pinned = entries.columns["pins"][chosen] != 0
    for entry in chosen[pinned].tolist() if many else chosen.tolist():
        _drop_one(blocks, entry)
    if many:
        _drop_many(blocks, chosen[~pinned])
    count = int(np.count_nonzero(on_host))
    blocks.counters.cleared += count
    return Dropped(count, nbytes, on_disk)


def unplaced(blocks: Blocks, scope: Scope) -> list[bytes]:
    """Blocks of the scope that have no parent here, and of which only the disk knows whether they ever had one."""
    entries = blocks.entries
    inside = _inside(entries, scope)
    tops = np.flatnonzero(inside & (entries.columns["parent"][: entries.top] == NONE))
    return [entries.identity(entry) for entry in tops.tolist() if _parent_of(blocks, entry) is None]


def _inside(entries: Entries, scope: Scope) -> NDArray[np.bool_]:
    flags = entries.columns["flags"][: entries.top]
    inside: NDArray[np.bool_] = (flags & LIVE != 0) & (flags & DETACHED == 0)
    if scope.mask:
        numbers = [number for number, root in enumerate(entries.roots) if scope.covers(root)]
        inside &= np.isin(entries.columns["root"][: entries.top], numbers)
    return inside


def _line(blocks: Blocks, inside: NDArray[np.bool_], scope: Scope, firsts: Collection[bytes]) -> NDArray[np.bool_]:
    entries = blocks.entries
    start, top = entries.map.get(scope.line), _first_ancestors(entries)

    def is_first(entry: int) -> bool:
        parent = _parent_of(blocks, entry)
        return entries.identity(entry) in firsts if parent is None else parent == scope.pattern

    going = [entry for entry in np.unique(top[inside]).tolist() if entry == start or not is_first(entry)]
    return inside & np.isin(top, going)


def _parent_of(blocks: Blocks, entry: int) -> bytes | None:
    """The name before a block, as its header tells; None when it has none or is being read from disk."""
    slot = blocks.entries.host[entry]
    if slot == NONE or blocks.slots.state[slot] not in (GRANTED, DIRTY, CLEAN):
        return None
    return blocks.headers.parent_and_root(slot)[0]


def _first_ancestors(entries: Entries) -> NDArray[Any]:
    """For each row the first block of its chain, as far as that is linked; by doubling, so in few passes."""
    rows = np.arange(entries.top)
    parent = entries.columns["parent"][: entries.top]
    unlinked = (entries.columns["flags"][: entries.top] & LIVE == 0) | (parent == NONE)
    up = np.where(unlinked, rows, parent.astype(np.int64))
    while (further := up[up]).tobytes() != up.tobytes():
        up = further
    return up


def _drop_one(blocks: Blocks, entry: int) -> None:
    entries, slot = blocks.entries, blocks.entries.host[entry]
    if slot != NONE and blocks.slots.state[slot] == GRANTED:
        blocks.headers.set_flags(slot, FLAG_DOOMED)
    pinned = entries.pins[entry]
    if not pinned:
        blocks.leave(entry)
    entries.detach(entry)
    if not pinned:
        blocks.settle(entry)


def _drop_many(blocks: Blocks, chosen: NDArray[np.intp]) -> None:
    """Unpinned blocks whose headers are free already."""
    entries, slots = blocks.entries, blocks.slots
    hosts = entries.columns["host"][chosen]
    slots.columns["state"][hosts[hosts != NONE]] = FREE
    slots.rebuild_free()
    entries.remove_many(chosen)
    rebuild_orders(blocks)
