"""Who is away: what a client that hears nothing tells its user, and when it gives up."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import trio

from ops.admin import SERVICES, admin, snapshots
from shared.curve.allowed import KEY_REFUSED
from shared.links import Link
from shared.lock_files import holder
from shared.messages.front import Away, WhoIsAway
from shared.messages.hello import Snapshot
from shared.paths import Places
from shared.peers import DeadlinePassed, PeerGone, PeerSlow, ProtocolViolation, RequestFailed

QUIET_S = 1.5
"""A client that has waited this long without hearing anything asks who is away."""
ANSWER_S = 1.5
"""A service that does not answer an `admin` within this time counts as away."""
BEHIND_S = 4.0
"""The same for a tokenizer that is asked for the services behind it, which has to ask itself."""
TOLD_S = 12.0
"""How long it counts that the tokenizer said that its engine is away: it says so at each try."""

Loading = Callable[[str, float], None]
"""Called while the worker that is waited for loads its model: what it does, and the share done (0 to 1)."""
Notice = Callable[[tuple[str, ...]], None]
"""Called with the services that are away when that changes; with () when all are back."""
Seen = tuple[tuple[str, ...], bool]
"""Who is away, and whether any of them is starting (and so not to be given up)."""
Looking = Callable[[], AbstractAsyncContextManager[Callable[[], Awaitable[Seen]]]]


class ServiceAway(Exception):
    """Services did not come back within the recovery timeout."""

    def __init__(self, services: tuple[str, ...], seconds: float) -> None:
        names = ", ".join(services)
        super().__init__(f"{names} away for {seconds:.0f} s; `perdure status` where they run tells more")
        self.services = services


class KeyRefused(Exception):
    """The server does not let this client's key in; to try again would change nothing."""


def local(places: Places, loading: Loading | None = None) -> Looking:
    """Asks every service of the home, as `admin`; tells `loading` how far a worker has loaded its model."""

    @asynccontextmanager
    async def looking() -> AsyncIterator[Callable[[], Awaitable[Seen]]]:
        async with admin(places) as node:

            async def look() -> Seen:
                found = {
                    role: one for role, one in (await snapshots(node, deadline_s=ANSWER_S)).items() if role in SERVICES
                }
                worker = found.get("worker")
                if loading is not None and worker is not None and not worker.ready and "loaded" in worker.data:
                    loading(str(worker.data["loading"]), float(worker.data["loaded"]))
                return _missing(found), any(one is not None and not one.ready for one in found.values())

            yield look

    return looking


def remote(links: Mapping[str, Link]) -> Looking:
    """Over TCP nobody answers an `admin`: the links tell of the front, and the tokenizer of what is behind it.

    KeyRefused when a link says so.
    """

    @asynccontextmanager
    async def looking() -> AsyncIterator[Callable[[], Awaitable[Seen]]]:
        async def look() -> Seen:
            for link in links.values():
                if link.refused == KEY_REFUSED:
                    raise KeyRefused(f"the {link.role} does not let us in: {link.refused}")
            away = tuple(role for role, link in links.items() if link.peer is None)
            starting = any("is starting" in links[role].refused for role in away)
            tokenizer = links["tokenizer"].peer
            if tokenizer is None:
                return away, starting
            try:
                behind = await tokenizer.ask(WhoIsAway(), Away, deadline_s=BEHIND_S)
            except (PeerGone, PeerSlow, DeadlinePassed, RequestFailed, ProtocolViolation):
                return ("tokenizer", *away), starting
            return (*behind.services, *away), starting or behind.starting

        yield look

    return looking


class Watch:
    """Looks at all services while somebody waits, keeps `away`, tells `notice`, and gives up after a while.

    Costs nothing while answers flow: nobody is asked before `QUIET_S` of silence.
    """

    def __init__(self, looking: Looking, notice: Notice | None, recovery_timeout_s: float) -> None:
        self.away: tuple[str, ...] = ()
        self._looking = looking
        self._notice = notice
        self._recovery_timeout_s = recovery_timeout_s
        self._since = 0.0
        self._heard = time.monotonic()
        self._told_away = -TOLD_S
        self._waiting = 0

    def heard(self) -> None:
        """An answer came: whoever was away is back, as far as this client is concerned."""
        self._heard = time.monotonic()
        if self.away:
            self._tell(())

    def engine_away(self) -> None:
        """The tokenizer says that its scheduler is away."""
        self._told_away = time.monotonic()

    def wait_begins(self) -> None:
        """Somebody waits for an answer from now on."""
        if not self._waiting:
            self._heard = time.monotonic()
        self._waiting += 1

    def wait_ends(self) -> None:
        """Closes one `wait_begins`."""
        self._waiting -= 1

    def _tell(self, away: tuple[str, ...]) -> None:
        if away and not self.away:
            self._since = time.monotonic()
        changed = away != self.away
        self.away = away
        if changed and self._notice is not None:
            self._notice(away)

    async def run(self, give_up: Callable[[ServiceAway | KeyRefused], None]) -> None:
        """For ever: asks while somebody waits in silence; calls `give_up` once the recovery timeout is over."""
        async with self._looking() as look:
            while True:
                await trio.sleep(QUIET_S / 3)
                if not self._waiting or time.monotonic() - self._heard < QUIET_S:
                    continue
                asked = time.monotonic()
                try:
                    away, starting = await look()
                except KeyRefused as refused:
                    give_up(refused)
                    continue
                if self._heard > asked or not self._waiting:
                    continue
                if not away and asked - self._told_away < TOLD_S:
                    away = ("scheduler",)
                self._tell(away)
                if starting:
                    self._since = time.monotonic()  # it loads a model, say; the supervisor ends what never gets ready
                if self.away and time.monotonic() - self._since >= self._recovery_timeout_s:
                    give_up(ServiceAway(self.away, time.monotonic() - self._since))


def _missing(found: Mapping[str, Snapshot | None]) -> tuple[str, ...]:
    """Services that are away or not ready; the worker too while the scheduler has none."""
    missing = [role for role, snapshot in found.items() if snapshot is None or not snapshot.ready]
    scheduler = found.get("scheduler")
    if not missing and scheduler is not None and not scheduler.data.get("worker_ready", True):
        return ("worker",)
    return tuple(missing)


def stack_runs(places: Places) -> bool:
    """Whether any process of a stack on this home lives, by the locks that it holds."""
    files = [places.lock]
    files += [places.run / f"{service}.{kind}" for service in SERVICES for kind in ("lock", "supervisor")]
    return any(holder(path) is not None for path in files)
