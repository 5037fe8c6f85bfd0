"""The other end of one live connection, seen the same way from the side that dials and the side that listens."""

import errno
import itertools
import os
import select
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import trio
import zmq

from shared.identity import LOCAL
from shared.messages import Head, Message, encode
from shared.messages.hello import Failed

Reply = TypeVar("Reply", bound=Message)
MAX_CALLS = 4096
EXIT_RETRY_S = 1.0
MAX_PID = 1 << 22
"""The kernel's own bound; no process has a larger number."""


class PeerGone(Exception):
    """The connection is over: its process exited, said goodbye, or was replaced."""


class PeerSlow(Exception):
    """The peer's queue is full; nothing was sent."""


class DeadlinePassed(Exception):
    """No answer came in time; one that comes late is dropped (`call` hears of it instead)."""


class RequestFailed(Exception):
    """The peer answered Failed."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class ProtocolViolation(Exception):
    """The peer answered with a message of another kind."""


class _Waiting:
    """One request that waits for its answer."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.reply: Message | None = None


class Peer:
    """One connection to one incarnation of one service (or client).

    A restarted service is a new Peer: what was meant for the old one never reaches the new. `principal` owns what the
    peer submits: over ipc that is this user, since the run dir is 0700; over TCP (`remote`) the owner of `key`, the
    public key of the connection. A remote clock is not ours, so deadlines travel as seconds that are left.
    """

    def __init__(
        self,
        *,
        role: str,
        engine: str,
        incarnation: int,
        pid: int,
        send_frames: Callable[[list[bytes]], None],
        principal: str = LOCAL,
        key: str = "",
        remote: bool = False,
    ) -> None:
        self.role = role
        self.engine = engine
        self.incarnation = incarnation
        self.pid = pid
        self.principal = principal
        self.key = key
        self.remote = remote
        self.alive = True
        self.exit_proven = False
        self.heard = time.monotonic()
        self._send_frames = send_frames
        self._waiting: dict[int, _Waiting] = {}
        self._called: dict[int, Callable[[Message], None]] = {}
        self._rids = itertools.count(1)
        self._gone = trio.Event()

    @property
    def name(self) -> str:
        """`role/engine/incarnation`, for logs."""
        return f"{self.role}/{self.engine}/{self.incarnation}"

    def send(self, message: Message, *, rid: int = 0, re: int = 0, deadline: float = 0.0) -> None:
        """Queues a message; never blocks. PeerGone or PeerSlow."""
        if not self.alive:
            raise PeerGone(f"{self.name} is gone")
        if self.remote and deadline:
            deadline = max(deadline - time.monotonic(), 0.001)
        try:
            self._send_frames(encode(Head(self.incarnation, rid, re, deadline), message))
        except zmq.Again:
            raise PeerSlow(f"{self.name} does not keep up") from None
        except zmq.ZMQError as error:
            raise PeerGone(f"{self.name} is gone: {error}") from None

    async def ask(
        self, message: Message, reply_type: type[Reply] | tuple[type[Any], ...], *, deadline_s: float
    ) -> Reply:
        """Sends a request and waits for its answer, at most `deadline_s` seconds (which travel with it).

        Raises PeerGone, PeerSlow, DeadlinePassed, RequestFailed, ProtocolViolation.
        """
        rid = next(self._rids)
        waiting = self._waiting[rid] = _Waiting()
        try:
            self.send(message, rid=rid, deadline=time.monotonic() + deadline_s)
            with trio.move_on_after(deadline_s):
                await waiting.done.wait()
        finally:
            del self._waiting[rid]
        if waiting.reply is None:
            if not self.alive:
                raise PeerGone(f"{self.name} is gone")
            raise DeadlinePassed(f"{self.name} did not answer {type(message).__name__} within {deadline_s:g} s")
        if isinstance(waiting.reply, Failed):
            raise RequestFailed(waiting.reply.code, waiting.reply.reason)
        if not isinstance(waiting.reply, reply_type):
            raise ProtocolViolation(
                f"{self.name} answered {type(message).__name__} with {type(waiting.reply).__name__}"
            )
        return cast("Reply", waiting.reply)

    def call(self, message: Message, on_reply: Callable[[Message], None], *, deadline_s: float) -> None:
        """Sends a request; its answer, however late, is handed to `on_reply` in order with this peer's other messages.

        `ask` can't promise that order, since its caller wakes up later. `on_reply` must not raise; it is not called
        when the connection ends first. Only the newest MAX_CALLS are waited for. PeerGone or PeerSlow.
        """
        rid = next(self._rids)
        self.send(message, rid=rid, deadline=time.monotonic() + deadline_s)
        self._called[rid] = on_reply
        if len(self._called) > MAX_CALLS:
            del self._called[next(iter(self._called))]

    def deliver(self, re: int, message: Message) -> bool:
        """Hands an answer to whoever asked; False when nobody does (any more)."""
        on_reply = self._called.pop(re, None)
        if on_reply is not None:
            on_reply(message)
            return True
        waiting = self._waiting.get(re)
        if waiting is None or waiting.reply is not None:
            return False
        waiting.reply = message
        waiting.done.set()
        return True

    def end(self, *, exit_proven: bool) -> None:
        """Marks the connection as over; whoever waits gets PeerGone. Idempotent."""
        self.alive = False
        self.exit_proven = self.exit_proven or exit_proven
        self._gone.set()
        self._called.clear()
        for waiting in self._waiting.values():
            waiting.done.set()

    async def wait_gone(self) -> None:
        """Returns once the connection is over."""
        await self._gone.wait()


def has_exited(pid: int) -> bool:
    """Whether the process has exited for certain; False also when that can't be found out."""
    try:
        fd = os.pidfd_open(pid)
    except OSError as error:
        return error.errno == errno.ESRCH
    try:
        poll = select.poll()  # and not select(): a descriptor may be larger than it takes
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(fd)


async def wait_exit(pid: int) -> None:
    """Returns once the process has exited (pidfd, so a proof and no guess); at once when there is none.

    Without a file to spare it tries again: to know late is better than to end for it.
    """
    while True:
        try:
            fd = os.pidfd_open(pid)
            break
        except ProcessLookupError:
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            await trio.sleep(EXIT_RETRY_S)
    try:
        await trio.lowlevel.wait_readable(fd)
    finally:
        os.close(fd)
