"""One request as its client sees it: submitted until answered, followed until finished, whatever restarts.

Generate ──► Accepted ──► Attach(next token) ──► chunks ──► finish
   ▲  │ no answer, scheduler away    ▲  │ detokenizer away, chunk out of order
   └──┘                              └──┘
"""

import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import trio

from shared.messages.base import unpack_u32
from shared.messages.front import (
    AWAY_S,
    Accepted,
    Attach,
    Attached,
    Chunk,
    Credit,
    Finish,
    Generate,
    Rejected,
    TokenLogprob,
)
from shared.peers import DeadlinePassed, Peer, PeerGone, PeerSlow, ProtocolViolation, RequestFailed

if TYPE_CHECKING:
    from ops.client import Client

ASK_S = 10.0
"""Seconds that one try of Generate or Attach waits; then it is tried again."""
PAUSE_S = 0.05
"""Between tries, so that a peer that refuses at once is not asked in a loop."""
MAX_PAUSE_S = 1.0
CANCEL_S = 2.0


class RequestRejected(Exception):
    """The request was refused, or is no longer known; `rejected` says why, with code and numbers."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(f"{rejected.code}: {rejected.reason}")
        self.rejected = rejected


@dataclass(frozen=True)
class Result:
    """A finished request; `ids`, `text` and `logprobs` from the token on at which the stream began."""

    id: str
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None
    finish: Finish


def joined(request_id: str, chunks: Sequence[Chunk]) -> Result:
    """All chunks of a stream, the last with its finish, as one result."""
    finish = chunks[-1].finish if chunks else None
    if finish is None:
        raise RuntimeError("the stream ended without a finish")
    wanted = any(chunk.logprobs is not None for chunk in chunks)
    return Result(
        id=request_id,
        ids=tuple(token for chunk in chunks for token in unpack_u32(chunk.ids)),
        text="".join(chunk.text for chunk in chunks),
        logprobs=tuple(one for chunk in chunks for one in chunk.logprobs or ()) if wanted else None,
        finish=finish,
    )


class Stream:
    """An async context manager and iterator of chunks; leaving it before the finish cancels the request.

    (A detached request is left alone instead.) Raises RequestRejected, ServiceAway, or RequestFailed for a fault of
    a service. `prompt_tokens` is known once accepted, `finish` once the last chunk has been given. `retries` counts
    the times that Generate or Attach had to be sent again.
    """

    def __init__(
        self, client: "Client", request: Generate, *, submitted: bool = False, start: int = 0, credit: int = 64
    ) -> None:
        self.request = request
        self.finish: Finish | None = None
        self.prompt_tokens: int | None = None
        self.retries = 0
        self._client = client
        self._submitted = submitted
        self._received = start  # token index that the next chunk must start with
        self._credit = credit
        self._owed = 0  # credit that could not be given yet
        self._chunks: deque[Chunk] = deque()
        self._complete = False  # the chunk with the finish has arrived
        self._error: Exception | None = None
        self._changed = trio.Event()
        self._out_of_order = trio.Event()
        self._scope = trio.CancelScope()
        self._peer: Peer | None = None

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    async def __aenter__(self) -> "Stream":
        """Registers the stream and begins to submit."""
        if self.id in self._client.streams:
            raise ValueError(f"request {self.id} is streamed by this client already")
        self._client.streams[self.id] = self
        self._client.nursery.start_soon(self._keep)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the stream; cancels a request that is not over, also when this task is being cancelled itself."""
        self._scope.cancel()
        del self._client.streams[self.id]
        refused = isinstance(self._error, RequestRejected)
        if not self._complete and not self.request.detached and not refused:
            with trio.CancelScope(shield=True):
                await self._client.cancel(self.id)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """The chunks, in order, without gap or overlap; the last one carries the finish."""
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk."""
        if self.finish is not None:
            raise StopAsyncIteration
        if not self._chunks:
            self._client.watch.wait_begins()
            try:
                while not self._chunks:
                    if self._error is not None:
                        raise self._error
                    await self._changed.wait()
            finally:
                self._client.watch.wait_ends()
        chunk = self._chunks.popleft()
        self.finish = chunk.finish
        if chunk.finish is None:
            self._give_credit()
        return chunk

    def _give_credit(self) -> None:
        """One chunk has been read, so one more may come."""
        self._owed += 1
        self._pay_credit()

    def _pay_credit(self) -> None:
        """Tells what is owed, in batches of half the window."""
        if self._peer is not None and self._owed >= max(1, self._credit // 2):
            try:
                self._peer.send(Credit(id=self.id, chunks=self._owed))
                self._owed = 0
            except (PeerGone, PeerSlow) as problem:  # goes with the next one, or with the next attach
                self._client.dropped("credit", str(problem))

    async def accepted(self) -> int:
        """Waits until the request is journaled: from then on it survives everything. Prompt tokens, 0 if unknown."""
        self._client.watch.wait_begins()
        try:
            while not self._submitted:
                if self._error is not None:
                    raise self._error
                await self._changed.wait()
        finally:
            self._client.watch.wait_ends()
        return self.prompt_tokens or 0

    async def result(self) -> Result:
        """Reads to the end."""
        return joined(self.id, [chunk async for chunk in self])

    # --- what the client hands in -----------------------------------------------------------------------------

    def arrived(self, chunk: Chunk) -> None:
        """Takes a chunk that continues what is here; anything else means that an attach is due."""
        if self._complete or chunk.end < self._received:
            return
        if chunk.start != self._received:
            if chunk.end > self._received or chunk.finish is not None:
                self._out_of_order.set()
            return
        self._received = chunk.end
        self._complete = chunk.finish is not None
        self._chunks.append(chunk)
        self._tell()
        if self._complete:
            self._scope.cancel()

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error, after the chunks that are here."""
        if self._error is None and not self._complete:
            self._error = error
            self._tell()
            self._scope.cancel()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # --- keeping it going -------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        with self._scope:
            try:
                if not self._submitted:
                    await self._submit()
                await self._follow()
            except (RequestRejected, RequestFailed, ProtocolViolation) as error:
                self.fail(error)

    async def _submit(self) -> None:
        """Sends Generate until it is answered; the same id makes it the same request however often it is sent."""
        _check_size(self.request, self._client.max_frame // 2)
        failures = 0
        while True:
            peer = await self._client.tokenizer.wait_up()
            if failures:  # spread out: one request that ends the tokenizer must not take all others along each time
                await trio.sleep(random.uniform(0, min(PAUSE_S * 2 ** min(failures, 10), MAX_PAUSE_S)))
            try:
                answer: Accepted | Rejected = await peer.ask(self.request, (Accepted, Rejected), deadline_s=ASK_S)
            except (PeerGone, PeerSlow, DeadlinePassed):
                failures += 1
                self.retries += 1
                continue
            except RequestFailed as failed:
                if failed.code != "deadline":
                    raise
                continue
            if isinstance(answer, Accepted):
                self._client.watch.heard()
                self._submitted = True
                self.prompt_tokens = answer.prompt_tokens
                self._tell()
                return
            if AWAY_S not in answer.numbers and answer.code != "shutting_down":
                raise RequestRejected(answer)
            if answer.numbers.get(AWAY_S):
                self._client.watch.engine_away()
            await trio.sleep(PAUSE_S)

    async def _follow(self) -> None:
        """Attaches, and attaches again from the next token whenever the connection or the order is lost."""
        while True:
            peer = await self._client.detokenizer.wait_up()
            self._out_of_order = trio.Event()
            self._owed = 0  # chunks may arrive, be read, and have to be paid for, before the answer has woken us
            attach = Attach(id=self.id, start=self._received, credit=max(self._credit - len(self._chunks), 1))
            try:
                answer: Attached | Rejected = await peer.ask(attach, (Attached, Rejected), deadline_s=ASK_S)
            except (PeerGone, PeerSlow, DeadlinePassed):
                self.retries += 1
                await trio.sleep(PAUSE_S)
                continue
            except RequestFailed as failed:
                if failed.code != "deadline":
                    raise
                continue
            if isinstance(answer, Rejected):
                if answer.code != "overloaded":
                    raise RequestRejected(answer)
                await trio.sleep(PAUSE_S)
                continue
            self._peer = peer
            self._pay_credit()
            async with trio.open_nursery() as nursery:
                for wait in (peer.wait_gone, self._out_of_order.wait):
                    nursery.start_soon(self._first, wait, nursery.cancel_scope)
            self._peer = None
            self.retries += 1

    @staticmethod
    async def _first(wait: Callable[[], Awaitable[object]], scope: trio.CancelScope) -> None:
        await wait()
        scope.cancel()


def _check_size(request: Generate, limit: int) -> None:
    """What no mailbox would take in is refused here: the connection would end at it, again and again."""
    size = len(request.ids or b"") + len((request.prompt or "").encode(errors="surrogatepass"))
    size += sum(len(turn.content.encode(errors="surrogatepass")) for turn in request.messages or ())
    if size > limit:
        reason = f"input is {size:,} bytes; no message carries more than {limit:,}"
        numbers: dict[str, float] = {"bytes": size, "limit": limit}
        raise RequestRejected(Rejected(id=request.id, code="body_too_large", reason=reason, numbers=numbers))
