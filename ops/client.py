"""The client library: submit, then attach, and go on after whatever dies in between.

    async with connected(places) as client:
        async with client.generate(prompt="...") as stream:
            async for chunk in stream:
                print(chunk.text, end="")

The client chooses the request's id and keeps it: Generate is sent again until it is answered, Attach again from the
next token index, so that no token is lost or doubled when the tokenizer, scheduler, worker, store or detokenizer is
restarted. Used by the command line, the demo, benchmarks and tests.
"""

import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import trio

from ops.remote import Server
from ops.stream import CANCEL_S, PAUSE_S, RequestRejected, Result, Stream
from ops.waiting import KeyRefused, Loading, Notice, ServiceAway, Watch, local, remote
from shared.curve.door import MAX_FRAME as REMOTE_FRAME
from shared.messages import MAX_FRAME
from shared.messages.base import pack_u32
from shared.messages.front import Cancel, Cancelled, ChatMessage, Chunk, Generate, Rejected, Sampling
from shared.node import Node, on
from shared.paths import Places
from shared.peers import DeadlinePassed, Peer, PeerGone, PeerSlow, RequestFailed

__all__ = [
    "Client",
    "KeyRefused",
    "RequestRejected",
    "Result",
    "Server",
    "ServiceAway",
    "Stream",
    "connected",
    "new_id",
]


def new_id() -> str:
    """A request id: 128 random bits in hex."""
    return secrets.token_hex(16)


class Client(Node):
    """Connections to tokenizer and detokenizer, and the streams that run over them. Make one with `connected`."""

    def __init__(
        self,
        places: Places,
        *,
        notice: Notice | None = None,
        recovery_timeout_s: float = 30.0,
        loading: Loading | None = None,
        server: Server | None = None,
    ) -> None:
        super().__init__("client", places, engine="client", incarnation=1 + secrets.randbits(52))
        self.tokenizer = self.dial("tokenizer", server.mailbox("tokenizer") if server else None)
        self.detokenizer = self.dial("detokenizer", server.mailbox("detokenizer") if server else None)
        self.max_frame = MAX_FRAME if server is None else REMOTE_FRAME
        looking = local(places, loading) if server is None else remote(self.links)
        self.watch = Watch(looking, notice, recovery_timeout_s)
        self.streams: dict[str, Stream] = {}

    def generate(
        self,
        request: Generate | None = None,
        *,
        prompt: str | None = None,
        messages: Iterable[ChatMessage] | None = None,
        ids: Iterable[int] | None = None,
        sampling: Sampling | None = None,
        credit: int = 64,
    ) -> Stream:
        """A request, given whole or by its parts; enter the stream to send it."""
        if request is None:
            request = Generate(
                id=new_id(),
                prompt=prompt,
                messages=None if messages is None else tuple(messages),
                ids=None if ids is None else pack_u32(list(ids)),
                sampling=sampling or Sampling(),
            )
        return Stream(self, request, credit=credit)

    def follow(self, request_id: str, *, start: int = 0, credit: int = 64) -> Stream:
        """Attaches to a request that somebody submitted before (detached, or by another process)."""
        return Stream(self, Generate(id=request_id, detached=True), submitted=True, start=start, credit=credit)

    async def cancel(self, request_id: str) -> bool:
        """Stops a request; True when it was still live, False when it was over or nobody could be asked."""
        with trio.move_on_after(CANCEL_S):
            while True:
                peer = await self.tokenizer.wait_up()
                try:
                    return (await peer.ask(Cancel(id=request_id), Cancelled, deadline_s=CANCEL_S)).known
                except (PeerGone, PeerSlow, RequestFailed, DeadlinePassed):
                    await trio.sleep(PAUSE_S)
        return False

    @on(Chunk)
    def _chunk(self, peer: Peer, message: Chunk) -> None:
        if not 0 <= message.start <= message.end or len(message.ids) != 4 * (message.end - message.start):
            self.dropped("bad_chunk", f"{len(message.ids)} bytes of ids for [{message.start}, {message.end})")
            return
        stream = self.streams.get(message.id)
        if stream is not None:
            self.watch.heard()
            stream.arrived(message)

    @on(Rejected)
    def _rejected(self, peer: Peer, message: Rejected) -> None:
        stream = self.streams.get(message.id)
        if stream is not None:
            stream.fail(RequestRejected(message))

    def give_up(self, reason: ServiceAway | KeyRefused) -> None:
        """Ends every stream that runs."""
        for stream in list(self.streams.values()):
            stream.fail(reason)


@asynccontextmanager
async def connected(
    places: Places,
    *,
    notice: Notice | None = None,
    recovery_timeout_s: float = 30.0,
    loading: Loading | None = None,
    server: Server | None = None,
) -> AsyncIterator[Client]:
    """A client that dials the stack of `places`, also one that is not there yet; over TCP that of `server`.

    `notice` is called with the names of the services waited for, within 5 s, and with () once answers flow again;
    `loading` how far a worker is that loads its model.
    """
    client = Client(places, notice=notice, recovery_timeout_s=recovery_timeout_s, loading=loading, server=server)
    failure: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            client.nursery = nursery
            for link in client.links.values():
                link.start(nursery)
            nursery.start_soon(client.watch.run, client.give_up)
            try:
                yield client
            except Exception as error:  # raised below, so that it is not wrapped in the nursery's group
                failure = error
            finally:
                client.say_goodbye()
                nursery.cancel_scope.cancel()
    finally:
        client.close()
    if failure is not None:
        raise failure
