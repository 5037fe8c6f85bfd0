"""`python -m ops.doctor.index_dump DIRECTORY`: the index's records on stdout, read-only, beside a running store.

A process of its own: LMDB trusts its file, and a damaged one may kill whoever maps it. Read transactions are short,
because a long one would keep the store from reusing any page. Ends with code 3 and a line on stderr for an error of
LMDB's, a table that is missing among them.
"""

import struct
import sys
from functools import partial
from typing import Any, BinaryIO

import lmdb

HEAD = struct.Struct("<II")
"""Bytes of the key, bytes of the value; both follow."""

END = HEAD.pack(0xFFFFFFFF, 0)
BATCH = 4096


def dump(directory: str, out: BinaryIO) -> None:
    """First the table of small records, END, then the blocks, END."""
    environment: Any = lmdb.open(directory, readonly=True, max_dbs=4, readahead=False, create=False)
    for name in (b"meta", b"blocks"):
        table = _again(environment, partial(environment.open_db, name, create=False))
        after: tuple[bytes, bytes] | None = None
        more = True
        while more:
            rows, more = _again(environment, partial(_batch, environment, table, after))
            for key, value in rows:
                out.write(HEAD.pack(len(key), len(value)) + key + value)
                after = key, value
        out.write(END)


def _again(environment: Any, action: Any) -> Any:
    """The writer may have grown the map meanwhile."""
    try:
        return action()
    except lmdb.MapResizedError:
        environment.set_mapsize(0)
        return action()


def _batch(environment: Any, table: Any, after: tuple[bytes, bytes] | None) -> tuple[list[tuple[bytes, bytes]], bool]:
    """(rows behind `after`, whether there are more); a key may have several rows."""
    rows: list[tuple[bytes, bytes]] = []
    with environment.begin() as txn, txn.cursor(db=table) as cursor:
        there = cursor.first() if after is None else cursor.set_range(after[0])
        while there and after is not None and cursor.item() <= after:
            there = cursor.next()
        while there and len(rows) < BATCH:
            rows.append(cursor.item())
            there = cursor.next()
    return rows, bool(there)


def main() -> int:
    """0, or 3 with a reason."""
    try:
        dump(sys.argv[1], sys.stdout.buffer)
        sys.stdout.buffer.flush()
    except lmdb.Error as error:
        print(error, file=sys.stderr)
        return 3
    except BrokenPipeError:
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
