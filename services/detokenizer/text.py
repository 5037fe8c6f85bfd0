"""Incremental text of a token sequence: exact, O(1) a token, and a pure function of the tokens so far.

A byte-level vocabulary maps every token to bytes, and the full decode is the UTF-8 reading of their concatenation
(U+FFFD for what is no UTF-8, by maximal subparts, as Rust's from_utf8_lossy does). So the text is decoded by an
incremental UTF-8 decoder instead of re-decoding a window of tokens: a character that is still incomplete waits, and
no delta holds a U+FFFD that the finished text has not. What still waits when the request ends is the *tail*: the
suffix held back for a stop string, and a cut character as U+FFFD, so that joined deltas equal the full decode.
"""

import codecs
from array import array
from collections.abc import Callable, Iterable

from services.detokenizer.stops import StopMatcher

TokenBytes = Callable[[int], bytes]
"""Bytes that a token id stands for; b"" for special tokens, which have no text."""


class TextStream:
    """The text of one request, kept so that the part released by any run of tokens can be told again.

    `stop_at`: number of tokens after which a stop string was complete, else None; tokens from there on release
    nothing. Memory: the text as UTF-8 and four bytes a token.
    """

    def __init__(self, token_bytes: TokenBytes, stop: Iterable[str] = (), mute: Iterable[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._mute = frozenset(mute)  # stop ids: they end the request and are no part of its text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopMatcher(stop)
        self._text = bytearray()
        self._ends = array("I", (0,))  # bytes of text released by the first n tokens
        self.stop_at: int | None = None

    def __len__(self) -> int:
        return len(self._ends) - 1

    def push(self, token: int) -> None:
        """Appends a token."""
        if self.stop_at is None and token not in self._mute:
            released = self._stops.feed(self._decoder.decode(self._token_bytes(token)))
            self._text += released.encode()
            if self._stops.done:
                self.stop_at = len(self) + 1
        self._ends.append(len(self._text))

    def released(self, start: int, end: int) -> str:
        """Text that tokens [start, end) release; IndexError outside the tokens so far."""
        return self._text[self._ends[start] : self._ends[end]].decode()

    def tail(self) -> str:
        """Text that the end of the request releases; "" when a stop string has ended it."""
        if self.stop_at is not None:
            return ""
        pending, _ = self._decoder.getstate()
        return self._stops.held + pending.decode("utf-8", "replace")
