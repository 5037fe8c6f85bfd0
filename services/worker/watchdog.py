"""When a step or a batch of copies that goes on and on counts as hung: measured ones tell, with a wide margin.

    lane's thread   began(size) ───────────────────────────► ended       measures seconds per unit of size
    event loop      tick ─ tick ─ tick ─ ... past the limit ─► hung: the process ends itself

Only the loop's own ticks count as time, so a process that was stopped (SIGSTOP, a suspended machine) is not taken for
a hung one. A loop that does not tick is the supervisor's to notice.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

SLACK = 20.0
"""How many times longer than measured work of its size a job may take."""
FADE = 0.95
"""By which the slowest measured rate is lowered with each job, so that one slow moment does not count for ever."""


@dataclass(frozen=True)
class Hung:
    """A job that has taken `seconds`; `limit_s` was allowed for its `size`."""

    what: str
    size: int
    seconds: float
    limit_s: float


@dataclass(frozen=True)
class _Job:
    size: int
    limit_s: float


class Watchdog:
    """Watches one lane's jobs. `least_s`: no shorter limit is ever set; 0: nothing counts as hung. `expected`: seconds
    per unit of size, from before the first job.

    `around` runs in the lane's thread, `tick` in the event loop; they share single references only.
    """

    def __init__(self, what: str, least_s: float, *, expected: float = 0.0) -> None:
        self._what = what
        self._least_s = least_s
        self._slowest = expected
        self._job: _Job | None = None
        self._seen: _Job | None = None
        self._age = 0.0

    def limit_s(self, size: int) -> float:
        """Seconds that a job of this size may take; size is the tokens of a step, or a number of copies."""
        return max(self._least_s, SLACK * self._slowest * size)

    def around(self, size: int, job: Callable[[], T]) -> Callable[[], T]:
        """The job, watched while it runs."""

        def watched() -> T:
            size_or_one = max(size, 1)
            self._job = _Job(size, self.limit_s(size_or_one))
            begun = time.perf_counter()
            try:
                return job()
            finally:
                self._job = None
                self._slowest = max(FADE * self._slowest, (time.perf_counter() - begun) / size_or_one)

        return watched

    def pause(self, wait: Callable[[], None]) -> None:
        """Within a job: a wait that is not the job's fault, and counts from none of its time."""
        job, self._job = self._job, None
        try:
            wait()
        finally:
            self._job = job

    def tick(self, seconds: float) -> Hung | None:
        """So much time has passed in the event loop."""
        job = self._job
        self._age = self._age + seconds if job is not None and job is self._seen else 0.0
        self._seen = job
        if job is None or not self._least_s or self._age <= job.limit_s:
            return None
        return Hung(self._what, job.size, round(self._age, 3), round(job.limit_s, 3))
