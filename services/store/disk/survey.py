"""Going through the whole index: what lies where, by root or by file, and the check that nothing disagrees."""

from collections.abc import Collection
from typing import Any

import numpy as np

from services.store.disk.block import footer_of
from services.store.disk.footer import SLOT_BITS
from services.store.disk.index import DiskIndex
from services.store.disk.index_record import ENTRY, Entry
from services.store.disk.segments import SegmentFiles

_BATCH = 8192


def rows_of_root(index: DiskIndex, root: bytes | None) -> "np.ndarray[Any, Any]":
    """All entries of a root, or all (dtype ENTRY)."""
    found = [rows if root is None else rows[_of_root(rows, root)] for rows in _batches(index)]
    return np.concatenate(found) if found else np.empty(0, ENTRY)


def _of_root(rows: "np.ndarray[Any, Any]", root: bytes) -> "np.ndarray[Any, Any]":
    return np.asarray(rows["root"] == np.frombuffer(root, dtype="V32")[0])


def identities_in(index: DiskIndex, segments: Collection[int]) -> list[bytes]:
    """Of the blocks that lie in these segments."""
    found: list[bytes] = []
    for rows in _batches(index):
        found += rows["identity"][np.isin(rows["slot"] >> SLOT_BITS, list(segments))].tolist()
    return found


def _batches(index: DiskIndex) -> "list[np.ndarray[Any, Any]]":
    batches = []
    last: bytes | None = None
    while True:
        rows = index.scan(last, _BATCH)
        batches.append(rows.entries)
        last = rows.last
        if last is None:
            return batches


def check(index: DiskIndex, files: SegmentFiles, *, complete: bool) -> None:
    """AssertionError with the numbers when index, accounting and footers disagree. Reads every footer.

    `complete`: the index names all slots in use, as it does once recovery has ended.
    """
    files.check_integrity()
    seen: set[int] = set()
    for entry in map(Entry._make, rows_of_root(index, None).tolist()):
        if entry.slot in seen:
            raise AssertionError(f"slot {entry.slot} is in the index twice")
        seen.add(entry.slot)
        if files.footer(entry.slot) != footer_of(entry):
            raise AssertionError(f"slot {entry.slot} does not hold {entry.identity.hex()}")
    blocks, _ = files.used()
    if complete and blocks != len(seen):
        raise AssertionError(f"{blocks} slots are in use, {len(seen)} are in the index")
