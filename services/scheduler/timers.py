"""Named points in time, without a clock: set, cancel, what is due, what comes next."""

import heapq

Name = tuple[str, int]
"""What a timer is about: its kind, and the request key or ticket."""


class Timers:
    """At most one time per name. A heap whose outdated entries are dropped when they surface."""

    def __init__(self) -> None:
        self._at: dict[Name, float] = {}
        self._heap: list[tuple[float, Name]] = []

    def __len__(self) -> int:
        return len(self._at)

    def set(self, name: Name, at: float) -> None:
        """Sets or moves a timer."""
        self._at[name] = at
        heapq.heappush(self._heap, (at, name))
        if len(self._heap) > 64 + 4 * len(self._at):
            self._heap = [(at, name) for name, at in self._at.items()]
            heapq.heapify(self._heap)

    def cancel(self, name: Name) -> None:
        """Forgets a timer; nothing happens when there is none."""
        self._at.pop(name, None)

    def next(self) -> float | None:
        """The earliest time set."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[Name]:
        """Takes out every timer that has passed, earliest first."""
        passed = []
        while (at := self.next()) is not None and at <= now:
            name = heapq.heappop(self._heap)[1]
            del self._at[name]
            passed.append(name)
        return passed
