"""Warnings that are given once: a disk that fails each second is one line in the log, not one a second."""

from collections.abc import Callable
from typing import Any

QUIET_S = 600.0
"""A kind of trouble that was not seen for so long is news again."""

MAX_KINDS = 256


class SayOnce:
    """`log` as the services have it; `clock` in seconds."""

    def __init__(self, log: Any, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._seen: dict[str, float] = {}

    def warn(self, kind: str, event: str, **facts: Any) -> None:
        """Logs, unless this kind was seen within QUIET_S."""
        now, last = self._clock(), self._seen.pop(kind, None)
        self._seen[kind] = now
        if len(self._seen) > MAX_KINDS:
            del self._seen[next(iter(self._seen))]
        if last is None or now - last > QUIET_S:
            self._log.warning(event, **facts)
