"""Going through the whole index: what lies where, by scope or by file, and the check that nothing disagrees."""

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from services.store.disk.block import footer_of
from services.store.disk.footer import SLOT_BITS
from services.store.disk.index import DiskIndex
from services.store.disk.index_record import ENTRY, Entry
from services.store.disk.segments import SegmentFiles
from services.store.scoping import covered
from shared.scope import EVERYTHING, Scope

_BATCH = 8192


def rows_in(index: DiskIndex, scope: Scope, names: Iterable[bytes] = ()) -> "np.ndarray[Any, Any]":
    """All entries of a scope (dtype ENTRY); of a line, those of `names`."""
    if scope.line:
        entries = [entry for entry in map(index.get, names) if entry is not None]
        return np.array(entries, ENTRY)
    found = [rows[covered(scope, rows["root"])] for rows in _batches(index)]
    return np.concatenate(found) if found else np.empty(0, ENTRY)


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
    for entry in map(Entry._make, rows_in(index, EVERYTHING).tolist()):
        if entry.slot in seen:
            raise AssertionError(f"slot {entry.slot} is in the index twice")
        seen.add(entry.slot)
        if files.footer(entry.slot) != footer_of(entry):
            raise AssertionError(f"slot {entry.slot} does not hold {entry.identity.hex()}")
    blocks, _ = files.used()
    if complete and blocks != len(seen):
        raise AssertionError(f"{blocks} slots are in use, {len(seen)} are in the index")
