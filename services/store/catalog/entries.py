"""Every block that the store knows, on host or disk or granted: one row of packed arrays each, about 80 bytes.

    identity --map--> entry --host--> slot of the arena (or NONE)
                        |--on disk?-- the disk tier finds it by identity
                        |--parent---> entry (NONE: first block of its root, or its parent is not held)

An entry lives while its block is on any tier or pinned. `children` counts entries of the union of the tiers (granted
ones too), so a leaf is a leaf of the union. A *detached* entry has lost its name (cleared, damaged): nobody finds
it, and it goes when its last pin does.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from services.store.catalog.identity_table import Identities, IdentityMap, PackedMap
from services.store.catalog.order import NONE, RESERVED, Orders

LIVE, ON_DISK, DETACHED, SUSPECT = 1, 2, 4, 8
"""`flags`: the row is used; there is a copy on disk; the name is gone; the host copy failed a checksum."""

_COLUMNS = {
    "parent": np.uint32,
    "children": np.uint32,
    "host": np.uint32,
    "pins": np.uint32,
    "root": np.uint32,
    "length": np.uint32,
    "tick": np.uint64,
    "flags": np.uint8,
}
_FILL = {"parent": NONE, "host": NONE}


class Entries:
    """The rows. `host_order` (by size class: clean, dirty) and `disk_order` hold the unpinned ones by recency."""

    parent: Any
    children: Any
    host: Any
    pins: Any
    root: Any
    length: Any
    tick: Any
    flags: Any

    def __init__(self, make_map: Callable[[Callable[[], Identities]], IdentityMap] = PackedMap) -> None:
        self._identity = np.zeros((1024, 32), np.uint8)
        self.columns: dict[str, NDArray[Any]] = {
            name: np.full(1024, _FILL.get(name, 0), kind) for name, kind in _COLUMNS.items()
        }
        self._views()
        self.map = make_map(lambda: self._identity)
        self.host_order = Orders(1024)
        self.disk_order = Orders(1024)
        self.roots: list[bytes] = []
        self._root_numbers: dict[bytes, int] = {}
        self._root_blocks: list[int] = []
        self._spare_roots: list[int] = []
        self.unused = NONE
        self.top = RESERVED
        self.live = 0

    def _views(self) -> None:
        for name, column in self.columns.items():
            setattr(self, name, memoryview(cast("Any", column)))

    @property
    def identities(self) -> Identities:
        """Rows of 32 bytes: [capacity, 32]."""
        return self._identity

    @property
    def capacity(self) -> int:
        """Rows allocated."""
        return len(self._identity)

    def reserve_rows(self, more: int) -> None:
        """Makes room for `more` rows at the top: so many, or a quarter more than there are."""
        needed, capacity = self.top + more, self.capacity
        if needed <= capacity:
            return
        capacity = max(needed, capacity + capacity // 4)
        grown = np.zeros((capacity, 32), np.uint8)
        grown[: self.top] = self._identity[: self.top]
        self._identity = grown
        for name, kind in _COLUMNS.items():
            fill = _FILL.get(name, 0)
            column = np.full(capacity, fill, kind) if fill else np.zeros(capacity, kind)
            column[: self.top] = self.columns[name][: self.top]
            self.columns[name] = column
        self._views()
        self.host_order.grow(capacity)
        self.disk_order.grow(capacity)

    # --- roots -----------------------------------------------------------------------------------------------

    def root_number(self, root: bytes, blocks: int = 1) -> int:
        """The small number of a root's 32 bytes, which gets `blocks` more rows; forgotten with its last row."""
        number = self._root_numbers.get(root)
        if number is None:
            number = self._spare_roots.pop() if self._spare_roots else len(self.roots)
            if number == len(self.roots):
                self.roots.append(root)
                self._root_blocks.append(0)
            self.roots[number] = root
            self._root_numbers[root] = number
        self._root_blocks[number] += blocks
        return number

    def known_root(self, root: bytes) -> int:
        """Its number, or -1."""
        return self._root_numbers.get(root, -1)

    def _leave_root(self, number: int, blocks: int = 1) -> None:
        self._root_blocks[number] -= blocks
        if not self._root_blocks[number]:
            del self._root_numbers[self.roots[number]]
            self._spare_roots.append(number)

    # --- rows ------------------------------------------------------------------------------------------------

    def add(self, identity: bytes, parent: int, root: bytes, length: int) -> int:
        """A new row, in the map, linked to its parent (an entry or NONE); in no order yet."""
        if self.unused != NONE:
            entry = self.unused
            self.unused = self.parent[entry]
        else:
            self.reserve_rows(1)
            entry = self.top
            self.top += 1
        self._identity[entry] = np.frombuffer(identity, np.uint8)
        self.parent[entry] = NONE
        self.root[entry] = self.root_number(root)
        self.length[entry] = length
        self.flags[entry] = LIVE
        self.live += 1
        self.map.put(identity, entry)
        if parent != NONE:
            self.link(entry, parent)
        return entry

    def identity(self, entry: int) -> bytes:
        """Its 32 bytes."""
        return bytes(self._identity[entry])

    def link(self, entry: int, parent: int) -> None:
        """Makes `parent` known to an entry that knows none."""
        self.parent[entry] = parent
        self.children[parent] += 1

    def detach(self, entry: int) -> None:
        """Takes the name away: out of the map, out of the tree (its children become orphans, which age out)."""
        self.map.remove(self.identity(entry))
        self.flags[entry] |= DETACHED
        parent = self.parent[entry]
        if parent != NONE:
            self.children[parent] -= 1
            self.parent[entry] = NONE
        if self.children[entry]:
            parents = self.columns["parent"]
            flags = self.columns["flags"]
            orphans = np.flatnonzero((parents[: self.top] == entry) & (flags[: self.top] & LIVE != 0))
            parents[orphans] = NONE
            self.children[entry] = 0

    def remove(self, entry: int) -> None:
        """Frees the row of a detached entry that is on no tier, unpinned and in no order."""
        self._leave_root(self.root[entry])
        self.flags[entry] = 0
        self.tick[entry] = 0
        self.parent[entry] = self.unused
        self.unused = entry
        self.live -= 1

    def remove_many(self, chosen: NDArray[np.intp]) -> None:
        """Takes names and rows of many unlinked, unpinned entries away; the orders must be rebuilt after it."""
        columns = self.columns
        numbers, counts = np.unique(columns["root"][chosen], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self._leave_root(number, count)
        columns["flags"][chosen] = 0
        columns["tick"][chosen] = 0
        columns["host"][chosen] = NONE
        columns["parent"][chosen[:-1]] = chosen[1:]
        columns["parent"][chosen[-1:]] = self.unused
        self.unused = int(chosen[0]) if len(chosen) else self.unused
        self.live -= len(chosen)
        named = np.flatnonzero(columns["flags"][: self.top] & (LIVE | DETACHED) == LIVE)
        self.map.clear()
        self.map.put_many(self._identity[named], named.astype(np.uint32))
