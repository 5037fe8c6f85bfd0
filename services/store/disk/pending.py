"""What loads and releases leave to be done at the next sync, so that they wait for no write themselves."""

import threading
from collections.abc import Iterable, Mapping

from services.store.disk.index_record import Entry

_TOUCHES = 1 << 17
"""Recencies kept until the next sync; they are hints, more than this many are dropped."""


def same_copy(known: Entry | None, entry: Entry) -> bool:
    """Whether `known` is the very copy that `entry` speaks of: its identity may lie elsewhere by now."""
    return known is not None and (known.slot, known.generation) == (entry.slot, entry.generation)


class Pending:
    """Thread-safe. Recencies of blocks, and blocks that could not be read back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._touched: dict[bytes, int] = {}
        self._bad: dict[bytes, Entry] = {}

    def touch(self, recency: Mapping[bytes, int]) -> None:
        """Notes recencies."""
        with self._lock:
            if len(self._touched) < _TOUCHES:
                self._touched.update(recency)

    def take_touched(self) -> dict[bytes, int]:
        """All recencies; they are the caller's now."""
        with self._lock:
            touched, self._touched = self._touched, {}
            return touched

    def give_up(self, bad: Iterable[Entry]) -> None:
        """Notes blocks that are not to be found any more."""
        with self._lock:
            self._bad.update((entry.identity, entry) for entry in bad)

    def take_bad(self) -> list[Entry]:
        """All of these; they are the caller's now."""
        with self._lock:
            bad, self._bad = self._bad, {}
            return list(bad.values())

    def leading_good(self, found: list[Entry]) -> list[Entry]:
        """The entries before the first that was given up."""
        if not self._bad:
            return found
        with self._lock:
            bad = (n for n, entry in enumerate(found) if same_copy(self._bad.get(entry.identity), entry))
            return found[: next(bad, len(found))]
