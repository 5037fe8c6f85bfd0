"""When loading the model counts as hung: nothing has moved for long, not when it has taken long.

    moved     the loader said something new; the device read for us; a page came in         the time starts again
    computed  a core was used (weights unpacked, steps tried), and nothing moved            allowed SLACK times as long
    neither   a read that never returns, a lock that nobody gives back                      hung after the limit

A slow disk moves. What comes from the page cache is no read of the device, but it is fast, and the loader tells of it.
Sockets and pipes of the event loop do not count, which rules out most of the kernel's counters.
"""

import os
import resource
import time
from dataclasses import dataclass

SLACK = 10.0
BUSY = 0.2
"""Share of a core above which loading computes; the event loop alone takes a hundredth."""


@dataclass(frozen=True)
class Stuck:
    """Nothing has moved for `seconds`; `limit_s` was allowed. `at`: what the loader said last."""

    at: str
    seconds: float
    limit_s: float


class LoadWatch:
    """Pure. `limit_s` 0: nothing counts as hung."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: object = None
        self._still_s = 0.0
        self._idle_s = 0.0

    def tick(self, seconds: float, *, said: tuple[str, float], moved: object, used_s: float) -> Stuck | None:
        """So much time has passed in the event loop, in which `used_s` of processor time were used.

        `moved` changes whenever the device has read something.
        """
        if (said, moved) != self._seen:
            self._seen = (said, moved)
            self._still_s = self._idle_s = 0.0
            return None
        self._still_s += seconds
        self._idle_s += seconds if used_s < BUSY * seconds else 0.0
        if not self._limit_s:
            return None
        at = f"{said[0]} {said[1]:.0%}"
        if self._idle_s > self._limit_s:
            return Stuck(at, round(self._still_s, 1), self._limit_s)
        if self._still_s > SLACK * self._limit_s:
            return Stuck(at, round(self._still_s, 1), SLACK * self._limit_s)
        return None


class Meter:
    """What this process moves and uses, as the kernel counts it."""

    def __init__(self) -> None:
        self._used = time.process_time()

    def moved(self) -> tuple[int, int]:
        """(bytes that devices have read for us, or 0 where the kernel does not say; pages that came from a device)."""
        return _read_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt

    def used_s(self) -> float:
        """Seconds of processor time since the last call."""
        before, self._used = self._used, time.process_time()
        return self._used - before


def _read_bytes() -> int:
    try:
        fd = os.open("/proc/self/io", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        fields = dict(line.split(b": ") for line in os.read(fd, 4096).splitlines())
        return int(fields.get(b"read_bytes", b"0"))
    except OSError:
        return 0
    finally:
        os.close(fd)
