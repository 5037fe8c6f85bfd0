"""Messages of the actor contract itself: hello, heartbeat, failure, status.

Hello and Refused are what two versions of the code say to each other before either knows the other's: they keep their
shape for ever (a field may be added to neither), whatever PROTOCOL becomes.
"""

from typing import Any

from shared.messages.base import PROTOCOL, Message


class Hello(Message, frozen=True, kw_only=True):
    """First message of every connection, from the side that dials."""

    protocol: int = PROTOCOL
    role: str
    engine: str
    incarnation: int
    pid: int


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to a hello that is accepted; `incarnation` goes into `Head.to` from now on."""

    protocol: int = PROTOCOL
    role: str
    engine: str
    incarnation: int
    pid: int


class Refused(Message, frozen=True, kw_only=True):
    """Answer to a hello that is not accepted; the connection carries nothing else."""

    protocol: int = PROTOCOL
    reason: str


class Bye(Message, frozen=True, kw_only=True):
    """This side stops as planned; the connection carries nothing more."""


class Ping(Message, frozen=True, kw_only=True):
    """Heartbeat of a link."""


class Pong(Message, frozen=True, kw_only=True):
    """Answer to a ping, sent by the event loop itself."""


class Failed(Message, frozen=True, kw_only=True):
    """A request could not be handled; `code` is one of the reject codes or `internal`."""

    code: str
    reason: str


class Status(Message, frozen=True, kw_only=True):
    """Asks any mailbox for a snapshot of its service (role `admin`)."""


class Snapshot(Message, frozen=True, kw_only=True):
    """What a service says about itself. `data` holds plain values only; keys are documented per service.

    `protocol`, `state`: what it was built for, see `shared/versions.py`.
    """

    role: str
    engine: str
    incarnation: int
    pid: int
    uptime_s: float
    ready: bool
    protocol: int = 0
    state: int = 0
    data: dict[str, Any]
