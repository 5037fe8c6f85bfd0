"""The ledger against the journal: it follows behind, so rows may wait, but none may contradict it."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from ops.doctor.patient import Patient
from ops.doctor.report import Finding, fault, note, ok, warning
from services.scheduler.ledger import Ledger
from services.scheduler.ledger_rows import TABLE, Row, Rows

BUSY_S = 5.0
AS_JOURNALED = ("prompt_tokens", "completion_tokens", "cached_tokens", "finish_reason")


def check_ledger(patient: Patient) -> list[Finding]:
    """Everything about the ledger."""
    path = patient.places.ledger
    expected = _expected(patient)
    if not path.exists():
        if not expected:
            return [ok("ledger", "there is no ledger yet")]
        text = f"there is no ledger; finished requests in the journal: {len(expected):,}"
        return [note("ledger-behind", text, "the scheduler fills it at its next start", _fill(patient))]
    found: list[Finding] = []
    aside = path.with_name(path.name + ".damaged")
    if aside.exists():
        found.append(note("ledger-damaged", f"{aside} is a ledger that was moved aside", "remove it when you like"))
    try:
        rows, mode, verdict = _read(path, quick=patient.quick)
    except sqlite3.OperationalError as error:
        return [*found, warning("ledger-damaged", f"ledger {path} can't be read now: {error}", "try again")]
    except sqlite3.DatabaseError as error:
        return [*found, _damaged(patient, str(error))]
    if verdict != "ok":
        return [*found, _damaged(patient, verdict)]
    if mode != "wal":
        text = f"the ledger's journal mode is {mode}, not wal: readers hold up its writer"
        found.append(warning("ledger-mode", text, "the scheduler sets it at its next start"))
    found += _compared(patient, expected, rows)
    if not found:
        found = [ok("ledger", f"rows: {len(rows):,}; finished requests in the journal: {len(expected):,}, all there")]
    return found


def _expected(patient: Patient) -> dict[str, Row]:
    """Rows that the journal's finished requests have, of those that the ledger still keeps."""
    oldest = patient.now - patient.config.ledger.keep_h * 3600
    rows = Rows().take(patient.journal.records)
    return {row["id"]: row for row in rows if row["finished_at"] >= oldest}


def _read(path: Path, *, quick: bool) -> tuple[dict[str, Row], str, str]:
    """(rows by id, journal mode, SQLite's own verdict)."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as db:
        db.row_factory = sqlite3.Row
        mode = str(db.execute("pragma journal_mode").fetchone()[0])
        verdict = str(db.execute("pragma quick_check" if quick else "pragma integrity_check").fetchone()[0])
        if verdict != "ok" or not db.execute("select 1 from sqlite_master where name = ?", (TABLE,)).fetchone():
            return {}, mode, verdict
        columns = ", ".join(("id", *AS_JOURNALED))
        return {row["id"]: dict(row) for row in db.execute(f"select {columns} from {TABLE}")}, mode, verdict


def _compared(patient: Patient, expected: dict[str, Row], rows: dict[str, Row]) -> list[Finding]:
    found = []
    missing = expected.keys() - rows.keys()
    if missing:
        text = f"finished requests that are not in the ledger yet: {len(missing):,} of {len(expected):,} in the journal"
        found.append(note("ledger-behind", text, "it follows within seconds, or at the next start", _fill(patient)))
    differ = [
        name
        for name in expected.keys() & rows.keys()
        if any(expected[name][column] != rows[name][column] for column in AS_JOURNALED)
    ]
    if differ:
        text = f"rows of the ledger that contradict the journal: {len(differ):,} (the first is {differ[0][:12]})"
        make = note if not patient.journal_lives else warning
        found.append(make("ledger-differs", text, "the next start writes them anew", _fill(patient)))
    return found


def _damaged(patient: Patient, reason: str) -> Finding:
    path = patient.places.ledger
    way = "it is moved aside; rows of requests that the journal still holds are written anew"

    def mend() -> str:
        path.replace(path.with_name(path.name + ".damaged"))
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        return f"moved the damaged ledger aside; {_fill(patient)()}"

    return fault("ledger-damaged", f"ledger {path} is damaged: {reason}", way, mend)


def _fill(patient: Patient) -> Callable[[], str]:
    def mend() -> str:
        ledger = Ledger(patient.places.ledger, keep_h=patient.config.ledger.keep_h)
        ledger.observe(patient.journal.records)
        written = ledger.waiting
        ledger.close(patient.now)
        if ledger.reason:
            raise OSError(ledger.reason)
        return f"wrote {written:,} rows of the ledger from the journal"

    return mend
