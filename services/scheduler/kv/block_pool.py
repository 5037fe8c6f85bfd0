"""The fixed array of device blocks: who owns each, which are empty, which a copy is moving right now.

    FREE ── allocate ──► REQUEST ── adopt ──► TREE
     ▲                      │                  │
     ├──── release ─────────┴── release ───────┤      a pinned block is never freed: its release
     └──── last unpin ◄── COPY ◄───────────────┘      makes it COPY, and the last unpin frees it

Each block has exactly one owner at any time. If the scheduler dies, all of this dies with it: after Quiesce/Idle
the pool starts empty.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FREE, REQUEST, TREE, COPY = 0, 1, 2, 3
OWNERS = ("free", "request", "tree", "copy")


class OwnershipError(RuntimeError):
    """A block was freed twice, taken twice, or used by someone who does not own it: a bug, never load."""


class OutOfBlocks(RuntimeError):
    """Fewer blocks are free than asked for; nothing was taken."""


@dataclass(frozen=True)
class PoolStatistics:
    """Blocks by owner; the four sum to `total`. `pinned`: blocks with a copy in flight, whoever owns them."""

    total: int
    free: int
    request: int
    tree: int
    copy: int
    pinned: int


class BlockPool:
    """`total` blocks, ids 0..total-1; free ones lie on an intrusive doubly linked list, used last in first out.

    Last in first out, so that a lightly used pool touches few pages of memory and reuses those in the caches.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool of {total} blocks holds nothing; at least 1 is needed")
        self.total = total
        self._owner = bytearray(total)
        self._pins = array("I", bytes(4 * total))
        self._pinned = 0
        self._counts = [total, 0, 0, 0]
        # index `total` is the sentinel: head of the list is next[total], its tail previous[total]
        self._next = array("I", [*range(1, total + 1), 0])
        self._previous = array("I", [total, *range(total)])

    @property
    def free(self) -> int:
        """Empty blocks."""
        return self._counts[FREE]

    @property
    def pins(self) -> Sequence[int]:
        """Copies in flight, by block id."""
        return self._pins

    def owner(self, block: int) -> int:
        """FREE, REQUEST, TREE or COPY."""
        return self._owner[block]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` empty blocks for a request, all or none; OutOfBlocks when there are fewer."""
        if count > self.free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.free} of {self.total} are free")
        taken = []
        for _ in range(count):
            block = self._next[self.total]
            self.take(block)
            taken.append(block)
        return taken

    def take(self, block: int) -> None:
        """Takes this very block, wherever it lies in the free list, for a request."""
        self._expect(block, FREE, "taken")
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._own(block, REQUEST)

    def adopt(self, blocks: Iterable[int]) -> None:
        """A request's blocks become the tree's."""
        for block in blocks:
            self._expect(block, REQUEST, "adopted by the tree")
            self._own(block, TREE)

    def release(self, blocks: Iterable[int], owner: int) -> None:
        """`owner` (REQUEST or TREE) gives blocks up; a pinned one becomes empty at its last unpin."""
        for block in blocks:
            self._expect(block, owner, "released")
            if self._pins[block]:
                self._own(block, COPY)
            else:
                self._free(block)

    def pin(self, block: int) -> None:
        """A copy of this block starts; pins count."""
        if self._owner[block] == FREE:
            raise OwnershipError(f"block {block} is free; a copy of it would move nobody's bytes")
        self._pinned += not self._pins[block]
        self._pins[block] += 1

    def unpin(self, block: int) -> None:
        """A copy of this block ended."""
        if not self._pins[block]:
            raise OwnershipError(f"block {block} is unpinned more often than pinned")
        self._pins[block] -= 1
        if not self._pins[block]:
            self._pinned -= 1
            if self._owner[block] == COPY:
                self._free(block)

    def statistics(self) -> PoolStatistics:
        """Counts, in O(1)."""
        free, request, tree, copy = self._counts
        return PoolStatistics(self.total, free, request, tree, copy, self._pinned)

    def check_integrity(self) -> None:
        """Walks everything; OwnershipError with the numbers that clash."""
        listed, at, before = 0, self._next[self.total], self.total
        while at != self.total:
            if self._owner[at] != FREE or self._previous[at] != before or listed > self.total:
                raise OwnershipError(f"free list broken at block {at} ({OWNERS[self._owner[at]]}) after {before}")
            listed, before, at = listed + 1, at, self._next[at]
        counted = [self._owner.count(owner) for owner in range(4)]
        if self._previous[self.total] != before or listed != counted[FREE] or counted != self._counts:
            raise OwnershipError(f"{listed} blocks listed free; owners counted {counted}, recorded {self._counts}")
        pinned = sum(1 for pins in self._pins if pins)
        if pinned != self._pinned:
            raise OwnershipError(f"{pinned} blocks are pinned, {self._pinned} recorded")
        for block, owner in enumerate(self._owner):
            if (owner == FREE and self._pins[block]) or (owner == COPY and not self._pins[block]):
                raise OwnershipError(f"block {block} is {OWNERS[owner]} with {self._pins[block]} copies in flight")

    def _expect(self, block: int, owner: int, verb: str) -> None:
        if self._owner[block] != owner:
            raise OwnershipError(f"block {block} {verb} as {OWNERS[owner]}'s, but it is {OWNERS[self._owner[block]]}'s")

    def _own(self, block: int, owner: int) -> None:
        self._counts[self._owner[block]] -= 1
        self._counts[owner] += 1
        self._owner[block] = owner

    def _free(self, block: int) -> None:
        self._own(block, FREE)
        head = self._next[self.total]
        self._next[block], self._previous[block] = head, self.total
        self._previous[head] = block
        self._next[self.total] = block
