"""One ragged batch a step: a token for each decode first, prefill chunks with what is left of the budget."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.scheduler.request import Request


@dataclass
class Batch:
    """Rows of the next step, and the tokens (`left`) that it may still take.

    Prefill goes on in order of age, each request with all that is left, so that in general a single one is left
    partial. When the budget holds fewer tokens than there are decodes, those that waited longest come first.
    """

    left: int
    slices: dict[int, tuple[Request, int]] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        """Gives it as many of its pending tokens as there is room for; none when the step is full."""
        count = min(request.pending, self.left)
        if count > 0:
            self.left -= count
            self.slices[request.key] = (request, count)

    def isolated(self) -> "Batch":
        """This batch, or, when somebody in it was part of a step in which the worker died, a batch of the first such
        one alone. It stays alone until it gets further than it was: a second loss then strikes nobody else.
        """
        suspect = next((request for request, _ in self.slices.values() if request.losses), None)
        if suspect is None:
            return self
        batch = Batch(self.left + sum(count for _, count in self.slices.values()))
        batch.add(suspect)
        return batch


def decodes_first(running: Iterable[Request]) -> list[Request]:
    """Those who can go on: decodes, longest waiting first, then prefills, oldest first."""
    ready = [request for request in running if request.load is None]
    return sorted(ready, key=lambda r: (False, r.last_turn, r.key) if r.pending == 1 else (True, 0, r.key))
