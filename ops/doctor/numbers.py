"""The store's few numbers: how often it started, from which generations grow, and a clear that was begun.

Generations tell the newer of two copies of a block, and a stale commit. They carry the count of starts in their upper
half; a count that has fallen behind them would let an old copy pass for a new one.
"""

from collections.abc import Mapping
from functools import partial

from ops.doctor import mend_disk as mend
from ops.doctor.patient import Patient
from ops.doctor.report import Finding, fault, note, warning
from services.store.clearing import NOTE as CLEARING
from services.store.disk.meta_file import MetaFile
from shared.fileio import FileIO

STARTS = "starts"


def check_numbers(patient: Patient) -> list[Finding]:
    """Nothing to say where all is well: `disk` and `arena` say so."""
    path = patient.places.store / "meta"
    try:
        records = MetaFile(path, FileIO())
    except OSError as error:
        return [warning("disk-meta", f"{path} can't be read: {error.strerror}", "make it readable")]
    if records.damaged:
        text = f"{path} is damaged: the clear epoch and the count of starts come from the arena alone"
        return [fault("disk-meta", text, "it is moved aside and written anew", mend.rename(path))]
    found = []
    if records.values.get(CLEARING) and not patient.store_lives:
        found.append(note("clear-pending", "a clear was begun and not ended", "the next start ends it first"))
    newest, counted = _newest(patient), max(_number(records.values, STARTS), patient.arena.starts)
    if newest > counted:
        text = f"blocks carry generations of start {newest}, the store counts {counted}: old copies may pass for new"
        found.append(fault("generation-behind", text, "the count is raised", partial(_raise, records, newest)))
    return found


def _newest(patient: Patient) -> int:
    """The start of the newest block on either tier."""
    entries, records = patient.index.entries, patient.arena.records
    newest = max(int(entries["generation"].max(initial=0)), int(records["generation"].max(initial=0)))
    return newest >> 32


def _number(values: Mapping[str, bytes], name: str) -> int:
    return int.from_bytes(values.get(name, b"")[:8], "little")


def _raise(records: MetaFile, starts: int) -> str:
    records.put({STARTS: starts.to_bytes(8, "little")})
    return f"raised the count of starts to {starts}"
