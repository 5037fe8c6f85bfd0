"""The wall clock against what was written by it: a clock that went back makes deadlines and retention last longer."""

import sqlite3
from contextlib import closing

from ops.doctor.patient import Patient
from ops.doctor.report import Finding, note, ok, warning
from services.scheduler.ledger_rows import TABLE

TOLERANCE_S = 5.0


def check_clock(patient: Patient) -> list[Finding]:
    """Newest time of journal and ledger against now; steps back inside the journal."""
    found = []
    times = [record.at for record in patient.journal.records]
    for what, newest in (("the journal", max(times, default=0.0)), ("the ledger", _newest_row(patient))):
        ahead = newest - patient.now
        if ahead > TOLERANCE_S:
            text = f"the clock says {patient.now:,.0f}, {what}'s newest record says {newest:,.0f}: {ahead:,.0f} s later"
            way = "set the clock; until then deadlines and result_ttl_s of those requests last that much longer"
            found.append(warning("clock-behind", text, way))
    latest = 0.0
    steps = []
    for at in times:
        if at < latest - TOLERANCE_S:
            steps.append(latest - at)
        latest = max(at, latest) if at >= latest - TOLERANCE_S else at
    if steps:
        text = (
            f"times that the clock went back while the journal was written: {len(steps)}, by up to {max(steps):,.0f} s"
        )
        found.append(note("clock-jump", text, "a time service that slews the clock avoids it"))
    return found or [ok("clock", "no record is from the future")]


def _newest_row(patient: Patient) -> float:
    path = patient.places.ledger
    if not path.exists():
        return 0.0
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)) as db:
            return float(db.execute(f"select max(finished_at) from {TABLE}").fetchone()[0] or 0.0)
    except sqlite3.Error:  # `ledger` says so
        return 0.0
