"""What every engine of the comparison can do, and what comes of it. Standard library only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Say = Callable[[str], None]


class CannotSetUp(Exception):
    """This engine can't be had here; the text says why. It is reported and left out."""


@dataclass(frozen=True)
class Place:
    """Where a peer may work: `root` its folder (environment, converted weights), `gguf` the model as shipped."""

    root: Path
    gguf: Path
    threads: int

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.root / "env" / "bin" / "python"


@dataclass(frozen=True)
class Timeline:
    """One request: seconds from sending it to the arrival of each piece of its output; `tokens` in all pieces.

    Every engine here gives a piece for a token, except when it falls behind; then pieces count alike.
    """

    arrivals: tuple[float, ...]
    tokens: int

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0]

    @property
    def itl_s(self) -> float:
        """Mean seconds a token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(self.tokens - 1, 1)


def whole_rate(streams: Sequence[Timeline]) -> float:
    """New tokens a second of all streams, from sending them to the last token: their prompts' time is in it."""
    return sum(one.tokens for one in streams) / max(one.arrivals[-1] for one in streams)


def decode_rate(streams: Sequence[Timeline]) -> float:
    """New tokens a second while all streams decode: from the last first token to the first last one.

    Where streams hardly overlap that is 0: then there is no such while.
    """
    begin = max(one.arrivals[0] for one in streams)
    end = min(one.arrivals[-1] for one in streams)
    tokens = 0.0
    for one in streams:
        pieces = sum(begin < at <= end for at in one.arrivals)
        tokens += one.tokens * pieces / len(one.arrivals)
    return tokens / (end - begin) if end > begin else 0.0


class Engine(Protocol):
    """A running engine at one setting. `generate` is blocking; greedy, and no end of text ends a request early."""

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Timeline]:
        """All prompts (token ids) sent at once, `tokens` new ones each."""

    def answer(self, prompt: Sequence[int], tokens: int) -> list[int] | str:
        """What it generates: ids, or the text where it tells only that."""

    def pause(self) -> None:
        """Stops its processes while others are measured."""

    def resume(self) -> None:
        """Continues them."""

    def stop(self) -> None:
        """Ends it; nothing of it is left running."""


class Peer(Protocol):
    """One kind of engine: how it is set up, at which settings it may run, how it starts."""

    name: str
    told: str
    """How it is asked: in process, HTTP."""

    def prepare(self, place: Place, say: Say) -> None:
        """Sets its environment up, once; CannotSetUp with the reason."""

    def settings(self, place: Place, streams: int) -> list[str]:
        """Names of the settings among which the best for so many requests at once is searched."""

    def start(self, place: Place, setting: str) -> Engine:
        """Starts it and waits until it serves."""
