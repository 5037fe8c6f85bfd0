"""What was measured of one kind of worker on this home: computing by context, loading by size, each beside the other.

Saved as plain numbers, so that the first prefix after a restart is judged by what was measured before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.scheduler.restore.curve import Curve

DRAG_WEIGHT = 0.5
DRAG_FADES = 0.98
"""At each load without any computing beside it the remembered drag nears 1: one bad moment must not rule it out."""
MOST_DRAG = 8.0
TELLING = 0.3
"""Share of the time that both must be under way for it to tell how much they disturb each other."""


def _rate() -> Curve:
    return Curve(through_origin=False)


def _total() -> Curve:
    return Curve(through_origin=True)


@dataclass
class Rates:
    """`prefill`: seconds a token, by the tokens before it. `host`, `disk`: seconds of loading so many blocks.

    `compute_drag`, `load_drag`: how many times longer each takes while the other is under way.
    """

    prefill: Curve = field(default_factory=_rate)
    host: Curve = field(default_factory=_total)
    disk: Curve = field(default_factory=_total)
    compute_drag: float = 1.0
    load_drag: float = 1.0

    @property
    def known(self) -> bool:
        """Whether computing was ever measured, or estimated."""
        return bool(self.prefill)

    def compute_s(self, start: int, end: int) -> float:
        """Seconds of computing the tokens [start, end) alone."""
        return self.prefill.sum(start, end)

    def load_s(self, host: int, disk: int) -> float | None:
        """Seconds of loading so many blocks; None when a tier of them was never measured. Both parts go at once."""
        if (host and not self.host) or (disk and not self.disk):
            return None
        return max(self.host.at(host + disk), self.disk.at(disk))

    def note_step(self, tokens: int, start: int, seconds: float, beside_s: float = 0.0) -> None:
        """A step computed so many tokens of a prompt behind `start` others, `beside_s` of its time beside a load."""
        if beside_s:
            self.compute_drag = _dragged(self.compute_drag, self.compute_s(start, start + tokens), seconds, beside_s)
        else:
            self.prefill.note(start + tokens / 2, seconds / tokens)

    def note_load(self, host: int, disk: int, seconds: float, beside_s: float = 0.0) -> None:
        """So many blocks were loaded, for `beside_s` of the time while their request was computed."""
        if beside_s:
            self.load_drag = _dragged(self.load_drag, self.load_s(host, disk) or 0.0, seconds, beside_s)
            return
        self.compute_drag, self.load_drag = _faded(self.compute_drag), _faded(self.load_drag)
        if host and disk and self.disk.at(disk) < self.host.at(host + disk):  # it was the host's part that took so long
            self.host.note(host + disk, seconds)
        elif disk:
            self.disk.note(disk, seconds)
        else:
            self.host.note(host, seconds)

    def plain(self) -> dict[str, Any]:
        """For a file."""
        curves = {name: getattr(self, name).points for name in ("prefill", "host", "disk")}
        return curves | {"compute_drag": self.compute_drag, "load_drag": self.load_drag}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Rates":
        """From a file; ValueError, TypeError or KeyError when it holds something else."""

        def points(name: str) -> list[tuple[float, float]]:
            found = [(float(x), float(y)) for x, y in plain[name]]
            if not all(0 < x < 1e12 and 0 < y < 1e9 for x, y in found):
                raise ValueError(f"{name} holds points that nobody measured: {found}")
            return found

        return cls(
            Curve(through_origin=False, points=points("prefill")),
            Curve(through_origin=True, points=points("host")),
            Curve(through_origin=True, points=points("disk")),
            min(MOST_DRAG, max(1.0, float(plain["compute_drag"]))),
            min(MOST_DRAG, max(1.0, float(plain["load_drag"]))),
        )


def _dragged(drag: float, alone_s: float, seconds: float, beside_s: float) -> float:
    """What took `seconds`, and would have taken `alone_s`, was disturbed for a part of them; too short a part tells
    nothing.
    """
    undisturbed = alone_s - (seconds - beside_s)
    if alone_s <= 0 or beside_s < TELLING * seconds or undisturbed <= 0:
        return drag
    return drag + DRAG_WEIGHT * (min(MOST_DRAG, max(1.0, beside_s / undisturbed)) - drag)


def _faded(drag: float) -> float:
    return 1 + DRAG_FADES * (drag - 1)
