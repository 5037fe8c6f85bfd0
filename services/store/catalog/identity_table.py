"""identity -> entry: a packed open-addressing table (4 bytes a slot), and the dict it is checked against in tests.

Identities are keyed hashes, so their first eight bytes are the hash. Its upper bits are the home: names in ascending
order, as the disk's index tells them, stand in ascending places, and many are found or placed by walking through
memory instead of jumping about in it. Linear probing with backward-shift deletion: no tombstones, so a table that
lives for months does not decay. The identities themselves lie in the entries' own array, which the table only reads.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

NONE = 0xFFFFFFFF
Identities = NDArray[np.uint8]
"""[n, 32]"""

AT_ONCE = 8192
"""Identities compared in one go: the rows touched by it still lie in the core's own cache."""


def first_words(identities: Identities) -> NDArray[np.uint64]:
    """The first eight bytes of each as a number; numbers compare as the rows do."""
    return np.ascontiguousarray(identities[:, :8]).view(">u8")[:, 0].astype(np.uint64)


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

    def reserve(self, more: int) -> None:
        """Room for so many more at once, instead of by doubling."""

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

    def reserve(self, more: int) -> None:
        """A dict needs no telling."""

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
        self._shift = 65 - size.bit_length()

    def __len__(self) -> int:
        return self._count

    def _find(self, identity: bytes) -> int:
        """Position of the identity, or of the empty slot where it would stand."""
        slots, mask, rows = self._slots, self._mask, self._rows()
        position = int.from_bytes(identity[:8], "big") >> self._shift
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
        self.reserve(1)
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
            home = int.from_bytes(rows[entry, :8].tobytes(), "big") >> self._shift
            if (position - home) & mask >= (position - hole) & mask:
                slots[hole] = entry
                hole = position
        slots[hole] = NONE
        self._count -= 1

    def reserve(self, more: int) -> None:
        """Room for so many more at once, instead of by doubling."""
        if 3 * (self._count + more) <= 2 * len(self._table):
            return
        size = len(self._table)
        while 3 * (self._count + more) > 2 * size:
            size *= 2
        entries = self._table[self._table != NONE]
        self._allocate(size)
        self._place(self._homes(self._rows()[entries]), entries)

    def _homes(self, identities: Identities) -> NDArray[np.int64]:
        return (first_words(identities) >> np.uint64(self._shift)).astype(np.int64)

    def _place(self, positions: NDArray[np.int64], entries: NDArray[np.uint32]) -> None:
        """Linear probing for many at once: all that find their position empty write there, the last one stays."""
        table = self._table
        while len(entries):
            empty = table[positions] == NONE
            table[positions[empty]] = entries[empty]
            waiting = table[positions] != entries
            positions = (positions[waiting] + 1) & self._mask
            entries = entries[waiting]

    def put_many(self, identities: Identities, entries: NDArray[np.uint32]) -> None:
        """`put` of each row; all absent and distinct, the entries' rows hold them already."""
        self.reserve(len(entries))
        self._place(self._homes(identities), entries)
        self._count += len(entries)

    def get_many(self, identities: Identities) -> NDArray[np.uint32]:
        """`get` of each row."""
        if len(identities) <= AT_ONCE:
            return self._get_some(identities)
        found, words = np.empty(len(identities), np.uint32), first_words(identities)
        ascending = bool((words[1:] >= words[:-1]).all())
        order = None if ascending else np.argsort(words)
        for start in range(0, len(identities), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            those = part if order is None else order[part]
            found[those] = self._get_some(identities[those])
        return found

    def _get_some(self, identities: Identities) -> NDArray[np.uint32]:
        rows, wanted = self._rows().view("<u8").reshape(-1), np.ascontiguousarray(identities).view("<u8")
        found = np.full(len(identities), NONE, np.uint32)
        asked = np.arange(len(identities))
        positions = self._homes(identities)
        while len(asked):
            entries = self._table[positions]
            taken = np.flatnonzero(entries != NONE)
            asked, positions, entries = asked[taken], positions[taken], entries[taken].astype(np.int64)
            same = rows[4 * entries] == wanted[asked, 0]
            hit, at = asked[same], 4 * entries[same]
            for word in (1, 2, 3):  # of keyed hashes that agree so far, nearly all agree wholly
                equal = rows[at + word] == wanted[hit, word]
                if not equal.all():
                    same[np.flatnonzero(same)[~equal]] = False
                    hit, at = hit[equal], at[equal]
            found[hit] = at // 4
            asked, positions = asked[~same], (positions[~same] + 1) & self._mask
        return found
