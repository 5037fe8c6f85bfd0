"""identity -> entry: a packed open-addressing table (4 bytes a slot), and the dict it is checked against in tests.

Identities are keyed hashes, so their first eight bytes are the hash. Linear probing with backward-shift deletion:
no tombstones, so a table that lives for months does not decay. The identities themselves lie in the entries'
own array, which the table only reads.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

NONE = 0xFFFFFFFF
Identities = NDArray[np.uint8]
"""[n, 32]"""


class IdentityMap(Protocol):
    """What the catalogue needs; entries are u32, NONE stands for absence."""

    def get(self, identity: bytes) -> int:
        """The entry, or NONE."""

    def put(self, identity: bytes, entry: int) -> None:
        """Adds an identity that is absent."""

    def remove(self, identity: bytes) -> None:
        """Removes one that is present."""

    def get_many(self, identities: Identities) -> NDArray[np.uint32]:
        """`get` of each row."""

    def put_many(self, identities: Identities, entries: NDArray[np.uint32]) -> None:
        """`put` of each row; all absent and distinct."""

    def clear(self) -> None:
        """Empties the map."""

    def __len__(self) -> int: ...


class DictMap:
    """The definition: a dict."""

    def __init__(self, rows: Callable[[], Identities]) -> None:
        self._entries: dict[bytes, int] = {}

    def get(self, identity: bytes) -> int:
        """The entry, or NONE."""
        return self._entries.get(identity, NONE)

    def put(self, identity: bytes, entry: int) -> None:
        """Adds an identity that is absent."""
        assert identity not in self._entries
        self._entries[identity] = entry

    def remove(self, identity: bytes) -> None:
        """Removes one that is present."""
        del self._entries[identity]

    def get_many(self, identities: Identities) -> NDArray[np.uint32]:
        """`get` of each row."""
        return np.array([self.get(row.tobytes()) for row in identities], np.uint32)

    def put_many(self, identities: Identities, entries: NDArray[np.uint32]) -> None:
        """`put` of each row."""
        for row, entry in zip(identities, entries, strict=True):
            self.put(row.tobytes(), int(entry))

    def clear(self) -> None:
        """Empties the map."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


class PackedMap:
    """Open addressing, at most 2/3 full. `rows()` gives the entries' identity array, [capacity, 32]."""

    def __init__(self, rows: Callable[[], Identities]) -> None:
        self._rows = rows
        self.clear()

    def clear(self) -> None:
        """Empties the map."""
        self._allocate(256)
        self._count = 0

    def _allocate(self, size: int) -> None:
        self._table = np.full(size, NONE, np.uint32)
        self._slots: Any = memoryview(cast("Any", self._table))
        self._mask = size - 1

    def __len__(self) -> int:
        return self._count

    def _find(self, identity: bytes) -> int:
        """Position of the identity, or of the empty slot where it would stand."""
        slots, mask, rows = self._slots, self._mask, self._rows()
        position = int.from_bytes(identity[:8], "little") & mask
        while (entry := slots[position]) != NONE:
            if rows[entry].tobytes() == identity:
                return position
            position = (position + 1) & mask
        return position

    def get(self, identity: bytes) -> int:
        """The entry, or NONE."""
        return int(self._slots[self._find(identity)])

    def put(self, identity: bytes, entry: int) -> None:
        """Adds an identity that is absent; the entry's row holds it already."""
        self._make_room(1)
        position = self._find(identity)
        assert self._slots[position] == NONE, f"identity {identity.hex()} is in the table"
        self._slots[position] = entry
        self._count += 1

    def remove(self, identity: bytes) -> None:
        """Removes one that is present: the cluster behind it moves up, so that no probe ends too early."""
        slots, mask, rows = self._slots, self._mask, self._rows()
        hole = self._find(identity)
        assert slots[hole] != NONE, f"identity {identity.hex()} is not in the table"
        position = hole
        while True:
            position = (position + 1) & mask
            entry = slots[position]
            if entry == NONE:
                break
            home = int.from_bytes(rows[entry, :8].tobytes(), "little") & mask
            if (position - home) & mask >= (position - hole) & mask:
                slots[hole] = entry
                hole = position
        slots[hole] = NONE
        self._count -= 1

    def _make_room(self, more: int) -> None:
        if 3 * (self._count + more) <= 2 * len(self._table):
            return
        size = len(self._table)
        while 3 * (self._count + more) > 2 * size:
            size *= 2
        entries = self._table[self._table != NONE]
        self._allocate(size)
        self._place(self._homes(self._rows()[entries]), entries)

    def _homes(self, identities: Identities) -> NDArray[np.int64]:
        words = np.ascontiguousarray(identities[:, :8]).view("<u8")[:, 0]
        return (words & np.uint64(self._mask)).astype(np.int64)

    def _place(self, positions: NDArray[np.int64], entries: NDArray[np.uint32]) -> None:
        """Linear probing for many at once: those that find their position empty take it, one each; the rest go on."""
        while len(entries):
            empty = np.flatnonzero(self._table[positions] == NONE)
            _, first = np.unique(positions[empty], return_index=True)
            placed = empty[first]
            self._table[positions[placed]] = entries[placed]
            waiting = np.ones(len(entries), bool)
            waiting[placed] = False
            positions = (positions[waiting] + 1) & self._mask
            entries = entries[waiting]

    def put_many(self, identities: Identities, entries: NDArray[np.uint32]) -> None:
        """`put` of each row; all absent and distinct, the entries' rows hold them already."""
        self._make_room(len(entries))
        self._place(self._homes(identities), entries)
        self._count += len(entries)

    def get_many(self, identities: Identities) -> NDArray[np.uint32]:
        """`get` of each row."""
        rows, wanted = self._rows().view("<u8"), np.ascontiguousarray(identities).view("<u8")
        found = np.full(len(identities), NONE, np.uint32)
        asked = np.arange(len(identities))
        positions = self._homes(identities)
        while len(asked):
            entries = self._table[positions]
            taken = entries != NONE
            asked, positions, entries = asked[taken], positions[taken], entries[taken]
            same = rows[entries, 0] == wanted[asked, 0]
            same[same] = (rows[entries[same], 1:] == wanted[asked[same], 1:]).all(axis=1)
            found[asked[same]] = entries[same]
            asked, positions = asked[~same], (positions[~same] + 1) & self._mask
        return found
