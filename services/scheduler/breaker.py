"""Whether it is worth waiting for the store: after three timeouts in a row nobody waits, until it answers again."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class BreakerStatistics:
    """`strikes`: timeouts in a row; `opened`: how often it opened since the start."""

    state: Literal["closed", "probation", "open"]
    strikes: int
    opened: int


class Breaker:
    """Closed: requests wait for the store. Open: none does; now and then a probe asks without waiting.

    An answered probe closes it on probation: the next timeout opens it again at once, with twice the time until
    the next probe, so that a store that answers and never delivers costs ever fewer requests one bounded wait.
    """

    LIMIT = 3
    FIRST_PROBE_S = 0.5
    LAST_PROBE_S = 64.0

    def __init__(self) -> None:
        self.opened = 0
        """How often it opened."""
        self.reset()

    def reset(self) -> None:
        """A new incarnation of the store: nothing is held against it."""
        self._strikes = 0
        self._probe_at = 0.0
        self._patience = self.FIRST_PROBE_S
        self._probing = False

    @property
    def open(self) -> bool:
        """Whether nobody should wait."""
        return self._strikes >= self.LIMIT

    def statistics(self) -> BreakerStatistics:
        """As status shows it; on probation the next timeout opens it."""
        probation = self._strikes == self.LIMIT - 1
        state: Literal["closed", "probation", "open"] = "open" if self.open else "probation" if probation else "closed"
        return BreakerStatistics(state, self._strikes, self.opened)

    def struck(self, now: float) -> None:
        """A lookup or a load timed out."""
        was_open = self.open
        self._strikes += 1
        if self.open and not was_open:
            self.opened += 1
            self._probe_at = now + self._patience
            self._patience = min(2 * self._patience, self.LAST_PROBE_S)

    def passed(self) -> None:
        """The store did all that was asked, in time."""
        self._strikes = 0
        self._patience = self.FIRST_PROBE_S

    def may_probe(self, now: float) -> bool:
        """Whether a probe should go out now; the caller then sends it and reports its end."""
        return self.open and not self._probing and now >= self._probe_at

    def probing(self) -> None:
        """A probe is out."""
        self._probing = True

    def probed(self, now: float, *, answered: bool) -> None:
        """The probe ended."""
        self._probing = False
        if answered:
            self._strikes = min(self._strikes, self.LIMIT - 1)
        else:
            self._probe_at = now + self._patience
            self._patience = min(2 * self._patience, self.LAST_PROBE_S)
