"""Dropping all blocks of a root, or all: one by one when they are few, in numpy when they are many.

Pinned blocks lose their names at once and their slots when they are let go; what is granted is never published.
"""

import numpy as np
from numpy.typing import NDArray

from services.store.arena.records import FLAG_DOOMED
from services.store.catalog.blocks import Blocks
from services.store.catalog.entries import DETACHED
from services.store.catalog.order import NONE
from services.store.catalog.rebuild import rebuild_orders
from services.store.catalog.slots import CLEAN, DIRTY, FREE, GRANTED

MANY = 4096
"""Above that the orders are sorted anew (a second a million) instead of changed block by block (ten)."""


def clear_blocks(blocks: Blocks, root: bytes | None) -> tuple[int, int]:
    """(blocks, bytes) that were on the host."""
    entries, slots = blocks.entries, blocks.slots
    flags = entries.columns["flags"][: entries.top]
    scope = (flags != 0) & (flags & DETACHED == 0)
    if root is not None:
        scope &= entries.columns["root"][: entries.top] == entries.known_root(root)
    # Chains lie in one root, so no link leaves the scope.
    entries.columns["parent"][: entries.top][scope] = NONE
    entries.columns["children"][: entries.top][scope] = 0
    chosen = np.flatnonzero(scope)
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
    return count, nbytes


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
