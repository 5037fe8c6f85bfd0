"""Who is welcome at a mailbox: everything that a hello must get right, and why not."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shared.lock_files import holder
from shared.messages.hello import Hello
from shared.paths import Places
from shared.peers import MAX_PID, Peer, has_exited

if TYPE_CHECKING:
    from shared.actor import Actor

MAX_PEERS = 4096
MAX_PEERS_A_USER = 32
"""Connections of one user's keys over TCP."""
MAX_NAME = 64
MAX_INCARNATION = 1 << 63
STATEFUL = frozenset({"tokenizer", "scheduler", "worker", "detokenizer", "store"})
"""Services of which one incarnation lives at a time. (Two gateways do, while one takes over.)"""
ENGINE = frozenset({"tokenizer", "worker", "detokenizer"})
"""Services that belong to one engine and dial its scheduler."""
SERVICES = STATEFUL | {"gateway"}


class OnFile:
    """Which process is a service of this home, by the lock that it holds."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def __call__(self, role: str) -> int | None:
        """The holder's pid; None when nobody holds the lock (nobody runs, or it runs without one)."""
        return holder(self._places.run / f"{role}.lock")


def refusal(
    actor: "Actor",
    peers: Mapping[tuple[bool, bytes], Peer],
    address: tuple[bool, bytes],
    hello: Hello,
    principal: str,
    on_file: OnFile,
) -> str:
    """Why this hello is not accepted, or ""."""
    remote = address[0]
    if hello.protocol != actor.protocol:
        return f"protocol {hello.protocol} is not ours, {actor.protocol}; run `perdure restart --all`"
    if not (1 <= len(hello.engine) <= MAX_NAME and hello.engine.isprintable()):
        return f"an engine's name of {len(hello.engine)} characters is none; 1 to {MAX_NAME} printable ones are"
    if not 0 <= hello.incarnation < MAX_INCARNATION:
        return f"incarnation {hello.incarnation} is out of range"
    if not remote and not 1 <= hello.pid <= MAX_PID:
        return f"there is no process {hello.pid}"
    taken = frozenset({"client"}) if remote else actor.accepts | {"admin"}
    if hello.role not in taken:
        return f"the {actor.role} takes no {hello.role[:MAX_NAME]}" + (" over TCP" if remote else "")
    if hello.role in ENGINE and hello.engine != actor.engine:
        return f"this is engine {actor.engine}, not {hello.engine}"
    if not actor.ready and hello.role != "admin":
        return f"the {actor.role} is starting"
    known = peers.get(address)
    if known is not None:
        same = (known.role, known.engine, known.incarnation) == (hello.role, hello.engine, hello.incarnation)
        return "" if same and (remote or known.pid == hello.pid) else "this identity belongs to another peer"
    if len(peers) >= MAX_PEERS:
        return f"{len(peers)} peers are connected, the limit is {MAX_PEERS}"
    if remote:
        own = sum(peer.remote and peer.principal == principal for peer in peers.values())
        if own >= MAX_PEERS_A_USER:
            return f"user {principal} has {own} connections, the limit is {MAX_PEERS_A_USER}"
    if hello.role in SERVICES:
        return _succession(peers, hello) or _impostor(hello, on_file)
    return ""


def _succession(peers: Mapping[tuple[bool, bytes], Peer], hello: Hello) -> str:
    """An older incarnation is over; a newer one exists only once the exit of the one before is proven."""
    for other in peers.values():
        if other.role != hello.role or other.engine != hello.engine:
            continue
        if other.incarnation > hello.incarnation:
            return f"incarnation {other.incarnation} is here, {hello.incarnation} is over"
        if hello.role in STATEFUL and other.pid != hello.pid and not has_exited(other.pid):
            return f"incarnation {other.incarnation} is here (process {other.pid}); its exit is not proven"
    return ""


def _impostor(hello: Hello, on_file: OnFile) -> str:
    """The one process that holds a service's lock is that service."""
    pid = on_file(hello.role) if hello.role in STATEFUL else None
    return "" if pid is None or pid == hello.pid else f"the {hello.role} of this home is process {pid}, not {hello.pid}"
