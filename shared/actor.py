"""The actor contract: one process, one event loop, one mailbox, typed handlers, structured start and stop.

    start (recover state) -> ready -> serve -> drain (SIGTERM) -> goodbye

While an actor starts, its mailbox answers `admin` (status) only; everybody else is refused and dials again. Long
work runs in threads, so that the loop always answers. The supervisor reads heartbeats that this very loop writes.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from typing import Any, ClassVar

import structlog
import trio

from shared.config import Config, ConfigError, load_config
from shared.faults import Faults
from shared.identity import KeyDamaged
from shared.mailbox import Mailbox
from shared.messages.hello import Snapshot, Status
from shared.model.errors import ModelError
from shared.niceness import threads_by_nice
from shared.node import Node, Reject, on
from shared.paths import Lock, PlaceError, Places, default_home
from shared.peers import Peer
from shared.versions import Versions

__all__ = ["Actor", "Peer", "Reject", "on", "run"]

HEARTBEAT_S = 1.0
FILES = 16_384
"""Open files that a service may have: each peer costs one or two, and a soft limit is often 1,024."""

WRONG, TAKEN = 2, 4
REFUSALS: dict[type[Exception], int] = {
    ConfigError: WRONG,
    ModelError: WRONG,
    KeyDamaged: WRONG,
    PlaceError: TAKEN,
    FileExistsError: TAKEN,
}
"""What a person has to put right, by exit code. Everything else, also a ValueError of any library, is a crash: it has
a traceback, and the supervisor tries again.
"""


class Actor(Node):
    """Base of the services. Subclasses set `role_name` and `accepts`, and override the hooks below."""

    role_name: ClassVar[str]
    accepts: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, places: Places, config: Config, *, incarnation: int) -> None:
        self.endpoint_lock = Lock(places.run / f"{self.role_name}.lock", f"the {self.role_name} of this home")
        super().__init__(self.role_name, places, engine=config.scheduler.engine, incarnation=incarnation)
        self.config = config
        self.versions = Versions.announced(config.faults)
        self.protocol = self.versions.protocol
        self.faults = Faults(config.faults)
        self.ready = False
        self.started = time.monotonic()
        self.mailbox = Mailbox(self)
        self.stopping = trio.Event()

    async def start(self) -> None:
        """Recovers state; long work in threads. Raising one of REFUSALS stops the service with one line."""

    async def drain(self) -> None:
        """Finishes or persists what must not be lost; bounded by `supervise.grace_s`."""

    def snapshot(self) -> dict[str, Any]:
        """What `perdure status` shows of this service; plain values only."""
        return {}

    @on(Status)
    def _status(self, peer: Peer, message: Status) -> Snapshot:
        data = self.snapshot() | {
            "links": {role: _link_facts(link.peer, link.refused, link.down_since) for role, link in self.links.items()},
            "drops": dict(self.drops),
            "faults": self.faults.active,
            "threads_by_nice": threads_by_nice(),
        }
        if self.mailbox.door is not None:
            data["tcp"] = self.mailbox.door.facts()
        return Snapshot(
            role=self.role,
            engine=self.engine,
            incarnation=self.incarnation,
            pid=self.pid,
            uptime_s=time.monotonic() - self.started,
            ready=self.ready,
            protocol=self.versions.protocol,
            state=self.versions.state,
            data=data,
        )

    def request_stop(self) -> None:
        """Begins the planned stop; idempotent."""
        self.stopping.set()

    async def serve(self, *, on_ready: "trio.Event | None" = None, supervisor_fd: int = -1) -> None:
        """Runs the whole life of the actor; returns after the planned stop."""
        try:
            async with trio.open_nursery() as outer, trio.open_nursery() as nursery:
                self.nursery = nursery
                self.mailbox.bind()
                outer.start_soon(self.mailbox.run)
                if supervisor_fd >= 0:
                    outer.start_soon(self._heartbeat, supervisor_fd)
                await self.start()
                self.ready = True
                for link in self.links.values():
                    link.start(nursery)
                self.log.info("ready", seconds=round(time.monotonic() - self.started, 3))
                if supervisor_fd >= 0:
                    _tell_supervisor(supervisor_fd, b"r")
                if on_ready is not None:
                    on_ready.set()
                await self.stopping.wait()
                with trio.move_on_after(self.config.supervise.grace_s) as patience:
                    await self.drain()
                if patience.cancelled_caught:
                    self.log.warning("drain_cut", after_s=self.config.supervise.grace_s)
                self.say_goodbye()
                nursery.cancel_scope.cancel()
                outer.cancel_scope.cancel()
        finally:
            self.mailbox.close()
            self.close()
            self.endpoint_lock.release()

    async def _heartbeat(self, fd: int) -> None:
        while _tell_supervisor(fd, b"h"):  # noqa: ASYNC110 - a beat, not a wait
            await trio.sleep(HEARTBEAT_S)


def _tell_supervisor(fd: int, news: bytes) -> bool:
    """False when the supervisor is gone: the watchdog stops us then, and the drain shall have its time."""
    try:
        return os.write(fd, news) > 0
    except BrokenPipeError:
        return False


def _link_facts(peer: Peer | None, refused: str, down_since: float) -> dict[str, Any]:
    now = time.monotonic()
    if peer is None:
        return {"up": False, "for_s": round(now - down_since, 1), "refused": refused}
    return {"up": True, "incarnation": peer.incarnation, "silent_s": round(now - peer.heard, 1)}


def configure_logging() -> None:
    """JSON lines on stderr, one an event, with the time in UTC."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(20),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )


def allow_files() -> None:
    """Raises this process's soft limit of open files as far as the hard one lets it, at most to FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _continue_when_supervisor_dies() -> None:
    """A stopped process could not see its watchdog pipe close: let the kernel continue it when its parent dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGCONT, 0, 0, 0)


def _watch_supervisor(fd: int, grace_s: float) -> None:
    """Blocks in a thread until the supervisor is gone (its pipe closes), then stops this process for certain."""
    while os.read(fd, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(75)


async def _main(actor: Actor, supervisor_fd: int) -> None:
    async with trio.open_nursery() as nursery:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:

            async def stop_on_signal() -> None:
                async for _ in signals:
                    actor.request_stop()

            nursery.start_soon(stop_on_signal)
            await actor.serve(supervisor_fd=supervisor_fd)
            nursery.cancel_scope.cancel()


def run(actor_class: type[Actor]) -> None:
    """Body of `services/X/__main__.py`. Exit codes: 0 planned stop, 2 and 4 see REFUSALS, 1 a crash."""
    configure_logging()
    allow_files()
    supervisor_fd = int(os.environ.pop("PERDURE_SUPERVISOR_FD", "-1"))
    watchdog_fd = int(os.environ.pop("PERDURE_WATCHDOG_FD", "-1"))
    incarnation = int(os.environ.get("PERDURE_INCARNATION", "0")) or time.time_ns() // 1_000_000
    try:
        config = load_config()
        places = Places(default_home())
        places.make()
        if watchdog_fd >= 0:
            _continue_when_supervisor_dies()
            arguments = (watchdog_fd, config.supervise.grace_s)
            threading.Thread(target=_watch_supervisor, args=arguments, daemon=True, name="watchdog").start()
        actor = actor_class(places, config, incarnation=incarnation)
        trio.run(_main, actor, supervisor_fd)
    except Exception as error:
        reason, code = _refusal(error)
        if not code:
            raise
        structlog.get_logger(role=actor_class.role_name).error("cannot_start", reason=reason, exit_code=code)
        sys.exit(code)


def _refusal(error: Exception) -> tuple[str, int]:
    """One line and the exit code; code 0 when anything in the group is a crash, which must not be hidden."""
    if isinstance(error, ExceptionGroup):
        inner = [_refusal(one) for one in error.exceptions]
        return inner[0] if all(code for _, code in inner) else ("", 0)
    return str(error), next((code for kind, code in REFUSALS.items() if isinstance(error, kind)), 0)
