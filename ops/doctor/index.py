"""The disk tier's index as a stranger sees it: rows that hold, rows that don't, and why it can't be read at all."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ops.doctor.index_dump import END, HEAD
from services.store.disk.index import FORMAT, REBUILDING
from services.store.disk.index_record import ENTRY, unpack_value, unsealed
from services.store.disk.lmdb_file import damage

ROOT = Path(__file__).resolve().parents[2]
TRIES = 4
"""A store that lives commits while we look: what seems damaged is looked at again."""


@dataclass
class IndexRows:
    """`entries`: dtype ENTRY, those whose CRC holds. `damaged`: rows whose CRC does not. `trouble`: why there are no
    rows although there is a file. `rebuilding`: it does not know every slot yet, by its own note.
    """

    there: bool = False
    entries: "np.ndarray[Any, Any]" = field(default_factory=lambda: np.empty(0, ENTRY))
    damaged: int = 0
    trouble: str = ""
    other_format: bytes | None = None
    rebuilding: bool = False


def read_index(directory: Path, *, live: bool = False) -> IndexRows:
    """All of it, in time linear in its rows. Never raises for what lies there."""
    found = _read_once(directory)
    tries = TRIES if live else 1
    while (found.trouble or found.damaged) and (tries := tries - 1):
        found = _read_once(directory)
    return found


def _read_once(directory: Path) -> IndexRows:
    data = directory / "data.mdb"
    if not data.exists():
        return IndexRows()
    try:
        reason = damage(data)
    except OSError as error:
        reason = f"it can't be read: {error.strerror}"
    if reason:
        return IndexRows(there=True, trouble=reason)
    run = subprocess.run(
        [sys.executable, "-m", "ops.doctor.index_dump", str(directory)], cwd=ROOT, capture_output=True, check=False
    )
    if run.returncode < 0:
        return IndexRows(there=True, trouble=f"reading it killed the reader (signal {-run.returncode})")
    if run.returncode:
        said = run.stderr.decode(errors="replace").strip().splitlines()
        return IndexRows(there=True, trouble=said[-1] if said else f"its reader ended with code {run.returncode}")
    return _parsed(run.stdout)


def _parsed(dump: bytes) -> IndexRows:
    found = IndexRows(there=True)
    at, meta = _records(dump, 0)
    _, blocks = _records(dump, at)
    for key, stored in meta:
        value = unsealed(key, stored)
        if value is None:
            found.damaged += 1
        elif key == REBUILDING:
            found.rebuilding = True
        elif key == b"format" and value != FORMAT:
            found.other_format = value
    rows = []
    for key, stored in blocks:
        identity, stored = (key + stored)[:32], (key + stored)[32:]  # however the table divides a row
        if unpack_value(identity, stored) is None:
            found.damaged += 1
        else:
            rows.append(identity + stored[:-4])
    found.entries = np.frombuffer(b"".join(rows), dtype=ENTRY)
    return found


def _records(dump: bytes, at: int) -> tuple[int, list[tuple[bytes, bytes]]]:
    """(where the table ends, its records)."""
    found = []
    while dump[at : at + HEAD.size] != END:
        key_bytes, value_bytes = HEAD.unpack_from(dump, at)
        key_at = at + HEAD.size
        value_at = key_at + key_bytes
        found.append((dump[key_at:value_at], dump[value_at : value_at + value_bytes]))
        at = value_at + value_bytes
    return at + HEAD.size, found
