"""ZeroMQ under trio: one small adapter on the socket's file descriptor.

Why our own: general adapters lose messages when a receive is cancelled, and cost three times as much. The rules
that make this one right:

1. A message is taken only after the last checkpoint, so a cancelled receive has taken nothing.
2. EVENTS is read right before `wait_readable`, with no await in between: the descriptor is edge-triggered.
3. One task receives on a socket; a second one is an error, not a race.
4. After every send EVENTS is looked at again: a send can swallow the edge that the receiver waits for.
5. `notify_closing` comes before close, so that a waiting receiver ends with ClosedResourceError.

Sends never block: a full queue means a slow peer, and who may be slow is a matter of credits, not of waiting here.
"""

import trio
import zmq

HIGH_WATER = 4096
"""Messages queued per peer and direction before a send is refused."""


class Socket:
    """A ZeroMQ socket owned by one trio run. Not for use from other threads."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", kind: int, *, max_frame: int) -> None:
        self._zmq = context.socket(kind)
        self._zmq.setsockopt(zmq.LINGER, 0)
        self._zmq.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self._zmq.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self._zmq.setsockopt(zmq.MAXMSGSIZE, max_frame)
        self._fd = int(self._zmq.getsockopt(zmq.FD))
        self._nap: trio.CancelScope | None = None
        self._receiving = False

    @property
    def raw(self) -> "zmq.Socket[bytes]":
        """The socket itself, for options, bind and connect."""
        return self._zmq

    async def recv_many(self, limit: int = 64) -> list[list[bytes]]:
        """Waits for at least one message, then takes up to `limit` that are there. Frames per message."""
        if self._receiving:
            raise trio.BusyResourceError("another task receives on this socket")
        self._receiving = True
        try:
            await self._wait_for_input()
            while True:
                taken: list[list[bytes]] = []
                try:
                    while len(taken) < limit:
                        taken.append(self._recv())
                except zmq.Again:
                    pass
                except zmq.ZMQError as error:
                    if not taken:
                        raise trio.ClosedResourceError("the socket is closed") from error
                if taken:
                    return taken
                await self._wait_for_input()
        finally:
            self._receiving = False

    def _recv(self) -> list[bytes]:
        return self._zmq.recv_multipart(zmq.NOBLOCK)

    def _readable(self) -> bool:
        return bool(int(self._zmq.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    async def _wait_for_input(self) -> None:
        """One checkpoint, whether there is input already or only then."""
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            if self._readable():
                await trio.lowlevel.cancel_shielded_checkpoint()
                return
        except zmq.ZMQError as error:
            raise trio.ClosedResourceError("the socket is closed") from error
        with trio.CancelScope() as self._nap:
            await trio.lowlevel.wait_readable(self._fd)
        self._nap = None

    def send_nowait(self, frames: list[bytes]) -> None:
        """Sends or raises: zmq.Again when the peer's queue is full, zmq.ZMQError(EHOSTUNREACH) when it is unknown."""
        try:
            self._zmq.send_multipart(frames, zmq.NOBLOCK)
        finally:
            if self._nap is not None and not self._zmq.closed and self._readable():
                self._nap.cancel()

    def close(self, *, linger_ms: int = 0) -> None:
        """Closes at once, giving what is queued `linger_ms` to leave; idempotent."""
        if not self._zmq.closed:
            trio.lowlevel.notify_closing(self._fd)
            self._zmq.close(linger_ms)
