"""Messages to one peer that must arrive in order, or not at all when the peer is gone.

The engine bounds what is on its way (one plan, so many copies, so many leases), so this needs no bound of its own.
"""

from collections import deque

from shared.messages import Message
from shared.peers import Peer, PeerGone, PeerSlow


class Outbox:
    """A queue in front of a peer that may be slow; without a peer everything is dropped."""

    def __init__(self) -> None:
        self.peer: Peer | None = None
        self._queue: deque[Message] = deque()

    def connect(self, peer: Peer | None) -> None:
        """From now on for this peer; what was meant for the one before is dropped."""
        self.peer = peer
        self._queue.clear()

    def send(self, message: Message) -> None:
        """Queues and sends what fits."""
        if self.peer is not None:
            self._queue.append(message)
            self.flush()

    def flush(self) -> bool:
        """Sends what fits; False when something is left for later."""
        while self._queue:
            assert self.peer is not None
            try:
                self.peer.send(self._queue[0])
            except PeerSlow:
                return False
            except PeerGone:
                self._queue.clear()
                return True
            self._queue.popleft()
        return True
