"""The ROUTER on which a service is dialled: who may talk, who is there, who has gone.

An endpoint is guarded by an flock for the life of its process, because a second bind on a live ipc endpoint would
succeed and steal it. ROUTER_HANDOVER stays off: a connection keeps its identity until it ends.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio
import zmq

from shared.messages import MAX_FRAME, PROTOCOL, BadMessage, Head, Message, decode, encode
from shared.messages.hello import Bye, Hello, Ping, Refused, Welcome
from shared.peers import Peer, PeerGone, PeerSlow, wait_exit
from shared.sockets import Socket

if TYPE_CHECKING:
    from shared.actor import Actor

CLIENT_SILENCE_S = 15.0
"""A client that sends nothing, not even a heartbeat, for this long loses its connection (not its requests)."""
MAX_PEERS = 4096
SERVICES = frozenset({"tokenizer", "scheduler", "worker", "detokenizer", "store", "gateway"})


class Mailbox:
    """The listening side of one actor."""

    def __init__(self, actor: "Actor") -> None:
        self.actor = actor
        self.peers: dict[bytes, Peer] = {}
        self._socket = Socket(actor.context, zmq.ROUTER, max_frame=MAX_FRAME)
        self._socket.raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._bound = False

    def bind(self) -> None:
        """Binds the endpoint; a stale socket file of ours is replaced, anything else there is left alone."""
        path = self.actor.places.run / f"{self.actor.role}.sock"
        if path.exists() and not path.is_socket():
            raise FileExistsError(f"{path} is no socket; move it away, Perdure binds its {self.actor.role} there")
        self._socket.raw.bind(self.actor.places.endpoint(self.actor.role))
        path.chmod(0o600)
        self._bound = True

    async def run(self) -> None:
        """Receives for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._expire_silent)
            while True:
                for frames in await self._socket.recv_many():
                    self._one(nursery, frames)

    def _one(self, nursery: trio.Nursery, frames: list[bytes]) -> None:
        identity, body = frames[0], frames[1:]
        peer = self.peers.get(identity)
        try:
            head, message = decode(body)
        except BadMessage as error:
            self.actor.dropped("bad_message", f"{identity[:64]!r}: {error}")
            return
        if isinstance(message, Hello):
            self._hello(nursery, identity, message)
        elif peer is None:
            self._send(identity, Head(head.to, re=head.rid), Refused(reason="say hello first"))
        elif isinstance(message, Bye):
            self._gone(identity, peer, exit_proven=False)
        else:
            peer.heard = time.monotonic()
            if not self.actor.ready and not isinstance(message, Ping) and peer.role != "admin":
                return  # cannot happen: only admins are welcomed before ready
            self.actor.accept(peer, head, message)

    def _hello(self, nursery: trio.Nursery, identity: bytes, hello: Hello) -> None:
        actor = self.actor
        refusal = self._refusal(identity, hello)
        if refusal:
            actor.dropped("refused", f"{identity[:64]!r}: {refusal}")
            self._send(identity, Head(), Refused(reason=refusal))
            return
        if identity not in self.peers:
            if hello.role in SERVICES:
                self._retire_older(hello)
            peer = self.peers[identity] = Peer(
                role=hello.role,
                engine=hello.engine,
                incarnation=hello.incarnation,
                pid=hello.pid,
                send_frames=self._sender(identity),
            )
            actor.log.info("peer_up", peer=peer.name)
            self._welcome(identity, hello)
            actor.peer_up(peer)
            nursery.start_soon(self._watch_exit, identity, peer)
        else:
            self._welcome(identity, hello)

    def _refusal(self, identity: bytes, hello: Hello) -> str:
        actor = self.actor
        if hello.protocol != PROTOCOL:
            return f"protocol {hello.protocol} is not ours, {PROTOCOL}; restart both from one version"
        if hello.role not in actor.accepts | {"admin"}:
            return f"the {actor.role} takes no {hello.role}"
        if not actor.ready and hello.role != "admin":
            return f"the {actor.role} is starting"
        if len(self.peers) >= MAX_PEERS:
            return f"{len(self.peers)} peers are connected, the limit is {MAX_PEERS}"
        known = self.peers.get(identity)
        if known is not None and (known.role, known.incarnation) != (hello.role, hello.incarnation):
            return "this identity belongs to another peer"
        if hello.role in SERVICES:
            for other in self.peers.values():
                same = other.role == hello.role and other.engine == hello.engine
                if same and other.incarnation > hello.incarnation:
                    return f"incarnation {other.incarnation} is here, {hello.incarnation} is over"
        return ""

    def _retire_older(self, hello: Hello) -> None:
        """A new incarnation starts only after the exit of the one before is proven; a second connection of the same
        incarnation replaces the first.
        """
        for identity, other in list(self.peers.items()):
            if other.role == hello.role and other.engine == hello.engine:
                self._gone(identity, other, exit_proven=other.incarnation < hello.incarnation)

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        actor = self.actor
        welcome = Welcome(role=actor.role, engine=actor.engine, incarnation=actor.incarnation, pid=actor.pid)
        self._send(identity, Head(hello.incarnation), welcome)

    def _sender(self, identity: bytes) -> Callable[[list[bytes]], None]:
        return lambda frames: self._socket.send_nowait([identity, *frames])

    def _send(self, identity: bytes, head: Head, message: Message) -> None:
        try:
            self._socket.send_nowait([identity, *encode(head, message)])
        except zmq.ZMQError as error:
            self.actor.dropped("unanswered", f"{identity[:64]!r}: {error}")

    async def _watch_exit(self, identity: bytes, peer: Peer) -> None:
        """Ends with the connection: a process that comes and goes again and again must not cost a file each time."""
        if peer.pid == self.actor.pid:
            return
        async with trio.open_nursery() as nursery:

            async def until_gone() -> None:
                await peer.wait_gone()
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_gone)
            await wait_exit(peer.pid)
            nursery.cancel_scope.cancel()
        if self.peers.get(identity) is peer:
            self._gone(identity, peer, exit_proven=True)

    def _gone(self, identity: bytes, peer: Peer, *, exit_proven: bool) -> None:
        del self.peers[identity]
        peer.end(exit_proven=exit_proven)
        self.actor.log.info("peer_down", peer=peer.name, exit_proven=exit_proven)
        self.actor.peer_down(peer, exit_proven)

    async def _expire_silent(self) -> None:
        while True:
            await trio.sleep(CLIENT_SILENCE_S / 4)
            now = time.monotonic()
            for identity, peer in list(self.peers.items()):
                if peer.role not in SERVICES and now - peer.heard > CLIENT_SILENCE_S:
                    self._gone(identity, peer, exit_proven=False)

    def of_role(self, role: str) -> list[Peer]:
        """The live peers of one role."""
        return [peer for peer in self.peers.values() if peer.role == role]

    def close(self) -> None:
        """Says goodbye to everyone, unbinds, removes the socket file."""
        for peer in self.peers.values():
            try:
                peer.send(Bye())
            except (PeerGone, PeerSlow):
                continue
        self.peers.clear()
        if self._bound:
            (self.actor.places.run / f"{self.actor.role}.sock").unlink(missing_ok=True)
        self._socket.close(linger_ms=100)
