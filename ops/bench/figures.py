"""The figures of one run: what goes into the JSON, and the rows that people read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ops.bench.measure import Spread


@dataclass
class Figures:
    """`say` gets each figure as it is known."""

    say: Callable[[str], None]
    figures: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)

    def note(self, name: str, ours: Spread, theirs: Spread | None, ratio: float, bar: str) -> None:
        """Keeps one figure; `ratio` is the one that `bar` speaks of."""
        self.figures[name] = {"ours": vars(ours), "theirs": theirs and vars(theirs), "ratio": ratio, "bar": bar}
        self.rows.append((name, str(ours), "" if theirs is None else str(theirs), f"{ratio:.3f}  (bar {bar})"))
        self.say(f"{name}: ours {ours}, alternative {theirs}, ratio {ratio:.3f}, bar {bar}")
