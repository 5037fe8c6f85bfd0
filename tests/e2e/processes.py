"""Real services as processes of a test, started and killed one by one, on the toy model; no supervisor, no store.

Replacing a dead service by hand, with other fault hooks than before, is what the supervisor can't do for a test.
"""

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from ops.admin import admin, reach
from shared.messages.hello import Snapshot, Status
from shared.node import Node
from shared.paths import Places
from shared.peers import DeadlinePassed, PeerGone

ROOT = Path(__file__).resolve().parents[2]
SEED = 7
FRONT = ("scheduler", "worker", "tokenizer", "detokenizer")


class Processes:
    """The services of one home; each `start` is the next incarnation of its role."""

    def __init__(self, places: Places, node: Node, settings: dict[str, str]) -> None:
        self.places = places
        self._node = node
        self._settings = settings
        self._running: dict[str, trio.Process] = {}
        self._incarnations: dict[str, int] = {}

    async def start(self, role: str, **hooks: str) -> None:
        """Starts a service, with fault hooks if given, and waits until it is ready."""
        incarnation = self._incarnations[role] = self._incarnations.get(role, 0) + 1
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
        environ = clean | self._settings
        environ |= {"PERDURE_HOME": str(self.places.home), "PERDURE_INCARNATION": str(incarnation)}
        environ |= {f"PERDURE_FAULTS__HOOKS__{hook.upper()}": action for hook, action in hooks.items()}
        log = (self.places.home / f"{role}.log").open("ab")
        with log:
            self._running[role] = await trio.lowlevel.open_process(
                [sys.executable, "-m", f"services.{role}"], cwd=ROOT, env=environ, stdout=log, stderr=log
            )
        with trio.fail_after(60):
            while not await self._is_ready(role, incarnation):
                await trio.lowlevel.checkpoint()  # asking for its status takes a while by itself

    async def _is_ready(self, role: str, incarnation: int) -> bool:
        if self._running[role].poll() is not None:
            raise AssertionError(f"{role} ended: {(self.places.home / f'{role}.log').read_text()[-2000:]}")
        snapshot = await self.snapshot(role)
        return snapshot is not None and snapshot.ready and snapshot.incarnation == incarnation

    async def snapshot(self, role: str) -> Snapshot | None:
        """What a service says of itself, None while it is away."""
        peer = await reach(self._node, role, deadline_s=1.0)
        try:
            return None if peer is None else await peer.ask(Status(), Snapshot, deadline_s=5.0)
        except (PeerGone, DeadlinePassed):
            return None

    async def wait_end(self, role: str) -> None:
        """Returns once the service has ended by itself, as its fault hook says."""
        with trio.fail_after(60):
            await self._running.pop(role).wait()

    async def kill(self, *roles: str) -> None:
        """SIGKILL, all at once, and waits for the exits."""
        for role in roles:
            self._running[role].send_signal(signal.SIGKILL)
        for role in roles:
            await self._running.pop(role).wait()

    async def replace(self, role: str) -> None:
        """SIGKILL and the next incarnation."""
        await self.kill(role)
        await self.start(role)


@asynccontextmanager
async def processes(places: Places, settings: dict[str, str] | None = None) -> AsyncIterator[Processes]:
    """None runs at first; whatever runs at the end is killed."""
    settings = {"PERDURE_MODEL__SOURCE": f"toy:{SEED}", "PERDURE_STORE__HOST_BYTES": "1 MiB"} | (settings or {})
    async with admin(places) as node:
        running = Processes(places, node, settings)
        try:
            yield running
        finally:
            with trio.CancelScope(shield=True):
                await running.kill(*running._running)
