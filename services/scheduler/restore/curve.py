"""A measured curve: the mean of what was seen in each doubling of x, straight lines between.

Means of x and of y are taken with the same weights, so points of a straight line stay on it; between and beyond them a
line is followed exactly, anything else as closely as its doublings allow. A sample moves its own point much, and all
others a little in the same proportion: a machine that has become slower is so everywhere.
"""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

WEIGHT = 0.3
"""Of a new sample in its point."""
SPREAD = 0.1
"""Of its surprise in the other points."""


class Curve:
    """y >= 0 over x > 0. `through_origin`: y is a total and goes to 0 with x; else it is a rate, level by default."""

    def __init__(self, *, through_origin: bool, points: Iterable[tuple[float, float]] = ()) -> None:
        self._through_origin = through_origin
        self._points: dict[int, tuple[float, float]] = {_doubling(x): (x, y) for x, y in points}
        self.points = sorted(self._points.values())
        """(x, y) by x."""

    def __bool__(self) -> bool:
        return bool(self.points)

    def note(self, x: float, y: float) -> None:
        """Something took y at x. What takes no time at all was not measured."""
        if x <= 0 or y <= 0:
            return
        expected, place = self.at(x), _doubling(x)
        surprise = min(2.0, max(0.5, y / expected)) if expected > 0 else 1.0
        for other, (at, value) in self._points.items():
            if other != place:
                self._points[other] = at, value * (1 + SPREAD * (surprise - 1))
        at, value = self._points.get(place, (x, y))
        self._points[place] = at + WEIGHT * (x - at), value + WEIGHT * (y - value)
        self.points = sorted(self._points.values())

    def at(self, x: float) -> float:
        """The y at x by what is known; 0 when nothing is."""
        points = self.points
        if not points or x <= 0:
            return 0.0
        if len(points) == 1:
            (only, y) = points[0]
            return y * x / only if self._through_origin else y
        right = min(max(bisect_right(points, x, key=lambda point: point[0]), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        slope = (y1 - y0) / (x1 - x0)
        if x > x1:
            return y1 + max(0.0, slope) * (x - x1)
        if x < x0 and self._through_origin:
            return max(y0 - max(0.0, slope) * (x0 - x), min(y0, y0 * x / x0) * 0.5)
        return max(y0 + slope * (x - x0), min(y0, y1) * 0.5)

    def sum(self, start: float, end: float) -> float:
        """The integral over [start, end): of a rate, what it adds up to."""
        if not self.points or end <= start:
            return 0.0
        cuts = [start, *(x for x, _ in self.points if start < x < end), end]
        return sum((b - a) * self.at(max((a + b) / 2, 1e-9)) for a, b in pairwise(cuts))


def _doubling(x: float) -> int:
    return int(x).bit_length()
