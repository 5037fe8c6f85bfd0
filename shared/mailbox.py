"""The ROUTER on which a service is dialled: who may talk, who is there, who has gone.

An endpoint is guarded by an flock for the life of its process, because a second bind on a live ipc endpoint would
succeed and steal it. ROUTER_HANDOVER stays off: a connection keeps its identity until it ends.

The front has a second socket for clients over TCP (`curve/door.py`), on which nobody but a client is taken, and where
each message must come with the key of the one that said hello: a routing id is free again once its connection ends,
and whoever takes it must not be taken for its last owner.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio
import zmq

from shared.curve.allowed import KEY_REFUSED
from shared.curve.door import PORTS, TcpDoor
from shared.identity import LOCAL
from shared.messages import MAX_FRAME, BadMessage, Head, Message, decode, encode
from shared.messages.hello import Bye, Hello, Ping, Refused, Welcome
from shared.peers import Peer, PeerGone, PeerSlow, wait_exit
from shared.sockets import Socket
from shared.welcome import SERVICES, OnFile, refusal

if TYPE_CHECKING:
    from shared.actor import Actor

CLIENT_SILENCE_S = 15.0
"""A client that sends nothing, not even a heartbeat, for this long loses its connection (not its requests)."""

Address = tuple[bool, bytes]
"""Of a connection: whether it came over TCP, and its routing id there."""


class Mailbox:
    """The listening side of one actor."""

    def __init__(self, actor: "Actor") -> None:
        self.actor = actor
        self.peers: dict[Address, Peer] = {}
        self.door: TcpDoor | None = None
        self._socket = Socket(actor.context, zmq.ROUTER, max_frame=MAX_FRAME)
        self._socket.raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._on_file = OnFile(actor.places)
        self._exits: dict[int, trio.CancelScope] = {}
        self._bound = False

    def bind(self) -> None:
        """Binds the endpoint; a stale socket file of ours is replaced, anything else there is left alone.

        ConfigError or FileExistsError when the front can't listen on TCP as configured.
        """
        actor = self.actor
        if actor.role in PORTS and actor.config.front.tcp:
            self.door = TcpDoor(actor.context, actor.role, actor.places, actor.config, actor.dropped)
        path = actor.places.run / f"{actor.role}.sock"
        if path.exists() and not path.is_socket():
            raise FileExistsError(f"{path} is no socket; move it away, Perdure binds its {actor.role} there")
        self._socket.raw.bind(actor.places.endpoint(actor.role))
        path.chmod(0o600)
        self._bound = True
        if self.door is not None:
            self.door.bind()

    async def run(self) -> None:
        """Receives for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._expire_silent)
            if self.door is not None:
                nursery.start_soon(self.door.run, self._keys_changed)
                nursery.start_soon(self._receive_strangers, nursery, self.door)
            while True:
                for identity, *body in await self._socket.recv_many():
                    self._one(nursery, (False, identity), "", body)
                self.actor.handled()

    async def _receive_strangers(self, nursery: trio.Nursery, door: TcpDoor) -> None:
        while True:
            for identity, key, *body in await door.socket.recv_many(16):
                self._one(nursery, (True, identity), key.decode(), body)
            self.actor.handled()

    def _one(self, nursery: trio.Nursery, address: Address, key: str, body: list[bytes]) -> None:
        peer = self.peers.get(address)
        if peer is not None and peer.key != key:
            self.actor.dropped("other_key", f"{peer.name} spoke with another key than it said hello with")
            self._gone(address, peer, exit_proven=False)
            peer = None
        if address[0] and (self.door is None or self.door.allowed.user_of(key) is None):
            self.actor.dropped("refused_key", f"{_shown(address)}: its key is no longer on the list")
            self._send(address, Head(), Refused(protocol=self.actor.protocol, reason=KEY_REFUSED))
            return
        try:
            head, message = decode(body, from_stranger=address[0])
        except BadMessage as error:
            self.actor.dropped("bad_message", f"{_shown(address)}: {error}")
            return
        if isinstance(message, Hello):
            self._hello(nursery, address, key, message)
        elif peer is None:
            self.actor.dropped("no_hello", f"{_shown(address)}: {type(message).__name__}")
            self._send(address, Head(re=head.rid), Refused(protocol=self.actor.protocol, reason="say hello first"))
        elif isinstance(message, Bye):
            self._gone(address, peer, exit_proven=False)
        else:
            peer.heard = time.monotonic()
            if not self.actor.ready and not isinstance(message, Ping) and peer.role != "admin":
                return  # cannot happen: only admins are welcomed before ready
            self.actor.accept(peer, head, message)

    def _hello(self, nursery: trio.Nursery, address: Address, key: str, hello: Hello) -> None:
        actor = self.actor
        principal = (self.door.allowed.user_of(key) or "") if self.door is not None and address[0] else LOCAL
        reason = refusal(actor, self.peers, address, hello, principal, self._on_file)
        if reason:
            actor.dropped("refused", f"{_shown(address)}: {reason}")
            self._send(address, Head(), Refused(protocol=self.actor.protocol, reason=reason))
            return
        if address not in self.peers:
            if hello.role in SERVICES:
                self._retire_older(hello)
            peer = self.peers[address] = Peer(
                role=hello.role,
                engine=hello.engine,
                incarnation=hello.incarnation,
                pid=0 if address[0] else hello.pid,
                send_frames=self._sender(address),
                principal=principal,
                key=key,
                remote=address[0],
            )
            actor.log.info("peer_up", peer=peer.name, **({"user": principal} if peer.remote else {}))
            self._welcome(address, hello)
            actor.peer_up(peer)
            self._watch(nursery, peer)
        else:
            self._welcome(address, hello)

    def _retire_older(self, hello: Hello) -> None:
        """A newcomer ends the connection of the incarnation before it, or an earlier one of its own.

        `refusal` lets it through only once the exit of the one before is proven.
        """
        for address, other in list(self.peers.items()):
            if other.role == hello.role and other.engine == hello.engine:
                self._gone(address, other, exit_proven=other.incarnation < hello.incarnation)

    def _welcome(self, address: Address, hello: Hello) -> None:
        actor = self.actor
        welcome = Welcome(
            protocol=actor.protocol,
            role=actor.role,
            engine=actor.engine,
            incarnation=actor.incarnation,
            pid=actor.pid,
        )
        self._send(address, Head(hello.incarnation), welcome)

    def _router(self, address: Address) -> Socket:
        return self.door.socket if self.door is not None and address[0] else self._socket

    def _sender(self, address: Address) -> Callable[[list[bytes]], None]:
        socket, identity = self._router(address), address[1]
        return lambda frames: socket.send_nowait([identity, *frames])

    def _send(self, address: Address, head: Head, message: Message) -> None:
        try:
            self._router(address).send_nowait([address[1], *encode(head, message)])
        except zmq.ZMQError as error:
            self.actor.dropped("unanswered", f"{_shown(address)}: {error}")

    # --- who has gone ---------------------------------------------------------------------------------------------

    def _watch(self, nursery: trio.Nursery, peer: Peer) -> None:
        """One watch a process, however many connections it has: each costs a file."""
        if not peer.remote and peer.pid != self.actor.pid and peer.pid not in self._exits:
            scope = self._exits[peer.pid] = trio.CancelScope()
            nursery.start_soon(self._watch_exit, peer.pid, scope)

    async def _watch_exit(self, pid: int, scope: trio.CancelScope) -> None:
        with scope:
            await wait_exit(pid)
        if self._exits.get(pid) is scope:
            del self._exits[pid]
            for address, peer in list(self.peers.items()):
                if peer.pid == pid and not peer.remote:
                    self._gone(address, peer, exit_proven=True)

    def _gone(self, address: Address, peer: Peer, *, exit_proven: bool) -> None:
        """Ends the connection, and the watch of its process with the last one: who comes and goes costs no file."""
        del self.peers[address]
        if peer.pid in self._exits and not any(other.pid == peer.pid for other in self.peers.values()):
            self._exits.pop(peer.pid).cancel()
        peer.end(exit_proven=exit_proven)
        self.actor.log.info("peer_down", peer=peer.name, exit_proven=exit_proven)
        self.actor.peer_down(peer, exit_proven)

    async def _expire_silent(self) -> None:
        while True:
            await trio.sleep(CLIENT_SILENCE_S / 4)
            now = time.monotonic()
            for address, peer in list(self.peers.items()):
                if peer.role not in SERVICES and now - peer.heard > CLIENT_SILENCE_S:
                    self._gone(address, peer, exit_proven=False)

    def _keys_changed(self) -> None:
        """Whose key was removed, or given to another user, is gone at once; its requests have their grace."""
        allowed = self.door.allowed if self.door is not None else None
        for address, peer in list(self.peers.items()):
            if allowed is not None and peer.remote and allowed.user_of(peer.key) != peer.principal:
                self._send(address, Head(peer.incarnation), Refused(protocol=self.actor.protocol, reason=KEY_REFUSED))
                self._gone(address, peer, exit_proven=False)

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
        if self.door is not None:
            self.door.close(linger_ms=100)
        self._socket.close(linger_ms=100)


def _shown(address: Address) -> str:
    return f"{'tcp' if address[0] else 'ipc'} {address[1][:64]!r}"
