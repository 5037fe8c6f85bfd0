"""What a journal's batches mean together, after a restart: each request a gapless prefix of its history, or nothing.

Two things make a record meaningless. Its request's Accept is gone: an old segment was removed with it, or damaged;
then nobody would ever end that request. Or a damaged segment took tokens in the middle: a later Step would place
tokens behind a gap. Such tokens are dropped, and an end behind them; the request is computed again from its last
gapless token (draws depend on seed and position only, so it gives the same), and what is then journaled joins again.
"""

from collections.abc import Iterable, Sequence

from services.scheduler.records import Accept, Admit, AnyRecord, Ended, Step


def keys_of(records: Iterable[AnyRecord]) -> set[int]:
    """Requests that these records speak of."""
    keys: set[int] = set()
    for record in records:
        if isinstance(record, Step):
            keys.update(row.key for row in record.rows)
        else:
            keys.add(record.key)
    return keys


class Fold:
    """Feed batches in order with `take`."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        """Gapless tokens of each request whose Accept was read."""
        self.accepted: set[int] = set()
        self.cut_short: set[int] = set()
        self.orphans: set[int] = set()

    def take(self, records: Sequence[AnyRecord]) -> list[AnyRecord]:
        """The records of one batch that mean something."""
        kept: list[AnyRecord] = []
        for record in records:
            if isinstance(record, Accept):
                self.accepted.add(record.key)
                self._tokens.setdefault(record.key, 0)
                kept.append(record)
            elif isinstance(record, Step):
                rows = tuple(row for row in record.rows if self._follows(row.key, row.start, len(row.ids) // 4))
                if rows:
                    kept.append(record if len(rows) == len(record.rows) else Step(record.at, rows))
            elif isinstance(record, Admit):
                if self._follows(record.key, 0, 0):
                    kept.append(record)
            elif self._follows(record.key, self._end(record), 0):
                kept.append(record)
        return kept

    @staticmethod
    def _end(record: Ended) -> int:
        return record.finish.usage.completion_tokens

    def _follows(self, key: int, start: int, count: int) -> bool:
        """Whether tokens from `start` join what is there; if not, they are lost."""
        there = self._tokens.get(key)
        if there is None:
            self.orphans.add(key)
            return False
        if start > there:
            self.cut_short.add(key)
            return False
        self._tokens[key] = max(there, start + count)
        return True
