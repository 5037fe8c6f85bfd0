"""The ledger: finished requests in SQLite, for people and reports. It follows the journal and never holds it up.

    journal.append(records) ─► ledger.observe(records)      event loop, no IO
                               ledger.flush(now)            a thread, each second or so: one transaction

Idempotent by request id: after a restart the whole journal is observed again. A busy, full or damaged ledger costs
rows that wait, never a request. `perdure ledger` reads it with `read_ledger`, which needs neither this class nor
sqlite-utils (286 ms to import: only `flush` does, in its own thread).
"""

import contextlib
import sqlite3
import threading
from collections import deque
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from services.scheduler.ledger_rows import TABLE, Row, Rows, read_ledger
from services.scheduler.records import AnyRecord
from shared.fileio import FileIO

_BATCH = 500
_BUSY_S = 1.0
"""How long one flush waits for another's lock; then the rows wait for the next flush."""

_MAX_WAITING = 200_000
"""Rows kept in memory while the ledger can't be written; more are counted as lost."""

_PRUNE_EACH_S = 60.0


class Ledger:
    """`observe` from the event loop; `flush` and `close` from one thread at a time."""

    def __init__(self, path: Path, *, keep_h: float, io: FileIO | None = None) -> None:
        self.path = path
        self._io = io or FileIO()
        self.keep_s = keep_h * 3600
        self.reason = ""
        """Why rows wait; "" when the last flush went well."""
        self.lost = 0
        self._rows = Rows()
        self._waiting: deque[Row] = deque()
        self._lock = threading.Lock()
        self._db: Any = None
        self._pruned_at = 0.0

    # --- event loop

    def observe(self, records: Iterable[AnyRecord]) -> None:
        """Records that are in the journal by now. No IO."""
        rows = self._rows.take(records)
        if not rows:
            return
        with self._lock:
            room = _MAX_WAITING - len(self._waiting)
            self._waiting += rows[:room]
            self.lost += len(rows[room:])

    @property
    def waiting(self) -> int:
        """Rows that are not in the file yet."""
        return len(self._waiting)

    # --- the ledger's thread

    def flush(self, now: float) -> bool:
        """Writes what waits, prunes what is older than kept. `now`: wall-clock seconds.

        False: nothing was lost, `reason` says why some of it still waits. Never raises for the ledger's troubles.
        """
        try:
            while self._waiting:
                self._write_batch(now)
            if self._db is not None and now - self._pruned_at >= _PRUNE_EACH_S:
                with self._db.conn:
                    self._db.conn.execute(f"delete from {TABLE} where finished_at < ?", (now - self.keep_s,))
                    self._io.mark("ledger prune")
                self._pruned_at = now
        except sqlite3.DatabaseError as error:
            self._trouble(error)
            return False
        except OSError as error:
            self.reason = f"ledger {self.path}: {error.strerror or error}"
            return False
        self.reason = ""
        return True

    def _write_batch(self, now: float) -> None:
        db = self._open()
        with self._lock:
            batch = list(islice(self._waiting, _BATCH))
        fresh = [row for row in batch if row["finished_at"] >= now - self.keep_s]
        if fresh:
            columns = ", ".join(fresh[0])
            marks = ", ".join(f":{name}" for name in fresh[0])
            news = ", ".join(f"{name} = excluded.{name}" for name in fresh[0] if name not in ("id", "text"))
            row = f"insert into {TABLE} ({columns}) values ({marks}) on conflict (id) do update set {news}"
            with db.conn:
                db.conn.executemany(row, fresh)
                self._io.mark("ledger rows")
            self._io.mark("ledger rows written")
        with self._lock:
            for _ in batch:
                self._waiting.popleft()

    def _open(self) -> Any:
        if self._db is None:
            from services.scheduler.ledger_schema import open_ledger

            self._db = open_ledger(self.path, busy_s=_BUSY_S, io=self._io)
        return self._db

    def _trouble(self, error: sqlite3.DatabaseError) -> None:
        self.reason = f"ledger {self.path}: {error}"
        if isinstance(error, sqlite3.OperationalError):
            return  # busy, full, read-only: as it is, it will do again
        self._drop()  # damaged: put it aside for people to look at, and begin another
        try:
            for suffix in ("-wal", "-shm"):  # first: they must never stand beside a file that is not theirs
                with contextlib.suppress(FileNotFoundError):
                    self._io.unlink(self.path.with_name(self.path.name + suffix))
            self._io.rename(self.path, self.path.with_name(self.path.name + ".damaged"))
        except OSError as failed:
            self.reason += f"; and it can't be moved aside: {failed.strerror}"

    def _drop(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.conn.close()

    def close(self, now: float) -> None:
        """Flushes what it can and closes; idempotent."""
        self.flush(now)
        self._drop()


__all__ = ["Ledger", "read_ledger"]
