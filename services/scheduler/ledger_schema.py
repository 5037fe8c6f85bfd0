"""The ledger's tables, as sqlite-utils migrations. Imported only by the thread that owns the ledger."""

import os
import sqlite3
from pathlib import Path
from typing import Any

from sqlite_utils import Database, Migrations

from services.scheduler.ledger_rows import TABLE
from shared.fileio import FileIO

migrations = Migrations("perdure-ledger")


@migrations()
def requests(db: Any) -> None:
    """One row a finished request."""
    db[TABLE].create(
        {
            "id": str,
            "principal": str,
            "accepted_at": float,
            "finished_at": float,
            "prompt_tokens": int,
            "completion_tokens": int,
            "cached_tokens": int,
            "cached_device": int,
            "cached_host": int,
            "cached_disk": int,
            "finish_reason": str,
            "error_code": str,
            "error": str,
            "queued_s": float,
            "ttft_s": float,
            "total_s": float,
        },
        pk="id",
    )
    db[TABLE].create_index(["finished_at"])


def open_ledger(path: Path, *, busy_s: float, io: FileIO) -> Any:
    """The database, 0600, in WAL mode with `synchronous=NORMAL`: a row survives kill -9 of its writer.

    sqlite3.DatabaseError when the file is damaged or taken; OSError of the kernel.
    """
    io.close(io.open(path, os.O_RDWR | os.O_CREAT))
    conn = sqlite3.connect(path, timeout=busy_s, check_same_thread=False)
    try:
        conn.execute("pragma journal_mode = wal")
        conn.execute("pragma synchronous = normal")
        io.mark("ledger tables")
        db = Database(conn)
        migrations.apply(db)
    except BaseException:
        conn.close()
        raise
    return db
