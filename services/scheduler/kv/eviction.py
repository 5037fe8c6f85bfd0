"""Which leaf goes first: the least recently used, the deepest among equals.

A heap whose entries are corrected when they surface: a node has one entry at most, using it only raises its key,
so an outdated entry surfaces too early, never too late, and is put back with its true key. Each correction is paid
for by a use since the last one: O(log n) a leaf, never a scan.
"""

import heapq
from itertools import count

from services.scheduler.kv.node import Node

Entry = tuple[int, int, int, Node]


class EvictionQueue:
    """Evictable leaves by (recency, depth)."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._serial = count()
        self.steps = 0
        """Heap operations so far, for tests that count work."""

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: Node) -> None:
        """Offers an evictable leaf; nothing happens when it is queued already."""
        if not node.queued:
            node.queued = True
            self.steps += 1
            heapq.heappush(self._heap, (node.recency, -node.end, next(self._serial), node))

    def pop(self) -> Node | None:
        """The leaf to evict next, or None when there is none."""
        while self._heap:
            self.steps += 1
            recency, depth, _, node = heapq.heappop(self._heap)
            node.queued = False
            if not node.evictable:
                continue
            if (recency, depth) == (node.recency, -node.end):
                return node
            self.push(node)
        return None

    def prune(self) -> None:
        """Drops the entries of nodes that are no longer evictable, after many went at once."""
        kept = []
        for entry in self._heap:
            entry[3].queued = entry[3].evictable
            if entry[3].queued:
                kept.append(entry)
        heapq.heapify(kept)
        self._heap = kept
