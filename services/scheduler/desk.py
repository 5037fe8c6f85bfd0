"""The desk that the parts of the engine share: effects to carry out, timers, tickets, counters, who is there."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.scheduler.counters import Counters
from services.scheduler.events import Ask, Effect, Journal, Tell, ToWorker
from services.scheduler.records import AnyRecord
from services.scheduler.settings import Settings
from services.scheduler.timers import Timers
from shared.messages.engine import Copy, Transfer
from shared.messages.store import Abandon, Commit, Lookup, Release, Reserve, Taken


@dataclass(frozen=True)
class Store:
    """One incarnation of the store, as long as its connection holds. `epoch`: its clear epoch."""

    incarnation: int
    arena: str
    arena_key: str
    epoch: int


class Desk:
    """Numbers for steps and copies (`seq`) and for questions (`ticket`) grow for the whole life of the engine."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.timers = Timers()
        self.counters = Counters()
        self.effects: list[Effect] = []
        self.epoch = 0
        """The worker's; plans and copies of older ones are void."""
        self.store: Store | None = None
        self.clears_out = 0
        """Clears that the store has not answered: nothing is looked up until it has answered all."""
        self._seq = 0
        self._ticket = 0

    def next_seq(self) -> int:
        """A number for a plan or a transfer."""
        self._seq += 1
        return self._seq

    def journal(self, record: AnyRecord) -> None:
        """Writes a record with this batch of effects."""
        self.effects.append(Journal(record))

    def ask(self, message: Lookup | Reserve | Commit, seconds: float) -> int:
        """Asks the store -> the question's ticket."""
        self._ticket += 1
        self.effects.append(Ask(self._ticket, message, seconds))
        return self._ticket

    def tell(self, message: Abandon | Taken | Release) -> None:
        """Tells the store, when it is there."""
        if self.store is not None:
            self.effects.append(Tell(message))

    def transfer(self, copies: Iterable[Copy], *, save: bool) -> int:
        """Orders copies from the worker -> their seq."""
        assert self.store is not None
        seq = self.next_seq()
        message = Transfer(
            epoch=self.epoch,
            seq=seq,
            save=save,
            arena=self.store.arena,
            arena_key=self.store.arena_key,
            copies=tuple(copies),
        )
        self.effects.append(ToWorker(message))
        return seq
