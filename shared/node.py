"""Dispatch and dialling: what services and clients have in common.

A node handles typed messages (`@on`), keeps links to the mailboxes that it dials, and survives whatever bytes come.
"""

import inspect
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeVar

import msgspec
import structlog
import trio
import zmq

from shared.curve.keys import Remote
from shared.links import Link
from shared.messages import PROTOCOL, Head, Message
from shared.messages.hello import Bye, Failed, Ping, Pong
from shared.paths import Places
from shared.peers import Peer, PeerGone, PeerSlow

Handler = TypeVar("Handler", bound=Callable[..., Any])
MAX_HANDLERS = 8192
"""Messages that async handlers work on at the same time; more are answered `overloaded`."""
MAX_HANDLERS_A_PEER = 4096


class Reject(Exception):
    """Raised by a handler to answer Failed(code, reason)."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


def on(kind: type[Message], *, roles: frozenset[str] | None = None) -> Callable[[Handler], Handler]:
    """Marks a method `(self, peer, message)` as the handler of one message type, from `roles` only if given.

    A plain method runs in the receive loop, so that one peer's messages are handled in order; an async one is
    spawned. The message it returns answers the request. With a third parameter, `head`, the method is given the
    envelope's head too: it may return None and `answer(peer, head, reply)` later, or look at the deadline.
    """

    def mark(handler: Handler) -> Handler:
        handler._handles = (kind, roles)  # type: ignore[attr-defined]
        return handler

    return mark


class Node:
    """Base of actors and clients. Owns the links; the subclass owns what the messages mean."""

    _handlers: ClassVar[dict[type[Message], tuple[str, frozenset[str] | None, bool, bool]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        found = dict(cls._handlers)
        for name, member in inspect.getmembers(cls, inspect.isfunction):
            if hasattr(member, "_handles"):
                kind, roles = member._handles
                wants_head = "head" in inspect.signature(member).parameters
                found[kind] = (name, roles, inspect.iscoroutinefunction(member), wants_head)
        cls._handlers = found

    def __init__(self, role: str, places: Places, *, engine: str, incarnation: int) -> None:
        self.role = role
        self.places = places
        self.engine = engine
        self.incarnation = incarnation
        self.pid = os.getpid()
        self.protocol = PROTOCOL
        """What this node says that it speaks; whoever says anything else is refused at the hello."""
        self.log: structlog.stdlib.BoundLogger = structlog.get_logger(role=role, incarnation=incarnation)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.links: dict[str, Link] = {}
        self.drops: Counter[str] = Counter()
        self.nursery: trio.Nursery
        self._warned: dict[str, float] = {}
        self._handling: Counter[Peer] = Counter()
        self._handling_all = 0

    def dial(self, role: str, remote: Remote | None = None) -> Link:
        """A link to the mailbox of `role`, kept alive for as long as this node lives; over ipc unless `remote`."""
        if role not in self.links:
            self.links[role] = Link(self, role, remote)
            if hasattr(self, "nursery"):
                self.links[role].start(self.nursery)
        return self.links[role]

    def peer_up(self, peer: Peer) -> None:
        """A connection stands. Called before its first message."""

    def peer_down(self, peer: Peer, exit_proven: bool) -> None:
        """A connection is over; `exit_proven` only when its process has exited for certain."""

    def dropped(self, why: str, detail: str = "") -> None:
        """Counts something that was not worth handling; says so at most once a second per kind."""
        self.drops[why] += 1
        if self._may_say(why):
            self.log.warning("dropped", why=why, detail=detail[:200], count=self.drops[why])

    def _may_say(self, why: str) -> bool:
        """Whether a second has passed since this was said last."""
        now = time.monotonic()
        if now - self._warned.get(why, -1.0) < 1.0:
            return False
        self._warned[why] = now
        return True

    def accept(self, peer: Peer, head: Head, message: Message) -> None:
        """One decoded envelope from a known peer: heartbeat, answer, request or push. Never raises."""
        if not (math.isfinite(head.deadline) and head.deadline >= 0):
            self.dropped("bad_message", f"{peer.name}: a deadline of {head.deadline}")
            return
        if peer.remote and head.deadline:
            head = msgspec.structs.replace(head, deadline=time.monotonic() + head.deadline)
        if head.to != self.incarnation:
            self.dropped("other_incarnation", f"{peer.name} meant incarnation {head.to}")
        elif head.re:
            if not peer.deliver(head.re, message):
                self.drops["unasked"] += 1  # most often an answer after its deadline: nothing to warn of
        elif isinstance(message, Ping):
            self._push(peer, Pong())
        elif isinstance(message, Pong):
            pass
        elif head.deadline and time.monotonic() > head.deadline:
            self.dropped("deadline", f"{type(message).__name__} of {peer.name}")
            self.answer(peer, head, Failed(code="deadline", reason="the request arrived after its deadline"))
        else:
            self._dispatch(peer, head, message)

    def _dispatch(self, peer: Peer, head: Head, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is None or (handler[1] is not None and peer.role not in handler[1]):
            self.dropped("unexpected", f"{type(message).__name__} of {peer.name}")
            reason = f"{self.role} takes no {type(message).__name__} from a {peer.role}"
            self.answer(peer, head, Failed(code="unsupported", reason=reason))
            return
        method = getattr(self, handler[0])
        if handler[3]:
            method = partial(method, head=head)
        if handler[2]:
            if self.nursery.cancel_scope.cancel_called:
                return  # stopping: it is for our successor
            own = self._handling[peer]
            if own >= MAX_HANDLERS_A_PEER or self._handling_all >= MAX_HANDLERS:
                self.dropped("busy", f"{type(message).__name__} of {peer.name}: {own} of its messages are in work")
                reason = f"{own} messages of yours are in work, {self._handling_all} in all; at most"
                reason += f" {MAX_HANDLERS_A_PEER} and {MAX_HANDLERS} are; try again"
                self.answer(peer, head, Failed(code="overloaded", reason=reason))
                return
            self._handling[peer] += 1
            self._handling_all += 1
            self.nursery.start_soon(self._handle_async, method, peer, head, message)
            return
        try:
            reply = method(peer, message)
        except Exception as error:
            reply = self._failure(message, error)
        if reply is not None:
            self.answer(peer, head, reply)

    async def _handle_async(self, method: Callable[..., Any], peer: Peer, head: Head, message: Message) -> None:
        try:
            reply = await method(peer, message)
        except Exception as error:
            reply = self._failure(message, error)
        finally:
            self._handling_all -= 1
            self._handling[peer] -= 1
            if not self._handling[peer]:
                del self._handling[peer]
        if reply is not None:
            self.answer(peer, head, reply)

    def _failure(self, message: Message, error: Exception) -> Failed:
        if isinstance(error, Reject):
            return Failed(code=error.code, reason=error.reason)
        self.drops["handler_failed"] += 1
        if self._may_say(f"handler_failed {type(message).__name__}"):
            self.log.error("handler_failed", message=type(message).__name__, exc_info=error)
        return Failed(code="internal", reason=f"{type(error).__name__}: {error}")

    def handled(self) -> None:
        """All messages that had come by now are handled; more are waited for."""

    def answer(self, peer: Peer, head: Head, message: Message) -> None:
        """Answers a request, if it wants an answer and the peer still listens."""
        if head.rid:
            self._push(peer, message, re=head.rid)

    def _push(self, peer: Peer, message: Message, *, re: int = 0) -> None:
        try:
            peer.send(message, re=re)
        except (PeerGone, PeerSlow) as error:
            self.dropped("unanswered", str(error))

    def say_goodbye(self) -> None:
        """Lets whoever we dialled forget this node at once instead of after a long silence."""
        for link in self.links.values():
            if link.peer is not None:
                self._push(link.peer, Bye())

    def close(self) -> None:
        """Closes every socket; nothing queued is waited for."""
        for link in self.links.values():
            link.close()
        self.context.destroy(linger=0)
