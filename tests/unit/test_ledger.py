"""The ledger: one row a finished request, whatever readers, writers and the disk do meanwhile."""

import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from services.scheduler.ledger import Ledger, read_ledger
from tests.journal_kit import accept, ended, step

NOW = 2000.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def finished(ledger: Ledger, keys: range, at: float = NOW) -> None:
    for key in keys:
        ledger.observe([accept(key), step((key, 0, 1))])
        ledger.observe([ended(key, 1, at=at + key / 1000)])


def test_a_finished_request_is_a_row(path: Path) -> None:
    ledger = Ledger(path, keep_h=1)
    ledger.observe([accept(1)])
    assert ledger.waiting == 0
    ledger.observe([ended(1, 7, at=NOW, error=("internal", "it broke"))])
    assert ledger.flush(NOW)
    ledger.close(NOW)
    (row,) = read_ledger(path)
    assert row == {
        "id": f"{1:032x}",
        "principal": "local",
        "accepted_at": 1001.0,
        "finished_at": NOW,
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "cached_tokens": 3,
        "cached_device": 1,
        "cached_host": 2,
        "cached_disk": 0,
        "finish_reason": "error",
        "error_code": "internal",
        "error": "it broke",
        "queued_s": 0.1,
        "ttft_s": 0.2,
        "total_s": 0.3,
    }
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_stop_string_found_after_the_last_token_corrects_the_row(path: Path) -> None:
    ledger = Ledger(path, keep_h=1)
    ledger.observe([accept(1), ended(1, 9, at=NOW)])
    assert ledger.flush(NOW)
    ledger.observe([ended(1, 7, at=NOW + 1)])
    ledger.close(NOW + 1)
    (row,) = read_ledger(path)
    assert (row["completion_tokens"], row["finished_at"]) == (7, NOW + 1)


def test_the_same_journal_observed_twice_gives_each_row_once(path: Path) -> None:
    for _ in range(2):
        ledger = Ledger(path, keep_h=1)
        finished(ledger, range(700))
        assert ledger.flush(NOW)
        ledger.close(NOW)
    assert len(read_ledger(path, limit=10_000)) == 700


def test_newest_first_and_filtered(path: Path) -> None:
    ledger = Ledger(path, keep_h=1)
    finished(ledger, range(10))
    ledger.close(NOW)
    ids = [row["id"] for row in read_ledger(path, limit=3)]
    assert ids == [f"{key:032x}" for key in (9, 8, 7)]
    assert len(read_ledger(path, since=NOW + 0.0075)) == 2
    assert read_ledger(path, principal="somebody else") == []


def test_old_rows_are_pruned_and_not_written_again(path: Path) -> None:
    ledger = Ledger(path, keep_h=1)
    finished(ledger, range(5))
    assert ledger.flush(NOW)
    later = NOW + 3601
    finished(ledger, range(5, 8), at=later)
    finished(ledger, range(8, 9))  # a journal replayed
    assert ledger.flush(later)
    ledger.close(later)
    assert len(read_ledger(path)) == 3


def test_there_is_no_ledger_before_the_first_row_and_reading_makes_none(path: Path) -> None:
    assert read_ledger(path) == []
    assert not path.exists()
    ledger = Ledger(path, keep_h=1)
    assert ledger.flush(NOW)
    ledger.close(NOW)
    assert not path.exists()


def test_p31_readers_in_a_loop_cost_no_row(path: Path) -> None:
    ledger = Ledger(path, keep_h=1)
    stop = threading.Event()
    failures: list[BaseException] = []

    def reading() -> None:
        while not stop.is_set():
            try:
                read_ledger(path, limit=1000)
            except BaseException as error:
                failures.append(error)
                return

    readers = [threading.Thread(target=reading) for _ in range(4)]
    for reader in readers:
        reader.start()
    for key in range(200):
        finished(ledger, range(key, key + 1))
        assert ledger.flush(NOW)
    stop.set()
    for reader in readers:
        reader.join()
    ledger.close(NOW)
    assert not failures
    assert len(read_ledger(path, limit=1000)) == 200


def test_p31_rows_wait_while_another_holds_an_exclusive_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.ledger._BUSY_S", 0.05)
    ledger = Ledger(path, keep_h=1)
    finished(ledger, range(1))
    assert ledger.flush(NOW)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        finished(ledger, range(1, 200))
        assert not ledger.flush(NOW)
        assert "locked" in ledger.reason
        assert ledger.waiting == 199
        other.execute("rollback")
    assert ledger.flush(NOW)
    assert ledger.reason == ""
    ledger.close(NOW)
    assert len(read_ledger(path, limit=1000)) == 200


def test_a_first_open_under_a_lock_waits_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.ledger._BUSY_S", 0.05)
    ledger = Ledger(path, keep_h=1)
    finished(ledger, range(3))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        assert not ledger.flush(NOW)
        other.execute("rollback")
    assert ledger.flush(NOW)
    ledger.close(NOW)
    assert len(read_ledger(path)) == 3


def test_a_damaged_ledger_is_put_aside_and_begun_anew(path: Path) -> None:
    path.write_bytes(b"this is no database, " * 400)
    with pytest.raises(OSError, match="can't be read"):
        read_ledger(path)
    ledger = Ledger(path, keep_h=1)
    finished(ledger, range(3))
    assert not ledger.flush(NOW)
    assert "not a database" in ledger.reason
    assert ledger.flush(NOW)
    ledger.close(NOW)
    assert len(read_ledger(path)) == 3
    assert path.with_name("ledger.db.damaged").exists()


def test_a_ledger_that_cannot_be_written_costs_no_request_and_no_row(path: Path) -> None:
    path.mkdir()
    ledger = Ledger(path, keep_h=1)
    finished(ledger, range(3))
    assert not ledger.flush(NOW)
    assert str(path) in ledger.reason
    path.rmdir()
    assert ledger.flush(NOW)
    ledger.close(NOW)
    assert len(read_ledger(path)) == 3


def test_rows_survive_kill_9_of_their_writer(path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from services.scheduler.ledger import Ledger
from tests.journal_kit import accept, ended
ledger = Ledger(Path({str(path)!r}), keep_h=1)
for key in range(50):
    ledger.observe([accept(key), ended(key, 1, at={NOW})])
assert ledger.flush({NOW})
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert done.returncode == -9
    assert len(read_ledger(path, limit=100)) == 50


def test_sqlite_utils_is_imported_by_flush_alone() -> None:
    program = "import sys, services.scheduler.ledger; assert 'sqlite_utils' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
