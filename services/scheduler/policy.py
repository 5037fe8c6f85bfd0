"""Who is served next: the waiting queue, its two orders, and ageing so that nobody starves.

A request that does not fit is stepped over, so that it never holds up smaller ones (S02). Each time a younger one
is admitted past it, it ages; at `max_bypass` it is served before all others, and while it does not fit its room is
kept: younger ones pass only as far as they leave it (`Residence.leaves_room`). Both orders share this rule, so
longest prefix match can't starve a request without a prefix either.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from services.scheduler.request import Request
from services.scheduler.settings import Settings

LOOKUPS = 3
"""Most lookups for one admission."""


def _rank(request: Request) -> tuple[bool, int]:
    """Retracted and resumed ones first, then by age."""
    return not request.resumed, request.key


class WaitingQueue:
    """Requests that have no blocks, oldest first."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._queue: list[Request] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def add(self, request: Request) -> None:
        """Begins to wait."""
        request.bypassed = 0
        request.lookups_left = LOOKUPS
        insort(self._queue, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Ended while waiting; KeyError when it does not wait."""
        del self._queue[self._index(request)]

    def admitted(self, request: Request) -> None:
        """Is admitted: those who have waited longer were bypassed."""
        index = self._index(request)
        for other in self._queue[:index]:
            other.bypassed += 1
        del self._queue[index]

    def aged(self, request: Request) -> bool:
        """Whether it was bypassed often enough to come before all others."""
        return request.bypassed >= self._settings.max_bypass

    def candidates(self, cached: Callable[[Request], int]) -> list[Request]:
        """The requests that this step considers, in order; `cached`: tokens of its prefix on the device.

        Bounded by `scan`: who stands behind moves up as those before him are admitted, which ageing ensures.
        """
        window = self._queue[: self._settings.scan]
        aged = [request for request in window if self.aged(request)]
        rest = [request for request in window if not self.aged(request)]
        if self._settings.policy == "lpm" and len(rest) > 1:
            rest.sort(key=lambda request: (not request.resumed, -cached(request), request.key))
        return aged + rest

    def _index(self, request: Request) -> int:
        index = bisect_left(self._queue, _rank(request), key=_rank)
        if index == len(self._queue) or self._queue[index] is not request:
            raise KeyError(f"request {request.id} does not wait")
        return index
