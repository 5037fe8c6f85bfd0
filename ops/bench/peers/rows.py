"""What is compared: measurements that every engine takes part in, the rows that come of them, and their bars."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ops.bench.peers.interface import Engine, decode_rate, whole_rate

Fresh = Callable[[int], list[int]]
"""A prompt of so many tokens that no request had before."""
Prompts = list[list[int]]

INT8 = "ours int8"
SIDES: dict[str, dict[str, str]] = {"ours": {}, INT8: {"PERDURE_MODEL__ACTIVATIONS": "int8"}}
"""Settings of ours: the default, and the other numerics."""

STREAM_PROMPT, STREAM_TOKENS = 128, 256
CACHED, NEW, LATE_TOKENS = 6000, 32, 33


@dataclass(frozen=True)
class Bar:
    """`ratio` is ours divided by that of the best peer, or of the one `peer`; it must be at most, or at least, `of`.

    `side`: which of ours it speaks of (`SIDES`).
    """

    of: float
    at_most: bool
    peer: str = ""
    side: str = "ours"

    def held(self, ratio: float) -> bool:
        """Whether it is."""
        return ratio <= self.of if self.at_most else ratio >= self.of

    def __str__(self) -> str:
        return f"{self.side} {'<=' if self.at_most else '>='} {self.of:g}x of {self.peer or 'best'}"


@dataclass(frozen=True)
class Row:
    """One figure of every engine. `more`: whether more is better."""

    name: str
    unit: str
    more: bool
    bars: tuple[Bar, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """`draw` makes the prompts, which are the same for every engine; `take` gives a value for each of `rows`."""

    key: str
    rows: tuple[Row, ...]
    streams: int
    draw: Callable[[Fresh], Prompts]
    take: Callable[[Engine, Prompts], Sequence[float]]


def _cold(length: int, best: float, vllm: float) -> Measurement:
    bars = (Bar(best, at_most=True), Bar(vllm, at_most=True, peer="vllm"), Bar(0.75, at_most=True, side=INT8))
    row = Row(f"cold TTFT, {length:,} tokens", "s", more=False, bars=bars)

    def take(engine: Engine, prompts: Prompts) -> list[float]:
        return [engine.generate(prompts, 1)[0].ttft_s]

    return Measurement(f"prefill-{length}", (row,), 1, lambda fresh: [fresh(length)], take)


def _alone() -> Measurement:
    row = Row("decode, batch 1, short", "tokens/s", more=True, bars=(Bar(1.25, at_most=False),))

    def take(engine: Engine, prompts: Prompts) -> list[float]:
        return [1 / engine.generate(prompts, STREAM_TOKENS // 2)[0].itl_s]

    return Measurement("decode-1", (row,), 1, lambda fresh: [fresh(STREAM_PROMPT)], take)


def _late() -> Measurement:
    first = Row(f"TTFT, {CACHED:,} cached + {NEW} new", "s", more=False, bars=(Bar(0.75, at_most=True),))
    decode = Row(f"decode, batch 1, at {CACHED:,}", "tokens/s", more=True, bars=(Bar(1.8, at_most=False),))

    def draw(fresh: Fresh) -> Prompts:
        prefix = fresh(CACHED)
        return [prefix, prefix + fresh(NEW)]

    def take(engine: Engine, prompts: Prompts) -> list[float]:
        engine.generate(prompts[:1], 1)
        found = engine.generate(prompts[1:], LATE_TOKENS)[0]
        return [found.ttft_s, 1 / found.itl_s]

    return Measurement("late", (first, decode), 1, draw, take)


def _streams(count: int, *bars: Bar) -> Measurement:
    what = f"decode, {count} streams of {STREAM_PROMPT} + {STREAM_TOKENS}"
    rows = (
        Row(what, "tokens/s", more=True, bars=bars),
        Row(f"{what}, while all decode", "tokens/s", more=True),
    )

    def take(engine: Engine, prompts: Prompts) -> list[float]:
        found = engine.generate(prompts, STREAM_TOKENS)
        return [whole_rate(found), decode_rate(found)]

    return Measurement(f"decode-{count}", rows, count, lambda fresh: [fresh(STREAM_PROMPT) for _ in range(count)], take)


MEASUREMENTS = (
    _cold(512, 1.2, 0.70),
    _cold(2048, 1.15, 0.78),
    _cold(7500, 0.75, 0.80),
    _alone(),
    _late(),
    _streams(8, Bar(1.25, at_most=False)),
    _streams(32, Bar(0.85, at_most=False), Bar(1.2, at_most=False, side=INT8)),
)
