"""A dialled connection that is made anew, as a new Peer, whenever the other side was away.

ZeroMQ's own reconnecting is off: its queue would carry messages for a dead incarnation to the next one. Each
connection is a fresh DEALER with an identity of its own; a hello comes first, and nothing is sent before the welcome.
"""

import secrets
import time
from typing import TYPE_CHECKING

import trio
import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.curve.allowed import KEY_REFUSED
from shared.curve.keys import Remote
from shared.messages import MAX_FRAME, BadMessage, Head, Message, decode, encode
from shared.messages.hello import Bye, Hello, Ping, Refused, Welcome
from shared.peers import MAX_PID, Peer, PeerGone, PeerSlow, wait_exit
from shared.sockets import Socket

if TYPE_CHECKING:
    from shared.node import Node

PING_S = 1.0
SILENCE_S = 15.0
"""A peer that is alive and says nothing for this long gets a fresh connection (its side may have lost ours)."""
WELCOME_S = 5.0
LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED


class Link:
    """One side of a pair of services that should always be connected."""

    def __init__(self, node: "Node", role: str, remote: Remote | None = None) -> None:
        self.node = node
        self.role = role
        self.remote = remote
        self.peer: Peer | None = None
        self.down_since = time.monotonic()
        self.refused = ""
        self.refused_protocol = 0
        """What the other side spoke when it refused us; 0 while it has not."""
        self._connections = 0
        self._started = False
        self._changed = trio.Event()
        self._socket: Socket | None = None

    def start(self, nursery: trio.Nursery) -> None:
        """Begins to connect, once; further calls change nothing."""
        if not self._started:
            self._started = True
            nursery.start_soon(self.run)

    async def wait_up(self) -> Peer:
        """The live peer, as soon as there is one."""
        while self.peer is None or not self.peer.alive:
            await self._changed.wait()
        return self.peer

    async def wait_change(self) -> None:
        """Returns when the peer has come or gone since the call."""
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def run(self) -> None:
        """Connects, serves, and connects again, until cancelled."""
        pause = 0.02
        while True:
            try:
                served = await self._one_connection()
            finally:
                self.close()
            pause = 0.02 if served else min(pause * 2, 0.4)
            await trio.sleep(pause)

    async def _one_connection(self) -> bool:
        """One connection from connect to end; True when it stood."""
        node = self.node
        socket = self._socket = Socket(node.context, zmq.DEALER, max_frame=MAX_FRAME)
        self._connections += 1
        endpoint = self._prepare(socket)
        address = f"inproc://monitor-{id(self)}-{self._connections}"
        socket.raw.monitor(address, LOST | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        monitor = Socket(node.context, zmq.PAIR, max_frame=1024)
        monitor.raw.connect(address)
        peer: Peer | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, monitor, nursery.cancel_scope)
                hello = Hello(
                    protocol=node.protocol,
                    role=node.role,
                    engine=node.engine,
                    incarnation=node.incarnation,
                    pid=node.pid,
                )
                try:
                    socket.raw.connect(endpoint)
                    socket.send_nowait(encode(Head(), hello))
                except zmq.ZMQError as error:  # refused so quickly that the queue is gone already: EAGAIN
                    node.dropped("connect", f"{self.role}: {error}")
                else:
                    peer = await self._welcomed(socket)
                if peer is not None:
                    self._stands(peer)
                    nursery.start_soon(self._heartbeat, peer, nursery.cancel_scope)
                    nursery.start_soon(self._watch_exit, peer, nursery.cancel_scope)
                    await self._receive(socket, peer)
                nursery.cancel_scope.cancel()
        finally:
            socket.raw.disable_monitor()
            monitor.close()
            if peer is not None:
                self._ended(peer)
        return peer is not None

    def _prepare(self, socket: Socket) -> str:
        """Sets a fresh socket's options; where it connects to."""
        node, raw, remote = self.node, socket.raw, self.remote
        identity = f"{node.role}/{node.engine}/{node.incarnation}.{self._connections}"
        if remote is None:
            endpoint = node.places.endpoint(self.role)
        else:
            endpoint, key = remote.endpoint, remote.key
            identity = f"{node.role}/{secrets.token_hex(16)}"  # that no other client of the server can guess it
            for option, text in (
                (zmq.CURVE_SERVERKEY, key.server),
                (zmq.CURVE_PUBLICKEY, key.public),
                (zmq.CURVE_SECRETKEY, key.secret),
            ):
                raw.setsockopt(option, text.encode())
            raw.setsockopt(zmq.IPV6, int("[" in endpoint))
        raw.setsockopt(zmq.ROUTING_ID, identity.encode())
        raw.setsockopt(zmq.RECONNECT_IVL, -1)
        return endpoint

    async def _watch(self, monitor: Socket, scope: trio.CancelScope) -> None:
        while True:
            for frames in await monitor.recv_many():
                if parse_monitor_message(frames)["event"] & zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self.refused = KEY_REFUSED
                    self._notify()
                scope.cancel()

    async def _welcomed(self, socket: Socket) -> Peer | None:
        with trio.move_on_after(WELCOME_S):
            (frames,) = await socket.recv_many(1)
            decoded = self._decoded(frames, self.role)
            if decoded is None:
                return None
            _, message = decoded
            if isinstance(message, Welcome):
                self.refused, self.refused_protocol = self._fault(message), 0
                if self.refused:
                    self.node.dropped("bad_welcome", f"{self.role}: {self.refused}")
                    return None
                return Peer(
                    role=message.role,
                    engine=message.engine,
                    incarnation=message.incarnation,
                    pid=0 if self.remote else message.pid,
                    send_frames=socket.send_nowait,
                    remote=self.remote is not None,
                )
            self.refused = message.reason[:1000] if isinstance(message, Refused) else f"got {type(message).__name__}"
            self.refused_protocol = message.protocol if isinstance(message, Refused) else 0
        return None

    def _fault(self, welcome: Welcome) -> str:
        """What a welcome must get right, as the mailbox checks a hello; "" or what is wrong."""
        if welcome.protocol != self.node.protocol:
            return f"protocol {welcome.protocol} is not ours, {self.node.protocol}; run `perdure restart --all`"
        if welcome.role != self.role:
            return f"a {welcome.role[:64]} answers where the {self.role} should be"
        if self.remote is None and not 1 <= welcome.pid <= MAX_PID:
            return f"there is no process {welcome.pid}"
        return ""

    def _stands(self, peer: Peer) -> None:
        self.peer = peer
        self.node.log.info("link_up", peer=peer.name)
        self.node.peer_up(peer)
        self._notify()

    def _ended(self, peer: Peer) -> None:
        peer.end(exit_proven=False)
        self.peer = None
        self.down_since = time.monotonic()
        self.node.log.info("link_down", peer=peer.name, exit_proven=peer.exit_proven)
        self.node.peer_down(peer, peer.exit_proven)
        self._notify()

    async def _heartbeat(self, peer: Peer, scope: trio.CancelScope) -> None:
        while True:
            await trio.sleep(PING_S)
            try:
                peer.send(Ping())
            except PeerSlow:
                continue
            except PeerGone:
                scope.cancel()
            if time.monotonic() - peer.heard > SILENCE_S:
                self.node.dropped("silent_peer", peer.name)
                scope.cancel()

    async def _watch_exit(self, peer: Peer, scope: trio.CancelScope) -> None:
        if peer.pid != self.node.pid and not peer.remote:
            await wait_exit(peer.pid)
            peer.end(exit_proven=True)
            scope.cancel()

    async def _receive(self, socket: Socket, peer: Peer) -> None:
        while peer.alive:
            goes_on = all(self._one(peer, frames) for frames in await socket.recv_many())
            self.node.handled()
            if not goes_on:
                return

    def _one(self, peer: Peer, frames: list[bytes]) -> bool:
        """One message; False when it ends the connection."""
        decoded = self._decoded(frames, peer.name)
        if decoded is None:
            return True
        head, message = decoded
        if isinstance(message, Bye):
            return False
        if isinstance(message, Refused):
            self.refused = message.reason[:1000]
            return False
        peer.heard = time.monotonic()
        self.node.accept(peer, head, message)
        return True

    def _decoded(self, frames: list[bytes], whose: str) -> tuple[Head, Message] | None:
        """None for what is no envelope: it is counted."""
        try:
            return decode(frames)
        except BadMessage as error:
            self.node.dropped("bad_message", f"{whose}: {error}")
            return None

    def close(self) -> None:
        """Drops the current connection; `run` makes another unless cancelled."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
