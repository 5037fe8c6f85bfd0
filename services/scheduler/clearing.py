"""The engine's part in clearing the cache.

    ClearCache ─► target ─► clear: the device forgets, loads and saves are void ─► (store) ─► cleared

From `clear` to `cleared` nothing is looked up and nothing saved, so nothing old comes back behind the clear. A clear
that the store made for somebody else is told by its epoch alone: then the device forgets everything.
"""

from dataclasses import replace

from services.scheduler.desk import Desk
from services.scheduler.residence import Residence
from services.scheduler.target import Target


class Clearing:
    """All clears. `desk.clears_out`: those that the store has not answered."""

    def __init__(self, desk: Desk, home: Residence) -> None:
        self._desk = desk
        self._home = home
        self._epoch: int | None = None
        """The latest clear epoch that the store spoke of."""

    def clear(self, now: float, target: Target) -> int:
        """Blocks that the device forgets."""
        self._desk.clears_out += 1
        return self._home.clear(now, target.scope, target.first)

    def cleared(self, epoch: int | None) -> None:
        """The store has answered one clear, None if it could not be asked."""
        self._desk.clears_out -= 1
        if epoch is not None:
            self._note(epoch)
        self._home.saver.cleared()

    def heard(self, now: float, epoch: int) -> None:
        """The store speaks of an epoch. A new one that no clear of ours explains is that of somebody else's clear."""
        if self._desk.clears_out:
            return
        foreign = self._epoch is not None and epoch > self._epoch
        self._note(epoch)
        if foreign:
            self._desk.counters.clears_heard += 1
            self._home.clear(now, Target().scope, Target().first)
            self._home.saver.cleared()

    def store_up(self, now: float, epoch: int) -> None:
        """A store serves us; one that has lost its files counts anew."""
        if self._epoch is not None and epoch < self._epoch:
            self._epoch = epoch
        self.heard(now, epoch)

    def _note(self, epoch: int) -> None:
        self._epoch = max(self._epoch or 0, epoch)
        if (store := self._desk.store) is not None:
            self._desk.store = replace(store, epoch=max(epoch, store.epoch))
