"""The scheduler's time: a wall clock that never jumps within one life, so that journaled times compare afterwards."""

import time

import trio


class SteadyClock:
    """Wall time at the start plus monotonic time since, in seconds."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._offset + time.monotonic()

    def trio_deadline(self, at: float) -> float:
        """A point of this clock on trio's."""
        return trio.current_time() + (at - self.now())
