"""What went wrong in the disk tier, by kind: how often, and the last reason. For counters, the log and status.

An index that turned out damaged stays so until it is begun anew; `damaged` says it to everybody meanwhile.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from services.store.disk.errors import DiskFault, DiskTierError, IndexDamaged

MAX_KINDS = 64
"""Kinds kept; they come from kernel errors and our own texts, so there are few. More are counted together."""


class Trouble(NamedTuple):
    """`times` since open; `reason`: one line, the last one."""

    times: int
    reason: str


def kind_of(type_: str, reason: str) -> str:
    """The type and the end of the text: the kernel's words, without the file's name."""
    return f"{type_}: {reason.rpartition(': ')[2]}"


class Troubles:
    """Thread-safe. `reason`: the last trouble, "" for none. `distrust`: leaves a note to the next start (OSError)."""

    def __init__(self, counters: Counter[str], distrust: Callable[[], None]) -> None:
        self.reason = ""
        self.damaged = False
        self._counters = counters
        self._distrust = distrust
        self._lock = threading.Lock()
        self._known: dict[str, Trouble] = {}

    def note(self, type_: str, reason: str, times: int = 1) -> None:
        """One more, or several, of a kind."""
        kind = kind_of(type_, reason)
        self.reason = reason
        with self._lock:
            if kind not in self._known and len(self._known) >= MAX_KINDS:
                kind = type_
            before = self._known.get(kind)
            self._known[kind] = Trouble(times + (before.times if before else 0), reason)

    def note_error(self, error: DiskTierError) -> None:
        """Counts it by its type."""
        kind = type(error).__name__
        self._counters[kind] += 1
        self.note(kind, error.reason)
        if isinstance(error, IndexDamaged) and not self.damaged:
            self.damaged = True
            try:
                self._distrust()
            except OSError as failed:
                self.note(kind, f"{error.reason}; and its note can't be written: {failed.strerror}")

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes what comes out of a block; the kernel's own errors become DiskFault."""
        try:
            yield
        except DiskTierError as error:
            self.note_error(error)
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            fault = DiskFault(f"{error.filename}: {reason}" if error.filename else reason)
            self.note_error(fault)
            raise fault from error

    def all(self) -> dict[str, Trouble]:
        """By kind, in the order in which the kinds first came."""
        with self._lock:
            return dict(self._known)
