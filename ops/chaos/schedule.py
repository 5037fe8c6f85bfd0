"""What is struck, how, and when: a pure function of the seed. Decks make sure that nothing is left to luck.

A deck holds each service, each pair, all five, and what ends the whole stack; it is shuffled anew each time it runs
out. So in any 100 kills every service and every pair is hit at least 5 times, in 1,000 at least 52 times.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Literal, TypeVar

from ops.admin import SERVICES

T = TypeVar("T")
Way = Literal["kill", "hang", "pause", "crash_loop"]
"""kill: SIGKILL. hang: SIGSTOP, and nobody continues it, so that its supervisor has to kill it. pause: SIGSTOP, and
SIGCONT later: no kill. crash_loop: killed before it is ready, until its supervisor gives up."""
Moment = Literal["ready", "traffic", "recovering"]
"""ready: as soon as all services are ready again. traffic: a while later. recovering: behind the strike before it,
while that one's victims are still on their way back."""

HONCHO = "honcho"
SUPERVISOR = "supervisor:"
PAIRS = tuple(combinations(SERVICES, 2))
EVERYTHING = (HONCHO, *(SUPERVISOR + service for service in SERVICES), *SERVICES)
WEATHERS = (
    "calm",
    "slow_disk",
    "brittle",
    "failing_disk",
    "full_disk",
    "retraction",
    "slow_load",
    "broken_disk",
    "small_steps",
)
"""Fault hooks that the stack is started with when a strike has ended it; `models.py` says what they are. Of a full disk
there is a real one, where a tmpfs can be mounted (`volume.py`).
"""
PAUSE_EVERY = 6
"""Kills between two pauses."""
HANG_SHARE = 1 / 10
LONGEST_WAIT_S = 0.5


@dataclass(frozen=True)
class Strike:
    """One blow. `targets`: services, `honcho`, `supervisor:NAME`, struck in the same instant. Seconds in `_s`.

    `delay_s`: from the moment on. `weather`: which hooks the stack gets should it have to be started again.
    """

    number: int
    targets: tuple[str, ...]
    way: Way
    moment: Moment
    delay_s: float
    weather: str

    @property
    def name(self) -> str:
        """For tables: what was struck."""
        return "everything" if self.targets == EVERYTHING else "+".join(self.targets)

    @property
    def is_kill(self) -> bool:
        """Whether processes die of it; a pause ends by itself."""
        return self.way != "pause"

    @property
    def ends_stack(self) -> bool:
        """Whether the whole stack stops by design, so that it has to be started again."""
        return self.is_kill and (self.way == "crash_loop" or not set(self.targets) <= set(SERVICES))

    def __str__(self) -> str:
        """One line for people."""
        return f"#{self.number} {self.way} {self.name}, {self.moment} + {self.delay_s:.2f} s"


def _decks(rng: random.Random, cards: Sequence[T]) -> Iterator[T]:
    while True:
        deck = list(cards)
        rng.shuffle(deck)
        yield from deck


def _targets(rng: random.Random) -> Iterator[tuple[tuple[str, ...], Way]]:
    """Targets without end; a supervisor and a crash loop of another service each time."""
    supervisors, loops = _decks(rng, SERVICES), _decks(rng, SERVICES)
    number = 0
    while True:
        number += 1
        deck: list[tuple[tuple[str, ...], Way]] = [((service,), "kill") for service in SERVICES]
        deck += [(pair, "kill") for pair in PAIRS]
        deck += [(SERVICES, "kill"), (EVERYTHING, "kill"), ((HONCHO,), "kill")]
        deck += [((SUPERVISOR + next(supervisors),), "kill")]
        if number % 3 == 0:
            deck.append(((next(loops),), "crash_loop"))
        rng.shuffle(deck)
        yield from deck


def schedule(seed: int, kills: int, weathers: Sequence[str] = WEATHERS) -> list[Strike]:
    """`kills` strikes that kill, and pauses between them (every service and pair in turn, and supervisors)."""
    rng = random.Random(f"chaos-{seed}")
    moments: Iterator[Moment] = _decks(rng, ("ready", "traffic", "traffic", "recovering"))
    changing = _decks(rng, weathers)
    pausable = [(service,) for service in SERVICES] + list(PAIRS) + [SERVICES]
    pausable += [(SUPERVISOR + service,) for service in SERVICES]
    pauses = _decks(rng, pausable)
    strikes: list[Strike] = []

    def add(targets: tuple[str, ...], way: Way, moment: Moment) -> None:
        waits = {"ready": 0.0, "traffic": LONGEST_WAIT_S, "recovering": LONGEST_WAIT_S / 2}
        delay_s = rng.uniform(0.0, waits[moment])
        strikes.append(Strike(len(strikes) + 1, targets, way, moment, delay_s, next(changing)))

    for done, (targets, way) in enumerate(islice(_targets(rng), kills), 1):
        moment: Moment = "traffic" if way == "crash_loop" else next(moments)
        if way == "kill" and set(targets) <= set(SERVICES) and rng.random() < HANG_SHARE:
            way = "hang"
        add(targets, way, moment)
        if done % PAUSE_EVERY == 0:
            add(next(pauses), "pause", "traffic")
    return strikes


def kills_by_target(strikes: Sequence[Strike]) -> Counter[str]:
    """How often each service, pair and larger target is killed, by name."""
    return Counter(strike.name for strike in strikes if strike.is_kill)
