"""The journal as the scheduler's own recovery reads it, on a mirror of links and with IO that changes nothing."""

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.scheduler.journal import Journal, JournalError, JournalFormat, Recovered
from services.scheduler.journal_segment import segment_numbers, segment_path
from services.scheduler.records import AnyRecord, Ended
from shared.fileio import FileIO
from shared.paths import PlaceError

MARGIN_S = 60.0
"""How long after its time a segment may still lie there: retention is looked at now and then."""
TRIES = 4


class _LookOnly(FileIO):
    """Reads; whatever would change a file goes nowhere."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Of a file that would be written, /dev/null."""
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return os.open(os.devnull if writes else path, (os.O_RDWR if writes else flags) | os.O_CLOEXEC)

    def pwritev(self, fd: int, parts: Sequence[Any], offset: int) -> int:
        """Taken, and gone."""
        return sum(memoryview(part).nbytes for part in parts)

    def fdatasync(self, fd: int) -> None:
        """Nothing to do."""

    def truncate(self, fd: int, size: int) -> None:
        """Nothing to do."""

    def punch(self, fd: int, offset: int, length: int) -> None:
        """Nothing to do."""

    def unlink(self, path: Path) -> None:
        """Nothing to do."""

    def rename(self, old: Path, new: Path) -> None:
        """Nothing to do."""

    def sync_dir(self, path: Path) -> None:
        """Nothing to do."""


@dataclass
class JournalView:
    """`trouble`: why nothing can be said. `kept`: segments in which nothing lives any more."""

    there: bool = False
    trouble: str = ""
    other_format: bool = False
    segments: int = 0
    kept: int = 0
    recovered: Recovered = field(default_factory=lambda: Recovered([]))

    @property
    def records(self) -> list[AnyRecord]:
        """What it says, gapless per request."""
        return self.recovered.records


def read_journal(directory: Path, *, now: float, retained_s: float, live: bool) -> JournalView:
    """As a scheduler that starts now would read it. Never raises for what lies there."""
    if not directory.is_dir():
        return JournalView()
    view = JournalView()
    for _ in range(TRIES if live else 1):  # a scheduler that lives removes segments, and begins new ones
        view = _read_once(directory, now=now, retained_s=retained_s)
        if not view.trouble and not view.recovered.losses:
            break
    return view


def _read_once(directory: Path, *, now: float, retained_s: float) -> JournalView:
    view = JournalView(there=True)
    with tempfile.TemporaryDirectory(prefix="perdure-doctor-") as mirror:
        try:
            numbers = segment_numbers(directory)
            for number in numbers:
                segment_path(Path(mirror), number).symlink_to(segment_path(directory, number).absolute())
            journal = Journal(Path(mirror), io=_LookOnly())
            try:
                view.recovered = journal.recover()
                before = journal.statistics()["segments"]
                _forget_old(journal, view.records, now - retained_s - MARGIN_S)
                view.segments, view.kept = len(numbers), before - journal.statistics()["segments"]
            finally:
                with suppress(JournalError):
                    journal.close()
        except JournalFormat as error:
            view.trouble, view.other_format = error.reason.replace(mirror, str(directory)), True
        except JournalError as error:
            view.trouble = error.reason.replace(mirror, str(directory))
        except (OSError, PlaceError) as error:
            view.trouble = str(error)
    return view


def _forget_old(journal: Journal, records: list[AnyRecord], before: float) -> None:
    for record in records:
        if isinstance(record, Ended) and record.at < before:
            journal.forget(record.key)
