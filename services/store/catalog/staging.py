"""A disk block on its way into the arena: a slot of ours while it is read, then a block like any other, or nothing.

    begin_staging: slot STAGING, header GRANTED to ourselves ─► a reader fills it ─► end_staging: VALID, or FREE again

The read has a pin of its own, so a lease that is released meanwhile does not take the slot from under it.
"""

from typing import NamedTuple

from services.store.arena.records import FLAG_CLEAN, GRANTED, VALID
from services.store.catalog.blocks import Blocks
from services.store.catalog.entries import DETACHED, ON_DISK
from services.store.catalog.order import NONE
from services.store.catalog.slots import CLEAN, DIRTY, FREE, STAGING


class StageOrder(NamedTuple):
    """A disk block to read into the arena at `offset`."""

    identity: bytes
    slot: int
    generation: int
    offset: int
    length: int


class Generations:
    """Numbers that only grow, over restarts too: the start count in the upper half."""

    def __init__(self, starts: int) -> None:
        self._last = starts << 32

    def next(self) -> int:
        """A generation that no slot ever had."""
        self._last += 1
        return self._last

    def at_least(self, starts: int) -> None:
        """No generation of before this start from now on."""
        self._last = max(self._last, starts << 32)


def begin_staging(blocks: Blocks, entry: int, generations: Generations) -> StageOrder | None:
    """A slot for a block that only the disk holds, evicting if need be; None when there is no room."""
    entries, slots = blocks.entries, blocks.slots
    length = entries.length[entry]
    size = slots.size_class(length)
    slot = blocks.allocate(size) if size >= 0 else NONE
    if slot == NONE:
        return None
    number = generations.next()
    slots.state[slot], slots.entry[slot], slots.generation[slot] = STAGING, entry, number
    slots.engine[slot] = slots.checksum[slot] = 0
    _write_header(blocks, entry, slot, GRANTED, parent=bytes(32))
    entries.host[entry] = slot
    blocks.pin(entry)
    return StageOrder(entries.identity(entry), slot, number, blocks.headers.offset(slot), length)


def is_wanted(blocks: Blocks, order: StageOrder) -> bool:
    """Whether anybody still waits for a read that has not begun (its own pin is not a reason to read)."""
    entry = blocks.slots.entry[order.slot]
    return bool(blocks.entries.pins[entry] > 1 and not blocks.entries.flags[entry] & DETACHED)


def end_staging(blocks: Blocks, order: StageOrder, *, ok: bool, checksum: int, parent: bytes, lost: bool) -> bool:
    """A read has ended: whether the block is in the arena now. The read's own pin is still the caller's to undo.

    `checksum` and `parent` are what the disk knows of the block. `lost`: a failed read means that the disk copy is
    gone (and not that the disk could not be asked).
    """
    entries, slots = blocks.entries, blocks.slots
    entry = slots.entry[order.slot]
    assert slots.state[order.slot] == STAGING
    assert slots.generation[order.slot] == order.generation
    if ok and not entries.flags[entry] & DETACHED:
        slots.checksum[order.slot] = checksum
        _write_header(blocks, entry, order.slot, VALID, parent=parent)
        slots.state[order.slot] = CLEAN if entries.flags[entry] & ON_DISK else DIRTY  # the index was lost meanwhile
        before = entries.map.get(parent)
        if before != NONE and entries.parent[entry] == NONE:
            entries.link(entry, before)
        return True
    blocks.headers.free(order.slot)
    entries.host[entry] = NONE
    slots.state[order.slot] = FREE
    slots.give_back(order.slot)
    if lost and entries.flags[entry] & ON_DISK:
        blocks.counters.disk_failures += 1
        entries.flags[entry] &= ~ON_DISK
    if not entries.flags[entry] & (ON_DISK | DETACHED):
        entries.detach(entry)
    return False


def _write_header(blocks: Blocks, entry: int, slot: int, state: int, *, parent: bytes) -> None:
    entries = blocks.entries
    blocks.headers.write(
        slot,
        state,
        identity=entries.identity(entry),
        parent=parent,
        root=entries.roots[entries.root[entry]],
        generation=blocks.slots.generation[slot],
        engine=0,
        epoch=0,
        length=entries.length[entry],
        checksum=blocks.slots.checksum[slot],
        recency=entries.tick[entry],
        flags=FLAG_CLEAN,
    )
