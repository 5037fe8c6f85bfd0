"""A front over TCP for tests: two free neighbouring ports, keys, and remote clients of a mailbox."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import trio
import zmq

from shared.config import Config, FrontConfig
from shared.curve.allowed import AllowedKey, read_allowed, write_allowed
from shared.curve.door import PORTS
from shared.curve.keys import ClientKey, Remote, load_or_create_server_key, new_pair
from shared.paths import Places, private_dir
from shared.peers import Peer
from shared.testing import TestPeer


def free_ports() -> int:
    """The first of two neighbouring ports that nobody listens on."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def config_with(port: int, base: Config | None = None, **front: int) -> Config:
    """A configuration whose front listens there."""
    base = base or Config()
    return msgspec.structs.replace(base, front=FrontConfig(tcp=f"127.0.0.1:{port}", **front))


def give_key(places: Places, user: str) -> ClientKey:
    """What `perdure keys add` does."""
    private_dir(places.keys)
    server = load_or_create_server_key(places.server_key)
    pair = new_pair()
    try:
        before = read_allowed(places.allowed_keys)
    except FileNotFoundError:
        before = ()
    write_allowed(places.allowed_keys, (*before, AllowedKey(user=user, public=pair.public, added="now")))
    return ClientKey(user=user, public=pair.public, secret=pair.secret, server=server.public)


def take_key(places: Places, key: ClientKey) -> None:
    """What `perdure keys remove` does."""
    kept = tuple(one for one in read_allowed(places.allowed_keys) if one.public != key.public)
    write_allowed(places.allowed_keys, kept)


def remote_of(port: int, role: str, key: ClientKey) -> Remote:
    """Where the mailbox of a role listens."""
    return Remote(f"tcp://127.0.0.1:{port + PORTS[role]}", key)


@asynccontextmanager
async def node_of(places: Places, role: str = "client", incarnation: int = 1) -> AsyncIterator[TestPeer]:
    """A node that dials what the test tells it to."""
    node = TestPeer(role, places, engine="client", incarnation=incarnation)
    try:
        async with trio.open_nursery() as nursery:
            node.nursery = nursery
            yield node
            nursery.cancel_scope.cancel()
    finally:
        node.close()


@asynccontextmanager
async def remote_peer(
    places: Places, port: int, role: str, key: ClientKey, incarnation: int = 1
) -> AsyncIterator[tuple[TestPeer, Peer]]:
    """A client that is connected over TCP."""
    async with node_of(places, incarnation=incarnation) as node:
        with trio.fail_after(10):
            peer = await node.dial(role, remote_of(port, role, key)).wait_up()
        yield node, peer


def raw_dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", key: ClientKey | None, identity: bytes
) -> "zmq.Socket[bytes]":
    """A ZeroMQ socket that speaks no protocol of ours; without a key its mechanism is NULL."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.ROUTING_ID, identity)
    if key is not None:
        dealer.setsockopt(zmq.CURVE_SERVERKEY, key.server.encode())
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, key.public.encode())
        dealer.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
    return dealer
