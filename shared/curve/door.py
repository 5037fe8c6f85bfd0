"""The front's TCP socket: CURVE only, keys by the list, a bound on connections, and word of every failed handshake.

libzmq accepts as many connections as there are files. The door counts them by its monitor and shuts those down that
come when too many stand; half-made handshakes end after HANDSHAKE_S. (To stop listening meanwhile would not do: an
unbind ends what was accepted there, too.)
"""

import ipaddress
import os
import socket
from collections.abc import Callable
from typing import Any

import trio
import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.config import Config, ConfigError
from shared.curve.allowed import Allowed
from shared.curve.keys import load_server_key
from shared.curve.zap import DOMAIN, Judge
from shared.paths import Places
from shared.sockets import Socket

PORTS = {"tokenizer": 0, "detokenizer": 1}
"""Distance of a mailbox's port from the configured one."""
MAX_FRAME = 8 << 20
"""Bytes of a frame over TCP: twice the input that a request may have."""
RECEIVE_QUEUE = 16
"""Messages per connection that wait for the loop; then TCP holds its sender back."""
HANDSHAKE_S = 3.0
HEARTBEAT_S = 5.0
DEAD_S = 15.0
REFRESH_S = 1.0
FAILED = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the connection ended in the handshake",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "this is no CURVE handshake for our key",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "the key is refused",
}


def tcp_endpoint(address: str, role: str) -> str:
    """Endpoint of a role's mailbox from `front.tcp` (the tokenizer's address; the detokenizer has the next port)."""
    host, _, port = address.rpartition(":")
    try:
        ip = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        number = int(port)
    except ValueError:
        raise _bad_address(address) from None
    if (ip.version == 6) != host.startswith("[") or not 1 <= number <= 65534:
        raise _bad_address(address)
    return f"tcp://{host}:{number + PORTS[role]}"


def _bad_address(address: str) -> ConfigError:
    what = f"front.tcp is {address!r}; it must be an IP address of this machine and a port from 1 to 65534"
    return ConfigError(f"{what}, as in 127.0.0.1:7101 (the detokenizer listens on the port after it)")


def check_front(config: Config, places: Places) -> None:
    """What must be there before the front may listen on TCP; ConfigError in one line otherwise."""
    address, limit = config.front.tcp, config.front.max_connections
    if not address:
        return
    tcp_endpoint(address, "tokenizer")
    if not zmq.has("curve"):
        raise ConfigError("front.tcp is set, but this pyzmq has no CURVE; install another, or leave it empty")
    if limit < 1:
        raise ConfigError(f"front.max_connections is {limit}; at least 1 is needed")
    if not places.server_key.exists() or not places.allowed_keys.exists():
        raise ConfigError(
            f"front.tcp is {address}, but no client has a key; `perdure keys add USER` makes one, or leave it empty"
        )


class _Authenticated(Socket):
    """A ROUTER that puts the public key of the connection behind the routing id of each message."""

    def _recv(self) -> list[bytes]:
        frames: list[Any] = self._zmq.recv_multipart(zmq.NOBLOCK, copy=False)
        try:
            key = str(frames[-1].get("User-Id")).encode()
        except zmq.ZMQError:  # nothing comes in without one
            key = b""
        identity, *body = (frame.bytes for frame in frames)
        return [identity, key, *body]


class TcpDoor:
    """Owns socket, monitor and judge. `dropped(why, detail)` counts what is turned away."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        role: str,
        places: Places,
        config: Config,
        dropped: Callable[[str, str], object],
    ) -> None:
        check_front(config, places)
        self.endpoint = tcp_endpoint(config.front.tcp, role)
        self._port = int(self.endpoint.rpartition(":")[2])
        self._limit = config.front.max_connections
        self._dropped = dropped
        self.allowed = Allowed(places.allowed_keys, dropped)
        self.allowed.refresh()
        self.judge = Judge(context, self.allowed, dropped)
        self.socket = _Authenticated(context, zmq.ROUTER, max_frame=MAX_FRAME)
        self._monitor = Socket(context, zmq.PAIR, max_frame=4096)
        self._open: set[int] = set()
        raw, pair = self.socket.raw, load_server_key(places.server_key)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.RCVHWM, RECEIVE_QUEUE),
            (zmq.HANDSHAKE_IVL, round(1000 * HANDSHAKE_S)),
            (zmq.HEARTBEAT_IVL, round(1000 * HEARTBEAT_S)),
            (zmq.HEARTBEAT_TIMEOUT, round(1000 * DEAD_S)),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.BACKLOG, 64),
            (zmq.IPV6, int("[" in self.endpoint)),
            (zmq.CURVE_SERVER, 1),
        ):
            raw.setsockopt(option, value)
        raw.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        raw.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        raw.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        # Room for a long pause of the loop: libzmq's IO thread holds a lock while it waits to report an event.
        self._monitor.raw.setsockopt(zmq.RCVHWM, 1 << 16)
        address = f"inproc://front-{id(self)}"
        raw.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | sum(FAILED))
        self._monitor.raw.connect(address)

    def bind(self) -> None:
        """Listens; FileExistsError when the port is taken or the address is not ours."""
        self.judge.bind()
        try:
            self.socket.raw.bind(self.endpoint)
        except zmq.ZMQError as error:
            reason = f"front.tcp: {self.endpoint} can't be bound ({error}); choose another address or port"
            raise FileExistsError(reason) from error

    async def run(self, changed: Callable[[], object]) -> None:
        """For ever; `changed()` is called when keys have come or gone."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.judge.run)
            nursery.start_soon(self._refresh, changed)
            while True:
                for frames in await self._monitor.recv_many():
                    self._event(frames)

    def _event(self, frames: list[bytes]) -> None:
        news = parse_monitor_message(frames)
        event = int(news["event"])
        if event == zmq.EVENT_ACCEPTED:
            self._came(int(news["value"]))
        elif event == zmq.EVENT_DISCONNECTED:
            self._open.discard(int(news["value"]))
        else:
            self._dropped("handshake", f"{self.endpoint}: {FAILED.get(event, 'failed')}")

    def _came(self, fd: int) -> None:
        """Counts a connection, or shuts it down when it is one too many; its end is reported like any other."""
        if fd not in self._open and len(self._open) >= self._limit:
            self._open = {one for one in self._open if self._connection(one)}  # an end may have gone unreported
        self._open.add(fd)
        if len(self._open) > self._limit:
            self._dropped("connections", f"{len(self._open)} connections stand, the limit is {self._limit}")
            self._connection(fd, end=True)

    def _connection(self, fd: int, *, end: bool = False) -> bool:
        """Whether the file is a connection of this door (its number may be another's by now); shut down if `end`."""
        try:
            with socket.socket(fileno=os.dup(fd)) as one:
                ours = one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == self._port
                if ours and end:
                    one.shutdown(socket.SHUT_RDWR)
                return ours
        except OSError:  # closed meanwhile, or no socket
            return False

    async def _refresh(self, changed: Callable[[], object]) -> None:
        while True:
            await trio.sleep(REFRESH_S)
            if self.allowed.refresh():
                changed()

    def facts(self) -> dict[str, Any]:
        """For status: `endpoint`, `connections`, `keys`."""
        return {
            "endpoint": self.endpoint,
            "connections": len(self._open),
            "keys": len(self.allowed),
        }

    def close(self, *, linger_ms: int = 0) -> None:
        """Closes everything; idempotent."""
        if not self.socket.raw.closed:
            self.socket.raw.disable_monitor()
        self._monitor.close()
        self.judge.close()
        self.socket.close(linger_ms=linger_ms)
