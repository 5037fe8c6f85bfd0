"""From the values of a row to its verdicts: medians, the best peer, each bar's ratio and whether it is held."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ops.bench.measure import Spread
from ops.bench.peers.rows import SIDES, Row


@dataclass(frozen=True)
class Verdict:
    """Of one bar: against which peer, ours divided by theirs; `held` None where that peer is missing."""

    bar: str
    peer: str
    ratio: float | None
    held: bool | None

    def __str__(self) -> str:
        if self.ratio is None:
            return f"{self.bar}: not there"
        return f"{self.ratio:.2f} ({self.bar}) {'held' if self.held else 'MISSED'}"


@dataclass(frozen=True)
class Outcome:
    """One row: the spread of every engine, `best` among the peers ("" when there is none), a verdict for each bar."""

    row: Row
    spreads: dict[str, Spread]
    best: str
    verdicts: tuple[Verdict, ...]

    @property
    def equal(self) -> bool:
        """Whether ours by default and the best peer lie within each other's spread: nobody is the quicker one."""
        if not self.best or "ours" not in self.spreads:
            return False
        ours, theirs = self.spreads["ours"], self.spreads[self.best]
        return ours.low <= theirs.high and theirs.low <= ours.high


def judged(row: Row, values: Mapping[str, Sequence[float]]) -> Outcome:
    """`values`: engine -> its runs; what is of `SIDES` is ours, the others are peers."""
    spreads = {name: Spread.of(runs) for name, runs in values.items() if runs}
    peers = [name for name in spreads if name not in SIDES]
    best = (max if row.more else min)(peers, key=lambda name: spreads[name].median, default="")
    verdicts = []
    for bar in row.bars:
        peer = bar.peer or best
        if bar.side in spreads and peer in spreads:
            ratio = spreads[bar.side].median / spreads[peer].median
            verdicts.append(Verdict(str(bar), peer, ratio, bar.held(ratio)))
        else:
            verdicts.append(Verdict(str(bar), peer, None, None))
    return Outcome(row, spreads, best, tuple(verdicts))
