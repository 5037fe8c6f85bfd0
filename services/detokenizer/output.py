"""The output of one request: tokens as the scheduler journaled them, their text, and how it ended.

Any chunk [i, j) can be made at any time, from the same facts with the same result: that is what lets a client attach
again from the token where it was, to this process or the next.
"""

from array import array
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from services.detokenizer.text import TextStream, TokenBytes
from shared.messages.base import unpack_u32
from shared.messages.engine import Opening, Progress
from shared.messages.front import Chunk, Finish, TokenLogprob

MAX_CHUNK_TOKENS = 2048
"""Tokens; a client that attaches late or reads slowly gets long runs in pieces of this size."""


_decode_logprob = msgspec.msgpack.Decoder(TokenLogprob).decode


class Violation(Exception):
    """The scheduler sent what can't follow from what it sent before; nothing was taken in."""


class Output:
    """Tokens, text, logprobs and finish of one request.

    `end`: tokens that clients may see now: never past a stop string, nor past the finish.
    """

    def __init__(self, request_id: str, opening: Opening, token_bytes: TokenBytes) -> None:
        self.id = request_id
        self.opening = opening
        self.finish: Finish | None = None
        self._token_bytes = token_bytes
        self._tokens = array("I")
        self._logprobs: list[bytes] = []  # encoded: a third of the memory, over all of a request's retention
        self._text = self._new_text()

    def _new_text(self) -> TextStream:
        return TextStream(self._token_bytes, self.opening.stop, self.opening.stop_ids)

    def __len__(self) -> int:
        """Tokens known, also those past a stop string."""
        return len(self._tokens)

    @property
    def stop_at(self) -> int | None:
        """Number of tokens after which a stop string was complete."""
        return self._text.stop_at

    @property
    def end(self) -> int:
        """Tokens that may be shown now."""
        if self.finish is not None:
            return self.finish.usage.completion_tokens
        return len(self._tokens) if self.stop_at is None else self.stop_at

    def take(self, progress: Progress) -> bool:
        """Takes in what is new of `progress`; True when anything was. Violation when it can't follow."""
        if progress.start < 0 or len(progress.ids) % 4:
            raise Violation(f"{len(progress.ids)} bytes of ids from {progress.start} on are no tokens")
        ids = unpack_u32(progress.ids)
        known = len(self._tokens) - progress.start
        if known < 0:
            raise Violation(f"tokens from {progress.start} on, but {len(self._tokens)} are known")
        if ids[:known] != self._tokens[progress.start : progress.start + len(ids)]:
            raise Violation(f"other tokens from {progress.start} on than were journaled before")
        logprobs = self._checked_logprobs(progress, len(ids))
        total = max(len(self._tokens), progress.start + len(ids))
        if progress.finish is not None and not 0 <= progress.finish.usage.completion_tokens <= total:
            raise Violation(f"finished after {progress.finish.usage.completion_tokens} tokens, but {total} are known")
        if self.finish is not None:
            return False
        for token in ids[known:]:
            self._text.push(token)
        self._tokens.extend(ids[known:])
        self._logprobs.extend(msgspec.msgpack.encode(logprob) for logprob in logprobs[known:])
        if progress.finish is not None:
            self._close(progress.finish)
        return known < len(ids) or progress.finish is not None

    def _checked_logprobs(self, progress: Progress, tokens: int) -> Sequence[TokenLogprob]:
        if not self.opening.logprobs:
            return ()
        logprobs = progress.logprobs or ()
        if len(logprobs) != tokens:
            raise Violation(f"{len(logprobs)} logprobs for {tokens} tokens")
        return logprobs

    def _close(self, finish: Finish) -> None:
        """Ends the output at the scheduler's count, or before it at a stop string.

        A request whose stop string was complete ended there by its own rule, whatever the scheduler met before it
        heard of it (max_tokens, a deadline, a cancel): so the outcome depends on the tokens alone, not on a race.
        """
        if self.stop_at is not None and self.stop_at <= finish.usage.completion_tokens:
            usage = replace(finish.usage, completion_tokens=self.stop_at)
            finish = replace(finish, reason="stop", usage=usage, error=None)
        elif finish.usage.completion_tokens < len(self._tokens):  # tokens that don't count: their text neither
            self._text = self._new_text()
            del self._tokens[finish.usage.completion_tokens :]
            del self._logprobs[finish.usage.completion_tokens :]
            for token in self._tokens:
                self._text.push(token)
        self.finish = finish

    def chunk(self, start: int) -> Chunk | None:
        """What a client that has tokens [0, start) gets next; None when there is nothing yet."""
        start = min(start, self.end) if self.finish is not None else start
        end = min(self.end, start + MAX_CHUNK_TOKENS)
        finish = self.finish if end == self.end else None
        if end <= start and finish is None:
            return None
        return Chunk(
            id=self.id,
            start=start,
            end=end,
            ids=self._tokens[start:end].tobytes(),
            text=self._text.released(start, end) + (self._text.tail() if finish is not None else ""),
            logprobs=tuple(map(_decode_logprob, self._logprobs[start:end])) if self.opening.logprobs else None,
            finish=finish,
        )
