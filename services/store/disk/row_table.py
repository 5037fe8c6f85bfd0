"""The table of rows in LMDB: sorted duplicates, all of one size, of 256 keys.

A row's first byte is its key, the rest is the value. LMDB packs such values without a header each and gives whole
pages of them in one call: a million rows are read in a tenth of a second, where a cursor step a row takes half of one.
All functions take a cursor of a transaction that the caller owns; errors are LMDB's own.
"""

from typing import Any

from services.store.disk.index_record import ROW_BYTES

KEYS = 256
KIND: dict[str, Any] = {"dupsort": True, "dupfixed": True}
"""How the table is opened."""


def find(cursor: Any, identity: bytes) -> bytes | None:
    """The row behind its identity, at which the cursor then stands; None when there is none."""
    if cursor.set_range_dup(identity[:1], identity[1:]):
        value: bytes = cursor.value()
        if value.startswith(identity[1:]):
            return value[31:]
    return None


def pop(cursor: Any, identity: bytes) -> bytes | None:
    """`find`, and the row goes."""
    stored = find(cursor, identity)
    if stored is not None:
        cursor.delete()
    return stored


def put(cursor: Any, identity: bytes, stored: bytes) -> bytes | None:
    """Sets a row; what stood behind its identity before."""
    old = pop(cursor, identity)
    cursor.put(identity[:1], identity[1:] + stored)
    return old


def read(cursor: Any, first: int, limit: int) -> tuple[bytes, int]:
    """(rows of whole keys from `first` on, at least `limit` rows while there are any; the key after them)."""
    parts: list[Any] = []
    left = limit * ROW_BYTES
    while left > 0 and first < KEYS:
        rows = cursor.getmulti((bytes((first,)),), dupdata=True, dupfixed_bytes=ROW_BYTES - 1, keyfixed=True)
        parts.append(rows)
        left -= len(rows)
        first += 1
    return b"".join(parts), first
