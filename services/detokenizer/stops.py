"""Stop strings over a stream of text: what may be shown now, what must wait, and where the text ends.

One Knuth-Morris-Pratt automaton per stop string runs over the characters. The text ends before the stop string that
is complete first; of several that are complete with the same character, before the longest. This looks at characters
only, never at how they were cut into tokens or deltas, so any cutting gives the same text.
"""

from collections.abc import Iterable


def _failure(stop: str) -> list[int]:
    """`failure[k]`: length of the longest proper border of stop[:k]."""
    failure = [0] * (len(stop) + 1)
    k = 0
    for i in range(1, len(stop)):
        while k and stop[i] != stop[k]:
            k = failure[k]
        if stop[i] == stop[k]:
            k += 1
        failure[i + 1] = k
    return failure


class StopMatcher:
    """Feeds text through; holds back the longest suffix that may still become a stop string.

    `held` is that suffix; `done` once a stop string was complete: from then on nothing is released.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [stop for stop in dict.fromkeys(stops) if stop]
        self._failures = [_failure(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self.held = ""
        self.done = False

    def feed(self, text: str) -> str:
        """More text -> what is released by it; cost is linear in `text` (amortised) times the number of stops."""
        if self.done:
            return ""
        if not self._stops:
            return text
        window = self.held + text
        start = len(self.held)
        for index, char in enumerate(text, start + 1):
            complete = self._step(char)
            if complete:
                self.done = True
                self.held = ""
                return window[: index - complete]
        cut = len(window) - max(self._matched)
        self.held = window[cut:]
        return window[:cut]

    def _step(self, char: str) -> int:
        """Advances every automaton; length of the longest stop string that `char` completes, else 0."""
        complete = 0
        for which, stop in enumerate(self._stops):
            k = self._matched[which]
            while k and stop[k] != char:
                k = self._failures[which][k]
            if stop[k] == char:
                k += 1
            self._matched[which] = k
            if k == len(stop):  # nothing is stepped after a completion, so k never runs past the end
                complete = max(complete, k)
        return complete
