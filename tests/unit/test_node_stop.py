"""A node that stops takes no new tasks, and a message that comes then must not end it in the middle of its stop."""

import trio

from shared.messages import Head
from shared.messages.front import Cancel, Cancelled
from shared.node import Node, on
from shared.paths import Places
from shared.peers import Peer


class Answering(Node):
    """Answers in a task of its own."""

    @on(Cancel)
    async def _cancel(self, peer: Peer, message: Cancel) -> Cancelled:
        return Cancelled(id=message.id, known=True)


async def test_a_request_that_comes_while_a_node_stops_is_left_to_its_successor(places: Places) -> None:
    sent: list[list[bytes]] = []
    node = Answering("tokenizer", places, engine="e0", incarnation=1)
    peer = Peer(role="client", engine="e0", incarnation=1, pid=1, send_frames=sent.append)
    async with trio.open_nursery() as nursery:
        node.nursery = nursery
        node.accept(peer, Head(1, rid=1), Cancel(id="a"))
    assert len(sent) == 1
    async with trio.open_nursery() as nursery:
        node.nursery = nursery
        nursery.cancel_scope.cancel()
        node.accept(peer, Head(1, rid=2), Cancel(id="b"))
    node.accept(peer, Head(1, rid=3), Cancel(id="c"))  # the nursery is closed by now
    assert len(sent) == 1
    node.close()
