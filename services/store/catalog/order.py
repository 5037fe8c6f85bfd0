"""Recency orders as packed doubly linked lists: O(1) to insert, move, remove; no object per entry.

The ids below RESERVED are the lists' own heads; `next(head)` is the most recent member, `previous(head)` the least.
A parent is kept nearer to the recent end than its children (`insert_behind`), so the least recent end of a list
offers leaves first, and eviction is O(1) instead of a heap or a scan.
"""

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

NONE = 0xFFFFFFFF
RESERVED = 64
"""Entry ids that are list heads; entries start here."""


class Orders:
    """Up to RESERVED lists over entry ids [RESERVED, capacity); an entry is in at most one of them."""

    def __init__(self, capacity: int) -> None:
        self._next = np.full(capacity, NONE, np.uint32)
        self._previous = np.full(capacity, NONE, np.uint32)
        self._lengths = [0] * RESERVED
        self._views()
        for head in range(RESERVED):
            self.next[head] = self.previous[head] = head

    def _views(self) -> None:
        self.next: Any = memoryview(cast("Any", self._next))
        self.previous: Any = memoryview(cast("Any", self._previous))

    def grow(self, capacity: int) -> None:
        """Room for entry ids below `capacity`."""
        extra = np.full(capacity - len(self._next), NONE, np.uint32)
        self._next = np.concatenate((self._next, extra))
        self._previous = np.concatenate((self._previous, extra))
        self._views()

    def __contains__(self, entry: int) -> bool:
        return bool(self.next[entry] != NONE)

    def length(self, head: int) -> int:
        """Members of a list."""
        return self._lengths[head]

    def push(self, head: int, entry: int) -> None:
        """Makes `entry`, which is in no list, the most recent member."""
        self._insert(head, head, entry)

    def insert_behind(self, head: int, anchor: int, entry: int) -> None:
        """Puts `entry`, which is in no list, right behind `anchor` (towards the least recent end) of list `head`."""
        self._insert(head, anchor, entry)

    def _insert(self, head: int, anchor: int, entry: int) -> None:
        after = self.next[anchor]
        self.next[entry] = after
        self.previous[entry] = anchor
        self.next[anchor] = entry
        self.previous[after] = entry
        self._lengths[head] += 1

    def remove(self, head: int, entry: int) -> None:
        """Takes `entry` out of list `head`, which it is in."""
        before, after = self.previous[entry], self.next[entry]
        self.next[before] = after
        self.previous[after] = before
        self.next[entry] = self.previous[entry] = NONE
        self._lengths[head] -= 1

    def from_oldest(self, head: int) -> Iterator[int]:
        """Members from the least recent on; the one just given may be removed meanwhile."""
        entry = self.previous[head]
        while entry != head:
            following = self.previous[entry]
            yield entry
            entry = following

    def rebuild(self, lists: dict[int, NDArray[Any]]) -> None:
        """Replaces all lists: per head, entry ids from the most recent to the least."""
        self._next.fill(NONE)
        self._previous.fill(NONE)
        self._lengths = [0] * RESERVED
        for head in range(RESERVED):
            members = lists.get(head, np.empty(0, np.uint32))
            ring = np.concatenate((np.array([head], np.uint32), members.astype(np.uint32)))
            self._next[ring] = np.roll(ring, -1)
            self._previous[ring] = np.roll(ring, 1)
            self._lengths[head] = len(members)

    def check_integrity(self) -> None:
        """AssertionError when a list is broken or a length is wrong."""
        members = 0
        for head in range(RESERVED):
            count, entry = 0, head
            while True:
                after = self.next[entry]
                assert self.previous[after] == entry, f"list {head}: {entry} -> {after} is not linked back"
                entry = after
                if entry == head:
                    break
                count += 1
                assert count <= len(self._next), f"list {head} does not end"
            assert count == self._lengths[head], f"list {head} holds {count}, its length says {self._lengths[head]}"
            members += count
        linked = int(np.count_nonzero(self._next != NONE)) - RESERVED
        assert members == linked, f"{linked} entries are linked, {members} are in lists"
