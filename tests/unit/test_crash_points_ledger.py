"""The ledger after a kill anywhere between the journal and its rows: each finished request once, as it ended.

The steps of our own code are the seam's. Between them SQLite works: its files are looked at before every instruction
of its machine and copied whenever they have changed, and its log is cut where a kill could have ended its writing.
"""

import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.journal import Journal
from services.scheduler.ledger import Ledger, read_ledger
from services.scheduler.ledger_rows import Row, Rows
from services.scheduler.records import AnyRecord
from tests.durable_io import Died, DurableIO
from tests.journal_kit import accept, ended, flat, step

NOW = 2000.0
KEEP_H = 0.5
OLD = NOW - 3600 * KEEP_H - 1


def one(key: int, tokens: int, at: float = NOW) -> list[list[AnyRecord]]:
    return [[accept(key)], [step((key, 0, tokens))], [ended(key, tokens, at=at)]]


BATCHES = [
    *one(1, 3),
    *one(2, 5, at=OLD),  # too old to be kept
    *one(3, 4),
    [ended(3, 2, at=NOW + 1)],  # a stop string found late
    [accept(4), accept(5)],
    [step((4, 0, 2), (5, 0, 2))],
    [ended(5, 2)],
]
FLUSHED = {3, 6, 7, 12}
"""Numbers of batches after which the ledger's thread comes by."""


def live(home: Path, io: DurableIO) -> None:
    """A scheduler's life, as far as journal and ledger see it; and the next start of the same."""
    for batches in (BATCHES[:9], BATCHES[9:]):
        journal, ledger = Journal(home / "journal", io=io), Ledger(home / "ledger.db", keep_h=KEEP_H, io=io)
        try:
            ledger.observe(journal.recover().records)
            for number, batch in enumerate(batches, 1 if batches[0] is BATCHES[0] else 10):
                journal.append(batch)
                ledger.observe(batch)
                if number in FLUSHED:
                    assert ledger.flush(NOW)
            ledger.close(NOW + 61)
            journal.close()
        except Died:
            shutil.copytree(home, home.with_name(home.name + " dead"))  # before anything tidies up behind the kill
            raise
        finally:
            ledger._drop()


def wanted(records: Iterable[AnyRecord]) -> dict[str, Row]:
    """By id, what the ledger must hold of these."""
    rows = {row["id"]: row for row in Rows().take(records)}
    return {id: row for id, row in rows.items() if row["finished_at"] > OLD}


def plain(path: Path) -> dict[str, Row]:
    rows = read_ledger(path, limit=1000)
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def check(home: Path) -> None:
    """Nothing in the ledger that the journal does not say; and after the next start's first flush, all that it says."""
    journal = Journal(home / "journal")
    recovered = journal.recover()
    journal.close()
    said = [row for row in Rows().take(recovered.records)]
    found = plain(home / "ledger.db")
    assert all(row in said for row in found.values())
    ledger = Ledger(home / "ledger.db", keep_h=KEEP_H)
    ledger.observe(recovered.records)
    assert ledger.flush(NOW)
    ledger.close(NOW)
    assert plain(home / "ledger.db") == wanted(recovered.records)


def test_dying_at_every_step_between_journal_and_ledger(tmp_path: Path) -> None:
    counting = DurableIO()
    live(tmp_path / "count", counting)
    assert {"write", "ledger tables", "ledger rows", "ledger rows written", "ledger prune"} <= set(counting.steps)
    assert plain(tmp_path / "count" / "ledger.db") == wanted(flat(BATCHES))
    for at in range(1, len(counting.steps) + 1):
        for torn in (False, True):
            home = tmp_path / f"{at} {torn}"
            with pytest.raises(Died):
                live(home, DurableIO(die_at=at, torn=torn))
            check(home.with_name(home.name + " dead"))


@pytest.fixture
def snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Copies of the home `tmp_path/home`, made in the midst of what SQLite does."""
    made: list[Path] = []
    seen: list[list[bytes]] = [[]]
    real = sqlite3.connect

    def watched(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = real(*args, **options)

        def copy() -> int:
            files = [path.read_bytes() for path in sorted((tmp_path / "home").glob("ledger.db*"))]
            if files != seen[-1]:
                seen[:] = [files]
                made.append(tmp_path / f"at {len(made)}")
                shutil.copytree(tmp_path / "home", made[-1])
            return 0

        connection.set_progress_handler(copy, 1)
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", watched)
        yield made


def test_dying_in_the_midst_of_what_sqlite_does(tmp_path: Path, snapshots: list[Path]) -> None:
    live(tmp_path / "home", DurableIO())
    taken = list(snapshots)  # reading them opens more databases
    assert len(taken) > 8
    for home in taken:
        check(home)


def test_a_log_that_ends_anywhere_gives_whole_transactions(tmp_path: Path) -> None:
    home = tmp_path / "home"
    journal, ledger = Journal(home / "journal"), Ledger(home / "ledger.db", keep_h=KEEP_H)
    journal.recover()
    for number, batch in enumerate(BATCHES, 1):
        journal.append(batch)
        ledger.observe(batch)
        if number in FLUSHED:
            assert ledger.flush(NOW)
    whole = (home / "ledger.db-wal").read_bytes()
    assert len(whole) > 3 * 4096
    borders = [32 + frame * (4096 + 24) for frame in range(len(whole) // (4096 + 24) + 1)]
    for number, end in enumerate(sorted({0, *borders, *(border + 700 for border in borders[:-1])})):
        cut = tmp_path / f"cut {number}"
        shutil.copytree(home, cut)
        (cut / "ledger.db-wal").write_bytes(whole[:end])
        check(cut)
    ledger.close(NOW)
    journal.close()


def test_dying_at_every_step_of_putting_a_damaged_ledger_aside(tmp_path: Path) -> None:
    """The rows come again from the journal; what is left of the old file's log never gets into the new one."""

    def prepared(home: Path) -> None:
        live(home, DurableIO())
        (home / "ledger.db").write_bytes(b"this is no database, " * 400)
        (home / "ledger.db-wal").write_bytes(b"nor is this its log, " * 400)

    def put_aside(home: Path, io: DurableIO) -> None:
        journal, ledger = Journal(home / "journal"), Ledger(home / "ledger.db", keep_h=KEEP_H, io=io)
        try:
            ledger.observe(journal.recover().records)
            assert not ledger.flush(NOW)
            assert ledger.flush(NOW)
        finally:
            journal.close()
            ledger._drop()

    counting = DurableIO()
    prepared(tmp_path / "count")
    put_aside(tmp_path / "count", counting)
    assert {"unlink", "rename", "ledger rows"} <= set(counting.steps)
    for at in range(1, len(counting.steps) + 1):
        home = tmp_path / str(at)
        prepared(home)
        with pytest.raises(Died):
            put_aside(home, DurableIO(die_at=at))
        ledger = Ledger(home / "ledger.db", keep_h=KEEP_H)
        journal = Journal(home / "journal")
        ledger.observe(journal.recover().records)
        journal.close()
        ledger.flush(NOW)
        assert ledger.flush(NOW)
        ledger.close(NOW)
        assert plain(home / "ledger.db") == wanted(flat(BATCHES))
