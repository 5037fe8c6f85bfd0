"""`python -m ops.doctor.index_dump DIRECTORY`: the index on stdout, read-only, beside a running store.

A process of its own: LMDB trusts its file, and a damaged one may kill whoever maps it. Read transactions are short,
because a long one would keep the store from reusing any page. Ends with code 3 and a line on stderr for an error of
LMDB's, a table that is missing among them.
"""

import json
import sys
from functools import partial
from typing import Any, BinaryIO, TypeVar

import lmdb

from services.store.disk import row_table
from services.store.disk.index import FORMAT, REBUILDING
from services.store.disk.index_record import unsealed

T = TypeVar("T")
BATCH = 4096


def dump(directory: str, out: BinaryIO) -> None:
    """A line of JSON: `format` (text, null for none), `rebuilding`, `damaged` (small records whose CRC fails); then,
    if the format is ours, the rows, ROW_BYTES each.
    """
    environment: Any = lmdb.open(directory, readonly=True, max_dbs=4, readahead=False, create=False)
    with environment:
        try:
            table = _again(environment, partial(environment.open_db, b"meta", create=False))
            stored = _again(environment, partial(_small_records, environment, table))
        except lmdb.NotFoundError:  # a kill in the first start may come before it is made
            stored = {}
        meta = {name: unsealed(name, value) for name, value in stored.items()}
        form = meta.get(b"format")
        head = {
            "format": None if form is None else form.decode(errors="replace"),
            "rebuilding": meta.get(REBUILDING) is not None,
            "damaged": sum(1 for value in meta.values() if value is None),
        }
        out.write(json.dumps(head).encode() + b"\n")
        if form != FORMAT:
            return
        table = _again(environment, partial(environment.open_db, b"blocks", create=False, **row_table.KIND))
        first = 0
        while first < row_table.KEYS:
            rows, first = _again(environment, partial(_rows, environment, table, first))
            out.write(rows)


def _again(environment: Any, action: "partial[T]") -> T:
    """The writer may have grown the map meanwhile."""
    try:
        return action()
    except lmdb.MapResizedError:
        environment.set_mapsize(0)
        return action()


def _small_records(environment: Any, table: Any) -> dict[bytes, bytes]:
    with environment.begin() as txn, txn.cursor(db=table) as cursor:
        return dict(cursor)


def _rows(environment: Any, table: Any, first: int) -> tuple[bytes, int]:
    with environment.begin() as txn, txn.cursor(db=table) as cursor:
        return row_table.read(cursor, first, BATCH)


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
