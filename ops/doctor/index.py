"""The disk tier's index as a stranger sees it: rows that hold, rows that don't, and why it can't be read at all."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from services.store.disk.index import FORMAT
from services.store.disk.index_record import ENTRY, ROW_BYTES, checked_rows
from services.store.disk.lmdb_file import damage

ROOT = Path(__file__).resolve().parents[2]
TRIES = 4
"""A store that lives commits while we look: what seems damaged is looked at again."""


@dataclass
class IndexRows:
    """`entries`: dtype ENTRY, those whose CRC holds. `damaged`: rows whose CRC does not. `trouble`: why there are no
    rows although there is a file. `unfinished`: a kill came before it had a format. `rebuilding`: it does not know
    every slot yet, by its own note.
    """

    there: bool = False
    entries: "np.ndarray[Any, Any]" = field(default_factory=lambda: np.empty(0, ENTRY))
    damaged: int = 0
    trouble: str = ""
    other_format: str | None = None
    rebuilding: bool = False
    unfinished: bool = False


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
    dump, trouble = dumped(directory)
    return IndexRows(there=True, trouble=trouble) if trouble else _parsed(dump)


def dumped(directory: Path) -> tuple[bytes, str]:
    """(what index_dump says, "" or why it says nothing)."""
    run = subprocess.run(
        [sys.executable, "-m", "ops.doctor.index_dump", str(directory)], cwd=ROOT, capture_output=True, check=False
    )
    if run.returncode < 0:
        return b"", f"reading it killed the reader (signal {-run.returncode})"
    if run.returncode:
        said = run.stderr.decode(errors="replace").strip().splitlines()
        return b"", said[-1] if said else f"its reader ended with code {run.returncode}"
    return run.stdout, ""


def _parsed(dump: bytes) -> IndexRows:
    line, _, raw = dump.partition(b"\n")
    head = json.loads(line)
    found = IndexRows(there=True, damaged=head["damaged"], rebuilding=head["rebuilding"])
    if head["format"] is None and not found.damaged:
        found.unfinished = True
    elif head["format"] != FORMAT.decode():
        found.other_format = str(head["format"])
    elif len(raw) % ROW_BYTES:
        found.trouble = f"it gives rows of {len(raw):,} bytes in all, which is no multiple of {ROW_BYTES}"
    else:
        found.entries, damaged = checked_rows(raw)
        found.damaged += len(damaged)
    return found
