"""One ragged batch a step: a token for each decode first, prefill chunks with what is left of the budget."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from services.scheduler.request import Request


class Slice(NamedTuple):
    """A request's part of a step: its next `tokens` pending ones; `draws`: these are all, and another is drawn."""

    request: Request
    tokens: int
    draws: bool


@dataclass
class Batch:
    """Rows of the next step by key, and the tokens (`left`) that it may still take.

    Prefill goes on in order of age, each request with all that is left, so that in general a single one is left
    partial. When the budget holds fewer tokens than there are decodes, those that waited longest come first.
    """

    left: int
    slices: dict[int, Slice] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        """Gives it as many of its pending tokens as there is room for; none when the step is full."""
        count = min(request.plannable, self.left)
        if count > 0:
            self.left -= count
            self.slices[request.key] = Slice(request, count, count == request.pending)

    def isolated(self) -> "Batch":
        """This batch, or, when somebody in it was part of a step in which the worker died, a batch of the first such
        one alone. It stays alone until it gets further than it was: a second loss then strikes nobody else.
        """
        suspect = next((part.request for part in self.slices.values() if part.request.losses), None)
        if suspect is None:
            return self
        batch = Batch(self.left + sum(part.tokens for part in self.slices.values()))
        batch.add(suspect)
        return batch


def decodes_first(running: Iterable[Request]) -> list[Request]:
    """Those who can go on: decodes, longest waiting first, then prefills, oldest first."""
    decodes, prefills = list[Request](), list[Request]()
    for request in running:
        if request.load is None or request.load.allowed:
            (decodes if request.pending == 1 else prefills).append(request)
    decodes.sort(key=attrgetter("last_turn", "key"))
    prefills.sort(key=attrgetter("key"))
    return decodes + prefills
