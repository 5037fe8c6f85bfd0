"""Test kit: real actors over real sockets in one trio run, and the counterpart that dials or listens.

Part of the package, and not of the tests, so that services, operations and users' own tests can share it.
"""

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar, TypeVar

import trio

from shared.actor import Actor
from shared.config import Config
from shared.messages import Head, Message
from shared.node import Node
from shared.paths import Places
from shared.peers import Peer, wait_exit

A = TypeVar("A", bound=Actor)


@asynccontextmanager
async def running(
    actor_class: type[A], places: Places, config: Config | None = None, *, incarnation: int = 1, **options: Any
) -> AsyncIterator[A]:
    """Runs an actor until the block ends (planned stop, with drain); yields it once it is ready."""
    places.make()
    actor = actor_class(places, config or Config(), incarnation=incarnation, **options)
    ready = trio.Event()

    async def serve() -> None:
        await actor.serve(on_ready=ready)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        await ready.wait()
        try:
            yield actor
        finally:
            actor.request_stop()


class _Recording:
    """What a counterpart has received, in order."""

    def __init__(self) -> None:
        self._send: trio.MemorySendChannel[tuple[Peer, Head, Message]]
        self._send, self.inbox = trio.open_memory_channel[tuple[Peer, Head, Message]](100_000)

    def record(self, peer: Peer, head: Head, message: Message) -> None:
        self._send.send_nowait((peer, head, message))


class TestPeer(Node):
    """Dials a mailbox and plays a role's protocol by hand: `send`, `ask`, and every push in `receive`."""

    __test__: ClassVar[bool] = False

    def __init__(self, role: str, places: Places, *, engine: str = "e0", incarnation: int = 1) -> None:
        super().__init__(role, places, engine=engine, incarnation=incarnation)
        self._recording = _Recording()

    def _dispatch(self, peer: Peer, head: Head, message: Message) -> None:
        self._recording.record(peer, head, message)

    async def receive(self, kind: type[Message] | None = None, *, deadline_s: float = 10.0) -> Any:
        """The next push, of `kind` if given (others before it are an AssertionError)."""
        with trio.fail_after(deadline_s):
            _, _, message = await self._recording.inbox.receive()
        if kind is not None and not isinstance(message, kind):
            raise AssertionError(f"expected {kind.__name__}, got {message!r}")
        return message

    async def receive_request(self, *, deadline_s: float = 10.0) -> tuple[Peer, Head, Message]:
        """The next message with its sender and head, to be answered with `answer(peer, head, reply)`."""
        with trio.fail_after(deadline_s):
            return await self._recording.inbox.receive()


@asynccontextmanager
async def dialled(
    role: str, target: str, places: Places, *, engine: str = "e0", incarnation: int = 1
) -> AsyncIterator[tuple[TestPeer, Peer]]:
    """A TestPeer of `role` connected to the mailbox of `target`: yields (node, peer)."""
    node = TestPeer(role, places, engine=engine, incarnation=incarnation)
    try:
        async with trio.open_nursery() as nursery:
            node.nursery = nursery
            link = node.dial(target)
            with trio.fail_after(10):
                peer = await link.wait_up()
            try:
                yield node, peer
            finally:
                nursery.cancel_scope.cancel()
    finally:
        node.close()


async def ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit code, once it has one; gives way to a deadline, as a thread in `wait()` would not."""
    await wait_exit(process.pid)
    return process.wait()


class TestMailbox(Actor):
    """Listens as any role and records what arrives; answer with `answer(peer, head, reply)`.

    Make one for a role with `mailbox_of(role, accepts)`.
    """

    __test__: ClassVar[bool] = False
    role_name = "none"

    def __init__(self, places: Places, config: Config, *, incarnation: int) -> None:
        super().__init__(places, config, incarnation=incarnation)
        self._recording = _Recording()
        self.ups: list[Peer] = []
        self._up = trio.Event()

    def peer_up(self, peer: Peer) -> None:
        """Remembers who came."""
        self.ups.append(peer)
        self._up.set()
        self._up = trio.Event()

    async def wait_peer(self, role: str, *, deadline_s: float = 10.0) -> Peer:
        """The newest live peer of a role, as soon as there is one."""
        with trio.fail_after(deadline_s):
            while True:
                for peer in reversed(self.ups):
                    if peer.role == role and peer.alive:
                        return peer
                await self._up.wait()

    def _dispatch(self, peer: Peer, head: Head, message: Message) -> None:
        if type(message) in self._handlers:
            super()._dispatch(peer, head, message)
        else:
            self._recording.record(peer, head, message)

    async def receive(self, kind: type[Message] | None = None, *, deadline_s: float = 10.0) -> tuple[Peer, Head, Any]:
        """The next message, of `kind` if given (others before it are an AssertionError)."""
        with trio.fail_after(deadline_s):
            peer, head, message = await self._recording.inbox.receive()
        if kind is not None and not isinstance(message, kind):
            raise AssertionError(f"expected {kind.__name__}, got {message!r}")
        return peer, head, message


def mailbox_of(role: str, accepts: frozenset[str]) -> type[TestMailbox]:
    """A TestMailbox class that listens as `role`."""
    return type(f"Test{role.title()}", (TestMailbox,), {"role_name": role, "accepts": accepts, "__test__": False})
