"""Asking running services as role `admin`: status, clear. For commands, the demo and tests."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import trio

from shared.messages import PROTOCOL
from shared.messages.hello import Snapshot, Status
from shared.node import Node
from shared.paths import Places
from shared.peers import DeadlinePassed, Peer, PeerGone, PeerSlow, ProtocolViolation, RequestFailed

SERVICES = ("store", "scheduler", "worker", "tokenizer", "detokenizer")
ANSWER_S = 2.0


@asynccontextmanager
async def admin(places: Places, *, protocol: int = PROTOCOL) -> AsyncIterator[Node]:
    """A node of role `admin`; dial with `node.dial(role)`. `protocol`: what it says that it speaks."""
    node = Node("admin", places, engine="admin", incarnation=time.time_ns() // 1000)
    node.protocol = protocol
    try:
        async with trio.open_nursery() as nursery:
            node.nursery = nursery
            try:
                yield node
            finally:
                node.say_goodbye()
                nursery.cancel_scope.cancel()
    finally:
        node.close()


async def reach(node: Node, role: str, *, deadline_s: float = ANSWER_S) -> Peer | None:
    """The live mailbox of `role`, or None when it does not answer in time."""
    with trio.move_on_after(deadline_s):
        return await node.dial(role).wait_up()
    return None


async def snapshots(node: Node, *, deadline_s: float = ANSWER_S) -> dict[str, Snapshot | None]:
    """What each service says of itself; None for one that is away or does not answer."""
    found: dict[str, Snapshot | None] = dict.fromkeys(SERVICES)

    async def ask(role: str) -> None:
        peer = await reach(node, role, deadline_s=deadline_s)
        if peer is not None:
            try:
                found[role] = await peer.ask(Status(), Snapshot, deadline_s=deadline_s)
            except (PeerGone, PeerSlow, DeadlinePassed, RequestFailed, ProtocolViolation):
                found[role] = None

    async with trio.open_nursery() as nursery:
        for role in SERVICES:
            nursery.start_soon(ask, role)
    return found


def serving(found: Mapping[str, Snapshot | None]) -> bool:
    """Whether every service is ready and the scheduler has worker and store."""
    scheduler = found["scheduler"]
    facts = scheduler.data if scheduler is not None else {}
    all_ready = all(snapshot is not None and snapshot.ready for snapshot in found.values())
    return all_ready and bool(facts.get("worker_ready") and facts.get("store_open"))


async def wait_serving(node: Node, *, deadline_s: float) -> bool:
    """Waits until every service is ready and the scheduler has worker and store; False when that takes too long."""
    with trio.move_on_after(deadline_s):
        while True:
            if serving(await snapshots(node, deadline_s=min(ANSWER_S, deadline_s))):
                return True
            await trio.sleep(0.1)  # a poll of status, not a wait for an effect of ours
    return False
