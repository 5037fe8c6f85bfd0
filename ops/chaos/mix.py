"""What the customers ask, pure: kinds of requests from a deck, over a catalogue of prompts that share prefixes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["plain", "cancel", "detached", "deadline", "salt", "no_store", "no_read", "long"]
DECK: tuple[Kind, ...] = (*("plain",) * 7, "cancel", "cancel", "detached", "detached", "deadline")
DECK += ("salt", "no_store", "no_read", "long")
SALTS = ("north", "south")
"""Salts that several requests name; every third one names a salt that no other names."""


@dataclass(frozen=True)
class Item:
    """A prompt with how many tokens are asked for (greedy, end of text ignored)."""

    ids: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class Order:
    """One request. `cancel_after`: tokens after which the customer walks away, 0 for never."""

    number: int
    kind: Kind
    item: Item
    salt: str | None = None
    no_store: bool = False
    no_read: bool = False
    detached: bool = False
    deadline_s: float | None = None
    cancel_after: int = 0


@dataclass
class Mix:
    """Orders without end. Popular items come again and again, so that there is something to be reused."""

    seed: int
    items: list[Item]
    long_items: list[Item]
    number: int = 0
    _rng: random.Random = field(init=False)
    _deck: list[Kind] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(f"mix-{self.seed}")

    def __iter__(self) -> Iterator[Order]:
        """Itself."""
        return self

    def __next__(self) -> Order:
        """The next order."""
        rng = self._rng
        if not self._deck:
            self._deck = list(DECK)
            rng.shuffle(self._deck)
        kind = self._deck.pop()
        self.number += 1
        # The square draws early items more often; every 50 orders the popular ones move on, so that tiers turn over.
        place = int(rng.random() ** 2 * len(self.items)) + self.number // 50
        item = rng.choice(self.long_items) if kind == "long" else self.items[place % len(self.items)]
        return Order(
            number=self.number,
            kind=kind,
            item=item,
            salt=rng.choice((*SALTS, f"only {self.number}")) if kind == "salt" else None,
            no_store=kind == "no_store",
            no_read=kind == "no_read",
            detached=kind == "detached",
            deadline_s=rng.uniform(0.05, 0.6) if kind == "deadline" else None,
            cancel_after=rng.randint(1, max(1, item.tokens // 2)) if kind == "cancel" else 0,
        )
