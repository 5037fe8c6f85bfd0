"""The journal: frames that hold, requests without gaps, no segment that should be gone; cutting and rewriting it."""

import shutil
from pathlib import Path

from ops.doctor.journal_view import read_journal
from ops.doctor.patient import Patient
from ops.doctor.report import Finding, fault, note, ok, warning
from services.scheduler.journal import Journal
from services.scheduler.records import Accept, AnyRecord, Ended
from shared.fileio import FileIO


def check_journal(patient: Patient) -> list[Finding]:
    """Everything about the journal."""
    directory, view = patient.places.journal, patient.journal
    half_done = directory.with_name(directory.name + ".mended")
    if not view.there:
        if half_done.is_dir():
            text = f"{directory} is gone and {half_done} is there: a repair was cut short"
            return [fault("journal-aside", text, "its last step is done", lambda: _finish(half_done, directory))]
        return [ok("journal", "there is no journal yet")]
    if view.trouble:
        name = "journal-format" if view.other_format else "journal-loss"
        return [fault(name, view.trouble, "the scheduler won't start before that is put right")]
    found = []
    for loss in view.recovered.losses:
        text = f"journal {loss}"
        way = "requests go on from before the gap; --repair writes what is left anew and keeps the old files aside"
        found.append(fault("journal-loss", text, way, lambda: _rewrite(directory, view.records)))
    if view.recovered.torn_bytes and not patient.journal_lives:
        text = (
            f"the journal ends in an unfinished write of {view.recovered.torn_bytes:,} bytes, of which nothing was said"
        )
        found.append(note("journal-torn", text, "the next start cuts it off", lambda: _cut(directory)))
    if view.kept:
        text = f"segments whose requests are all over and past result_ttl_s: {view.kept} of {view.segments}"
        way = "the scheduler removes them" + ("" if patient.journal_lives else " at its next start")
        found.append((warning if patient.journal_lives else note)("journal-kept", text, way))
    aside = directory.with_name(directory.name + ".damaged")
    if aside.exists():
        found.append(note("journal-aside", f"{aside} is a journal that was moved aside", "remove it when you like"))
    if not found:
        accepted = {record.key for record in view.records if isinstance(record, Accept)}
        ended = {record.key for record in view.records if isinstance(record, Ended)}
        over = len(accepted & ended)
        text = f"requests: {len(accepted):,}, of them over: {over:,}, gapless; segments: {view.segments}"
        found = [ok("journal", text)]
    return found


def _cut(directory: Path) -> str:
    """As the scheduler does when it starts."""
    journal = Journal(directory)
    torn = journal.recover().torn_bytes
    journal.close()
    return f"cut {torn:,} torn bytes off the journal"


def _rewrite(directory: Path, records: list[AnyRecord]) -> str:
    """A new journal of what is left, durable before it takes the old one's place."""
    mended = directory.with_name(directory.name + ".mended")
    aside = directory.with_name(directory.name + ".damaged")
    if not directory.exists() or not read_journal(directory, now=0.0, retained_s=0.0, live=False).recovered.losses:
        return "the journal is whole again"  # another of its losses came first
    shutil.rmtree(mended, ignore_errors=True)
    journal = Journal(mended)
    journal.recover()
    for record in records:
        journal.append([record])
    journal.close()
    shutil.rmtree(aside, ignore_errors=True)
    directory.rename(aside)
    return f"{_finish(mended, directory)}; the damaged one is kept as {aside}"


def _finish(mended: Path, directory: Path) -> str:
    mended.rename(directory)
    FileIO().sync_dir(directory.parent)
    return f"wrote the journal {directory} anew from what holds"
