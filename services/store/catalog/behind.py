"""Write-behind: which dirty blocks go to disk next, parents first.

    commit ── queued ──► next_batch (pinned) ──► written: clean │ failed: queued again │ full: stays dirty, unqueued

The queue is a linked list through the slots, first in, first out. A block whose parent is not on disk yet, nor ahead
of it in the batch, goes back to the end, so the disk holds chains from their first block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.store.catalog.blocks import Blocks
from services.store.catalog.entries import DETACHED, ON_DISK
from services.store.catalog.order import NONE
from services.store.catalog.slots import DIRTY, GRANTED

_LAST = 0xFFFFFFFF


class WriteOrder(NamedTuple):
    """A pinned dirty block to write: `offset` and `length` are its payload's place in the arena file."""

    entry: int
    slot: int
    identity: bytes
    parent: bytes
    root: bytes
    generation: int
    checksum: int
    recency: int
    offset: int
    length: int


class WriteBehind:
    """The dirty queue over `blocks`."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._head = self._tail = NONE
        self.length = 0

    def push(self, slot: int) -> None:
        """Queues a slot, unless it is queued already."""
        queued = self._blocks.slots.queued
        if queued[slot]:
            return
        queued[slot] = _LAST
        if self._tail == NONE:
            self._head = slot
        else:
            queued[self._tail] = slot + 1
        self._tail = slot
        self.length += 1

    def extend(self, slots: NDArray[np.intp]) -> None:
        """Queues many that are not queued yet."""
        if not len(slots):
            return
        links = self._blocks.slots.columns["queued"]
        links[slots[:-1]] = slots[1:] + 1
        links[slots[-1]] = _LAST
        if self._tail == NONE:
            self._head = int(slots[0])
        else:
            links[self._tail] = slots[0] + 1
        self._tail = int(slots[-1])
        self.length += len(slots)

    def _pop(self) -> int:
        queued, slot = self._blocks.slots.queued, self._head
        following = queued[slot]
        queued[slot] = 0
        self._head = NONE if following == _LAST else following - 1
        if self._head == NONE:
            self._tail = NONE
        self.length -= 1
        return slot

    def next_batch(self, max_blocks: int, max_bytes: int) -> list[WriteOrder]:
        """Up to so many blocks of one length, pinned, in an order that suits the disk."""
        blocks, entries, slots = self._blocks, self._blocks.entries, self._blocks.slots
        batch: list[WriteOrder] = []
        chosen: set[int] = set()
        nbytes = 0
        for _ in range(self.length):
            if len(batch) == max_blocks or nbytes >= max_bytes:
                break
            slot = self._pop()
            entry = slots.entry[slot]
            if slots.state[slot] != DIRTY or entries.flags[entry] & (ON_DISK | DETACHED):
                continue  # evicted, cleared or reused since
            parent = entries.parent[entry]
            if parent != NONE and not entries.flags[parent] & ON_DISK and parent not in chosen:
                if self._will_be_written(parent):
                    self.push(slot)
                continue
            length = entries.length[entry]
            if batch and length != batch[0].length:
                self.push(slot)
                continue
            blocks.pin(entry)
            chosen.add(entry)
            nbytes += length
            parent_id, root = blocks.headers.parent_and_root(slot)
            order = WriteOrder(
                entry=entry,
                slot=slot,
                identity=entries.identity(entry),
                parent=parent_id,
                root=root,
                generation=slots.generation[slot],
                checksum=slots.checksum[slot],
                recency=entries.tick[entry],
                offset=blocks.headers.offset(slot),
                length=length,
            )
            batch.append(order)
        return batch

    def _will_be_written(self, parent: int) -> bool:
        slot = self._blocks.entries.host[parent]
        return slot != NONE and (self._blocks.slots.state[slot] == GRANTED or bool(self._blocks.slots.queued[slot]))

    def written(self, batch: Sequence[WriteOrder], saved: Sequence[bool]) -> list[bytes]:
        """Unpins a batch; `saved` per block. Returns identities that were cleared meanwhile: to be deleted again."""
        strays: list[bytes] = []
        for order, on_disk in zip(batch, saved, strict=True):
            if on_disk and self._blocks.entries.flags[order.entry] & DETACHED:
                strays.append(order.identity)
            elif on_disk:
                self._blocks.set_clean(order.entry)
            self._blocks.unpin(order.entry)
        return strays

    def put_back(self, batch: Sequence[WriteOrder]) -> None:
        """Unpins a batch that did not reach the disk for a passing reason; it is queued again."""
        for order in batch:
            detached = self._blocks.entries.flags[order.entry] & DETACHED
            self._blocks.unpin(order.entry)
            if not detached:
                self.push(order.slot)

    def damaged(self, order: WriteOrder) -> None:
        """The arena's bytes no longer match the block's checksum: it is withdrawn before it can spread."""
        self._blocks.suspect(order.entry)
        self._blocks.unpin(order.entry)
