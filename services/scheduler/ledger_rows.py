"""A finished request as one row of the ledger, made from what the journal says of it; reading without a writer."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from services.scheduler.records import Accept, AnyRecord, Ended

TABLE = "requests"
KEPT = 256
"""Ended requests that a second `Ended` still corrects (a stop string found after the last token ended it)."""
Row = dict[str, Any]
"""A row by column: `id principal finished_at accepted_at prompt_tokens completion_tokens cached_tokens cached_device
cached_host cached_disk finish_reason error_code error queued_s ttft_s total_s`; times are wall-clock seconds."""


def row_of(accept: Accept, ended: Ended) -> Row:
    """The row of one request."""
    finish, usage, timing = ended.finish, ended.finish.usage, ended.finish.timing
    code, reason = finish.error or (None, None)
    tiers = {f"cached_{tier}": usage.cached_by_tier.get(tier, 0) for tier in ("device", "host", "disk")}
    return {
        "id": accept.id,
        "principal": accept.principal,
        "accepted_at": accept.at,
        "finished_at": ended.at,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        **tiers,
        "finish_reason": finish.reason,
        "error_code": code,
        "error": reason,
        "queued_s": timing.queued_s,
        "ttft_s": timing.ttft_s,
        "total_s": timing.total_s,
    }


class Rows:
    """Pairs Accept and Ended of each request. Give it every record that is journaled, or was recovered."""

    def __init__(self) -> None:
        self._open: dict[int, Accept] = {}
        self._ended: dict[int, Accept] = {}  # the last KEPT: a late stop string ends a request once more

    def take(self, records: Iterable[AnyRecord]) -> list[Row]:
        """The rows that these records complete."""
        rows = []
        for record in records:
            if isinstance(record, Accept):
                self._open[record.key] = record
            elif isinstance(record, Ended):
                accept = self._open.pop(record.key, None) or self._ended.pop(record.key, None)
                if accept is not None:
                    rows.append(row_of(accept, record))
                    self._ended[record.key] = accept
                    if len(self._ended) > KEPT:
                        del self._ended[next(iter(self._ended))]
        return rows


def read_ledger(path: Path, *, limit: int = 100, principal: str | None = None, since: float = 0.0) -> list[Row]:
    """Newest first; empty when there is no ledger yet. Reads beside a writer, and never creates or changes a file.

    OSError when the file is there and can't be read as a ledger.
    """
    if not path.exists():
        return []
    where = "finished_at >= :since" + ("" if principal is None else " and principal = :principal")
    query = f"select * from {TABLE} where {where} order by finished_at desc, rowid desc limit :limit"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as db:
            db.row_factory = sqlite3.Row
            there = db.execute("select 1 from sqlite_master where name = ?", (TABLE,)).fetchone()
            if there is None:
                return []
            found = db.execute(query, {"since": since, "principal": principal, "limit": limit})
            return [dict(row) for row in found]
    except sqlite3.Error as error:
        raise OSError(f"ledger {path} can't be read: {error}") from error
