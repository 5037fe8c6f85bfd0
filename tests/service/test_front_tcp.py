"""The front over TCP: who comes in, who does not, and what becomes of everything else that knocks."""

import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
import zmq

from shared.actor import Actor, on
from shared.config import Config, ConfigError, FrontConfig
from shared.curve.allowed import KEY_REFUSED
from shared.curve.door import MAX_FRAME, tcp_endpoint
from shared.curve.keys import ClientKey, new_pair
from shared.messages import Head, encode
from shared.messages.front import Cancel, Cancelled
from shared.messages.hello import Hello, Refused, Snapshot, Status, Welcome
from shared.messages.store import Clear, Cleared
from shared.paths import Places
from shared.peers import DeadlinePassed, Peer, PeerSlow
from shared.sockets import Socket
from shared.testing import dialled, running
from shared.welcome import MAX_PEERS_A_USER
from tests.front_kit import (
    config_with,
    free_ports,
    give_key,
    node_of,
    raw_dealer,
    remote_of,
    remote_peer,
    take_key,
)


class Front(Actor):
    """Answers Cancel with who asks, in the id."""

    role_name = "tokenizer"
    accepts = frozenset({"client", "gateway"})

    @on(Cancel)
    def cancel(self, peer: Peer, message: Cancel, head: Head) -> Cancelled:
        return Cancelled(id=f"{peer.principal} {head.deadline > 0}", known=True)

    @on(Clear)
    def clear(self, peer: Peer, message: Clear) -> Cleared:
        return Cleared(blocks={}, bytes={}, epoch=0)


async def asked_as(peer: Peer) -> str:
    """The principal that the front sees."""
    return (await peer.ask(Cancel(id="x"), Cancelled, deadline_s=5)).id.split()[0]


async def until(peer: Peer, holds: Callable[[Snapshot], Any]) -> None:
    """Waits until the front says so of itself, asked over ipc: its loop answers all the while."""
    with trio.fail_after(10):
        while not holds(await peer.ask(Status(), Snapshot, deadline_s=5)):
            pass


@asynccontextmanager
async def front(places: Places, **options: int) -> AsyncIterator[tuple[Front, int, Peer]]:
    """A running front, its port, and an admin."""
    port = free_ports()
    async with (
        running(Front, places, config_with(port, **options)) as actor,
        dialled("admin", "tokenizer", places) as (_, admin),
    ):
        yield actor, port, admin


async def test_a_keys_user_is_the_principal_and_ipc_stays_local(places: Places) -> None:
    alice, also_alice, bob = give_key(places, "alice"), give_key(places, "alice"), give_key(places, "bob")
    async with front(places) as (_, port, _), dialled("client", "tokenizer", places) as (_, local):
        for key, user in ((alice, "alice"), (also_alice, "alice"), (bob, "bob")):
            async with remote_peer(places, port, "tokenizer", key) as (_, peer):
                assert await asked_as(peer) == user
        assert await asked_as(local) == "local"


async def test_deadlines_travel_as_seconds_because_clocks_differ(places: Places) -> None:
    key = give_key(places, "alice")
    async with front(places) as (actor, port, _), remote_peer(places, port, "tokenizer", key) as (_, peer):
        sent: list[Head] = []
        send = peer._send_frames

        def noted(frames: list[bytes]) -> None:
            sent.append(msgspec.msgpack.decode(frames[0], type=Head))
            send(frames)

        peer._send_frames = noted
        assert (await peer.ask(Cancel(id="x"), Cancelled, deadline_s=5)).id == "alice True"
        assert 4 < sent[0].deadline <= 5
        assert not actor.drops["deadline"]


async def test_without_keys_tcp_is_refused_at_the_start(places: Places) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with running(Front, places, config_with(free_ports())):
            raise AssertionError("must not start")
    assert caught.group_contains(ConfigError, match=r"no client has a key; `perdure keys add USER` makes one")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:0", "127.0.0.1:65535", "::1:7101", "host:7101", "*:7101"])
async def test_an_address_that_can_not_be_is_refused_at_the_start(places: Places, address: str) -> None:
    give_key(places, "alice")
    with pytest.raises(ExceptionGroup) as caught:
        async with running(Front, places, Config(front=FrontConfig(tcp=address))):
            raise AssertionError("must not start")
    assert caught.group_contains(ConfigError, match=r"front\.tcp")


def test_the_detokenizer_listens_on_the_next_port() -> None:
    assert tcp_endpoint("[::1]:7101", "tokenizer") == "tcp://[::1]:7101"
    assert tcp_endpoint("10.0.0.1:7101", "detokenizer") == "tcp://10.0.0.1:7102"


async def test_a_taken_port_is_a_named_error(places: Places) -> None:
    give_key(places, "alice")
    port = free_ports()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(ExceptionGroup) as caught:
            async with running(Front, places, config_with(port)):
                raise AssertionError("must not start")
    assert caught.group_contains(FileExistsError, match=f"{port} can't be bound")


def stranger(key: ClientKey) -> ClientKey:
    """A key that the server was never told of."""
    pair = new_pair()
    return ClientKey(user="alice", public=pair.public, secret=pair.secret, server=key.server)


def to_another_server(key: ClientKey) -> ClientKey:
    return ClientKey(user=key.user, public=key.public, secret=key.secret, server=new_pair().public)


async def test_an_unknown_key_is_refused_counted_and_told(places: Places) -> None:
    key = give_key(places, "alice")
    async with front(places) as (actor, port, _), node_of(places) as node:
        link = node.dial("tokenizer", remote_of(port, "tokenizer", stranger(key)))
        with trio.fail_after(10):
            while link.refused != KEY_REFUSED:
                await link.wait_change()
        assert link.peer is None
        assert actor.drops["refused_key"] >= 1
        async with remote_peer(places, port, "tokenizer", key) as (_, peer):
            assert await asked_as(peer) == "alice"


@pytest.mark.parametrize("how", ["null", "plain", "wrong server", "unknown key"])
async def test_whoever_is_not_let_in_is_counted_and_gets_nothing_through(places: Places, how: str) -> None:
    key = give_key(places, "alice")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    async with front(places) as (actor, port, admin):
        used = {"wrong server": to_another_server(key), "unknown key": stranger(key)}.get(how)
        dealer = raw_dealer(context, used, b"x" * 20)
        if how == "plain":
            dealer.setsockopt(zmq.PLAIN_USERNAME, b"alice")
            dealer.setsockopt(zmq.PLAIN_PASSWORD, b"alice")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send_multipart(encode(Head(), Hello(role="client", engine="e", incarnation=1, pid=1)))
        await until(admin, lambda said: said.data["drops"].get("handshake", 0) >= 1)
        assert {peer.role for peer in actor.mailbox.peers.values()} == {"admin"}
        assert dealer.poll(0) == 0
        dealer.close()
    context.term()


async def test_a_removed_key_is_out_at_once_and_an_added_one_in(places: Places) -> None:
    alice, bob = give_key(places, "alice"), give_key(places, "bob")
    async with front(places) as (_, port, _), remote_peer(places, port, "tokenizer", bob) as (_, his):
        async with remote_peer(places, port, "tokenizer", alice) as (node, peer):
            assert await asked_as(peer) == "alice"
            take_key(places, alice)
            with trio.fail_after(10):
                await peer.wait_gone()
                while node.links["tokenizer"].refused != KEY_REFUSED:
                    await node.links["tokenizer"].wait_change()
        assert await asked_as(his) == "bob"
        carol = give_key(places, "carol")
        async with remote_peer(places, port, "tokenizer", carol) as (_, peer):
            assert await asked_as(peer) == "carol"


@pytest.mark.parametrize("damage", ["garbage", "gone", "open to others"])
async def test_a_list_that_can_not_be_trusted_lets_nobody_in_until_it_is_mended(places: Places, damage: str) -> None:
    key = give_key(places, "alice")
    good = places.allowed_keys.read_bytes()
    async with front(places) as (actor, port, _), remote_peer(places, port, "tokenizer", key) as (node, peer):
        if damage == "garbage":
            places.allowed_keys.write_bytes(b"{" + good)
        elif damage == "gone":
            places.allowed_keys.unlink()
        else:
            places.allowed_keys.chmod(0o644)
        with trio.fail_after(10):
            await peer.wait_gone()
        assert actor.drops["no_keys"] >= 1
        places.allowed_keys.write_bytes(good)
        places.allowed_keys.chmod(0o600)
        with trio.fail_after(10):
            assert await asked_as(await node.links["tokenizer"].wait_up()) == "alice"


async def test_no_admin_and_no_service_comes_over_tcp(places: Places) -> None:
    key = give_key(places, "alice")
    async with front(places) as (actor, port, admin):
        for role in ("admin", "gateway", "scheduler", "tokenizer"):
            async with node_of(places, role) as node:
                link = node.dial("tokenizer", remote_of(port, "tokenizer", key))
                await until(admin, lambda said, link=link: link.refused)  # type: ignore[misc]
                assert link.refused == f"the tokenizer takes no {role} over TCP"
        async with remote_peer(places, port, "tokenizer", key) as (_, peer):
            with pytest.raises(DeadlinePassed):  # not even decoded: it is nothing that a client says
                await peer.ask(Status(), Snapshot, deadline_s=0.2)
            with pytest.raises(DeadlinePassed):
                await peer.ask(Clear(), Cleared, deadline_s=0.2)
            assert actor.drops["bad_message"] == 2


async def test_a_routing_id_that_is_free_again_does_not_carry_its_last_owner(places: Places) -> None:
    """Alice's connection ends without a word; Bob takes its routing id, and must not speak or hear as Alice."""
    alice, bob = give_key(places, "alice"), give_key(places, "bob")
    async with front(places) as (actor, port, admin), node_of(places) as node:
        first = Socket(node.context, zmq.DEALER, max_frame=MAX_FRAME)
        second = Socket(node.context, zmq.DEALER, max_frame=MAX_FRAME)
        for socket_, key in ((first, alice), (second, bob)):
            for option, text in (
                (zmq.CURVE_SERVERKEY, key.server),
                (zmq.CURVE_PUBLICKEY, key.public),
                (zmq.CURVE_SECRETKEY, key.secret),
            ):
                socket_.raw.setsockopt(option, text.encode())
            socket_.raw.setsockopt(zmq.ROUTING_ID, b"the same routing id")
        hello = encode(Head(), Hello(role="client", engine="e", incarnation=1, pid=1))
        cancel = encode(Head(to=1, rid=7), Cancel(id="x"))
        with trio.fail_after(10):
            first.raw.connect(f"tcp://127.0.0.1:{port}")
            first.send_nowait(hello)
            (frames,) = await first.recv_many()
            assert msgspec.msgpack.decode(frames[1], type=Welcome).role == "tokenizer"
            first.close()
            await until(admin, lambda said: said.data["tcp"]["connections"] == 0)
            second.raw.connect(f"tcp://127.0.0.1:{port}")
            second.send_nowait(cancel)
            (frames,) = await second.recv_many()
            assert msgspec.msgpack.decode(frames[1], type=Refused).reason == "say hello first"
            assert actor.drops["other_key"] == 1
            second.send_nowait(hello)
            await second.recv_many()
            second.send_nowait(cancel)
            (frames,) = await second.recv_many()
            assert msgspec.msgpack.decode(frames[1], type=Cancelled).id.startswith("bob ")
        second.close()


async def test_raw_garbage_half_handshakes_and_many_connections_are_bounded(places: Places) -> None:
    key, limit, rng = give_key(places, "alice"), 16, random.Random(3)
    async with front(places, max_connections=limit) as (_, port, admin):
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        for one in idle:  # a greeting cut short, then silence
            one.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03")
        for size in (1, 10, 64, 1000, 100_000):
            with socket.create_connection(("127.0.0.1", port)) as rough:
                try:
                    rough.sendall(rng.randbytes(size))
                except ConnectionError:
                    continue  # thrown out already
        http = socket.create_connection(("127.0.0.1", port))
        http.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        await until(admin, lambda said: said.data["drops"].get("handshake", 0) >= 4)
        async with remote_peer(places, port, "tokenizer", key) as (_, peer):
            assert await asked_as(peer) == "alice"
            crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(3 * limit)]
            await until(admin, lambda said: said.data["drops"].get("connections", 0) >= 2 * limit)
            await until(admin, lambda said: said.data["tcp"]["connections"] <= limit)
            assert await asked_as(peer) == "alice"  # who is in stays in
            for one in (*crowd, *idle, http):
                one.close()
            await until(admin, lambda said: said.data["tcp"]["connections"] == 1)
            async with remote_peer(places, port, "tokenizer", key, incarnation=2) as (_, again):
                assert await asked_as(again) == "alice"


async def test_a_frame_beyond_the_limit_ends_the_connection_and_nothing_else(places: Places) -> None:
    key = give_key(places, "alice")
    async with front(places) as (_, port, _), remote_peer(places, port, "tokenizer", key) as (node, peer):
        peer.send(Cancel(id="x" * (MAX_FRAME + 1)))
        with trio.fail_after(10):
            await peer.wait_gone()
            assert await asked_as(await node.links["tokenizer"].wait_up()) == "alice"


async def test_one_users_connections_are_bounded_and_others_come_in(places: Places) -> None:
    alice, bob = give_key(places, "alice"), give_key(places, "bob")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    async with front(places) as (actor, port, admin):
        dealers = [raw_dealer(context, alice, b"%020d" % n) for n in range(MAX_PEERS_A_USER + 2)]
        for dealer in dealers:
            dealer.connect(f"tcp://127.0.0.1:{port}")
            dealer.send_multipart(encode(Head(), Hello(role="client", engine="e", incarnation=1, pid=1)))
        await until(admin, lambda said: said.data["drops"].get("refused", 0) >= 2)
        assert len(actor.mailbox.of_role("client")) == MAX_PEERS_A_USER
        async with remote_peer(places, port, "tokenizer", bob) as (_, peer):
            assert await asked_as(peer) == "bob"
        for dealer in dealers:
            dealer.close()
    context.term()


async def test_a_flood_of_a_client_is_taken_in_order_and_holds_nobody_up(places: Places) -> None:
    alice, bob = give_key(places, "alice"), give_key(places, "bob")
    async with (
        front(places) as (_, port, _),
        remote_peer(places, port, "tokenizer", alice) as (_, hers),
        remote_peer(places, port, "tokenizer", bob) as (_, his),
    ):
        sent = 0
        with trio.fail_after(30):
            while sent < 20_000:
                try:
                    hers.send(Cancel(id=str(sent)))
                    sent += 1
                except PeerSlow:
                    assert await asked_as(his) == "bob"
            assert await asked_as(hers) == "alice"
