"""The comparison itself: which peers can be had, each one's best setting for each row, then rounds in turn.

    for each peer      prepared, started, asked a simple question: wrong or not to be had = left out, with the reason
    search             every setting takes every measurement once; a row's best setting is kept in best.json
    for each measurement, for each round: ours, then each peer at the best settings of the measurement's rows

Whoever is not being measured is stopped (SIGSTOP), so that nobody's idle threads cost another one a core.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ops.bench.peers.interface import CannotSetUp, Engine, Peer, Place, Say
from ops.bench.peers.rows import Fresh, Measurement, Row

QUESTION, ANSWER = "The capital of France is", "Paris"
TROUBLES = (CannotSetUp, RuntimeError, OSError, ValueError)
"""What a peer may fail with; it is left out, the others go on."""

T = TypeVar("T")


class Wrong(RuntimeError):
    """An engine that answers a simple question wrongly is not worth timing."""


@dataclass
class Tongue:
    """The model's tokenizer, as much of it as is needed here."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


@dataclass
class Side:
    """One peer with at most one engine of it, which is stopped unless it is being measured."""

    peer: Peer
    place: Place
    tongue: Tongue
    fresh: Fresh
    best: dict[str, str] = field(default_factory=dict)
    """Row -> setting."""
    _engine: Engine | None = None
    _setting: str = ""

    def measured(self, setting: str, work: Callable[[Engine], T]) -> T:
        """`work` with the engine at this setting, which is started where another or none runs."""
        if self._engine is None or self._setting != setting:
            self.stop()
            self._engine, self._setting = self.peer.start(self.place, setting), setting
            checked(self._engine, self.tongue)
            self._engine.generate([self.fresh(64)], 8)
        else:
            self._engine.resume()
        try:
            return work(self._engine)
        finally:
            self._engine.pause()

    def stop(self) -> None:
        """Ends the engine."""
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def search(self, measurements: Sequence[Measurement], say: Say) -> None:
        """Finds the best setting of every row that has none yet."""
        wanted = [one for one in measurements if any(row.name not in self.best for row in one.rows)]
        values: dict[str, dict[str, float]] = {row.name: {} for one in wanted for row in one.rows}
        rows = {row.name: row for one in wanted for row in one.rows}
        settings = {one.key: self.peer.settings(self.place, one.streams) for one in wanted}
        for setting in dict.fromkeys(name for names in settings.values() for name in names):
            for one in wanted:
                names = settings[one.key]
                if setting not in names:
                    continue
                if len(names) == 1:
                    values |= {row.name: {setting: 0.0} for row in one.rows}
                    continue
                prompts = one.draw(self.fresh)
                for row, value in zip(one.rows, self.measured(setting, lambda e: one.take(e, prompts)), strict=True):  # noqa: B023
                    values[row.name][setting] = value
                    say(f"{self.peer.name} {setting}: {row.name} {value:.4g} {row.unit}")
        self.best |= {name: best_of(rows[name], found) for name, found in values.items()}

    def remember(self) -> None:
        """Keeps the best settings for the next run."""
        (self.place.root / "best.json").write_text(json.dumps(self.best, indent=1))

    def recall(self) -> None:
        """Takes those of an earlier run."""
        kept = self.place.root / "best.json"
        if kept.exists():
            self.best |= json.loads(kept.read_text())


def best_of(row: Row, values: dict[str, float]) -> str:
    """The key of the best value for this row."""
    return (max if row.more else min)(values, key=values.__getitem__)


def checked(engine: Engine, tongue: Tongue) -> None:
    """Wrong, unless it knows the answer to a simple question."""
    said = engine.answer(tongue.encode(QUESTION), 8)
    text = said if isinstance(said, str) else tongue.decode(said)
    if ANSWER not in text:
        raise Wrong(f"to {QUESTION!r} it says {text!r}")


def rounds_of(
    measurement: Measurement,
    ours: Mapping[str, Engine],
    sides: dict[str, Side],
    rounds: int,
    fresh: Fresh,
    lost: dict[str, str],
) -> dict[str, dict[str, list[float]]]:
    """Row -> engine -> its values. A peer that fails goes from `sides` to `lost`, and its values with it."""
    values: dict[str, dict[str, list[float]]] = {row.name: {} for row in measurement.rows}
    for _ in range(rounds):
        prompts = measurement.draw(fresh)
        for name, engine in ours.items():
            engine.resume()
            for row, value in zip(measurement.rows, measurement.take(engine, prompts), strict=True):
                values[row.name].setdefault(name, []).append(value)
            engine.pause()
        for name, side in list(sides.items()):
            try:
                for setting in dict.fromkeys(side.best[row.name] for row in measurement.rows):
                    found = side.measured(setting, lambda engine: measurement.take(engine, prompts))  # noqa: B023
                    for row, value in zip(measurement.rows, found, strict=True):
                        if side.best[row.name] == setting:
                            values[row.name].setdefault(name, []).append(value)
            except TROUBLES as error:
                lost[name] = str(error)
                side.stop()
                del sides[name]
                for each in values.values():
                    each.pop(name, None)
    return values
