"""The supervisor's shell: spawns, watches and stops one service process.

    supervisor ──── heartbeat pipe ◄── "r" once ready, "h" each second ── service's event loop
    supervisor ──── watchdog pipe ───► end of file = the supervisor is gone: the service stops itself

SIGHUP: a planned restart of the service, with the code that now lies on disk. SIGUSR1: stop it and hold; SIGUSR2 (or
HOLD_S without one): start it again. With the two, all services of a stack change their code at once.

Each life of the service is one run of the event loop; between two runs the next one is forked (`fork.py`), in a
session of its own, so that a terminal's or honcho's signals reach it once, through here. Its exit is taken from a
pidfd: a proof. A service whose loop writes nothing for `hang_s`, and does
not merely wait for a core, is killed with SIGKILL, which a stopped process obeys too. Should the supervisor itself be
killed while its service is stopped, the service is continued by the kernel (PDEATHSIG, set by the service) and finds
the watchdog pipe closed.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import structlog
import trio

from ops.supervise.fork import SIGNALS, Process, entry_of, hold_signals, take_signals
from ops.supervise.incarnation import next_incarnation
from ops.supervise.policy import RestartPolicy
from ops.supervise.silence import hangs, sign_of
from shared.config import Config
from shared.niceness import lower_process, yield_session
from shared.paths import Lock, Places
from shared.peers import wait_exit

STACK_PID = "PERDURE_STACK_PID"
STARTER_PID = "PERDURE_STARTER_PID"
"""Set by a program that starts a stack for itself (a test, a benchmark): the stack ends with it. A user's does not."""
YIELDING = frozenset({"tokenizer", "detokenizer", "gateway"})
"""Services whose work may wait a little when the compute threads need the cores, once they are ready."""
YIELD_AGAIN_S = 0.15
"""Between two tries to lower a session: the kernel takes one such change in a tenth of a second."""
HOLD_S = 60.0
"""How long a service is held stopped when whoever asked for it does not come back."""


def session_nice(service: str, config: Config) -> int:
    """How much a service's session yields to other sessions, where the kernel groups them.

    The store lowers its IO threads itself. In a session of their own that would count for nothing: a single thread
    would get the share of a core for which the worker's compute threads have to add up. So its session yields, and
    inside it the event loop goes before the IO.
    """
    if service in YIELDING:
        return config.supervise.nice
    return config.store.nice if service == "store" else 0


def ancestors(parent: int, stack: str) -> set[int]:
    """Whose end is ours, too: the parent, the process that `perdure serve` became, and a honcho behind the parent.

    honcho puts a process of its own between itself and each service; that one outlives a killed honcho.
    """
    found = {parent}
    if stack.isdecimal():
        found.add(int(stack))
    try:
        grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        if b"honcho" in Path(f"/proc/{grandparent}/cmdline").read_bytes():
            found.add(grandparent)
    except (OSError, ValueError, IndexError):
        pass
    return {pid for pid in found if pid > 1}


class Child:
    """One incarnation of the service."""

    def __init__(self, service: str, entry: ModuleType, incarnation: int, ours: Sequence[int]) -> None:
        """Starts it. `ours`: file descriptors that it must not keep."""
        self.incarnation = incarnation
        self.ready = False
        self.was_ready = trio.Event()
        self.planned_stop = False
        self.heard = time.monotonic()
        self.used_s = 0.0
        beat_read, beat_write = os.pipe()
        watch_read, watch_write = os.pipe()
        told = {
            "PERDURE_INCARNATION": str(incarnation),
            "PERDURE_SUPERVISOR_FD": str(beat_write),
            "PERDURE_WATCHDOG_FD": str(watch_read),
        }
        self.process = Process(service, entry, told, [*ours, beat_read, watch_write])
        os.close(beat_write)
        os.close(watch_read)
        self.beat_fd, self.watch_fd = beat_read, watch_write
        os.set_blocking(self.beat_fd, False)

    async def listen(self) -> None:
        """Reads heartbeats until the pipe ends."""
        while True:
            await trio.lowlevel.wait_readable(self.beat_fd)
            try:
                news = os.read(self.beat_fd, 4096)
            except BlockingIOError:
                continue
            if not news:
                return
            self.heard = time.monotonic()
            self.used_s = sign_of(self.process.pid)[1]
            if b"r" in news:
                self.ready = True
                self.was_ready.set()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after the grace; returns after the exit."""
        self.planned_stop = True
        self.process.terminate()
        with trio.move_on_after(grace_s):
            await wait_exit(self.process.pid)
            return
        self.process.kill()
        await wait_exit(self.process.pid)

    def close(self) -> int:
        """Reaps the process and closes the pipes; its exit code."""
        code = self.process.wait()
        os.close(self.beat_fd)
        os.close(self.watch_fd)
        return code


class Supervisor:
    """Runs one service until told to stop or until it cannot be kept up."""

    def __init__(self, service: str, places: Places, config: Config) -> None:
        self.service = service
        self.places = places
        self.config = config.supervise
        self._nice = session_nice(service, config)
        self.log = structlog.get_logger(role="supervise", service=service)
        self.lock = Lock(places.run / f"{service}.supervisor", f"the supervisor of {service}")
        self.policy = RestartPolicy(config.supervise.max_failures)
        self.child: Child | None = None
        self._entry = entry_of(service)
        self._ancestors = ancestors(os.getppid(), os.environ.get(STACK_PID, ""))
        self._stopping = trio.Event()
        self._holding = self._renewing = False
        self._end_of_hold = trio.Event()

    def run(self) -> int:
        """The exit code: 0 after a planned stop. Signals are held (`hold_signals`) before and after."""
        code = None
        while code is None:
            incarnation = next_incarnation(self.places.incarnations, self.service)
            self.child = Child(self.service, self._entry, incarnation, [self.lock.fd])
            code = trio.run(self._life, self.child)
        return code

    async def _life(self, child: Child) -> int | None:
        """One incarnation and the pause behind it; the exit code when it was the last."""
        async with trio.open_nursery() as nursery:
            for pid in self._ancestors:
                nursery.start_soon(self._watch_ancestor, pid)
            starter = os.environ.get(STARTER_PID, "")
            if starter.isdecimal():
                nursery.start_soon(self._watch_starter, int(starter))
            nursery.start_soon(self._signals)
            code = await self._after(child)
            nursery.cancel_scope.cancel()
        return code

    async def _after(self, child: Child) -> int | None:
        self.log.info("started", incarnation=child.incarnation, pid=child.process.pid)
        await self._until_exit(child)
        code = child.close()
        self.child = None
        self.log.info("exited", incarnation=child.incarnation, code=code, planned=child.planned_stop)
        if self._stopping.is_set():
            self._remove_socket()
            return 0
        verdict = self.policy.after_exit(code, was_ready=child.ready, planned=child.planned_stop)
        if not verdict.again:
            self.log.error("given_up", reason=verdict.reason, hint="the whole stack stops now")
            return verdict.exit_code
        if self._holding:
            self.log.info("held")
        with trio.move_on_after(HOLD_S if self._holding else verdict.pause_s):
            await self._end_of_hold.wait()
        if self._stopping.is_set():
            return 0
        if self._holding or self._renewing:
            self._renew()
        return None

    def _renew(self) -> None:
        """Becomes the supervisor that lies on disk now, which starts what lies there."""
        hold_signals()
        self.lock.release()
        os.execv(sys.executable, [sys.executable, "-m", "ops.supervise", self.service])

    def _stop(self) -> None:
        self._stopping.set()
        self._end_of_hold.set()

    def _remove_socket(self) -> None:
        """A service that had to be killed at the end of its grace could not do it itself."""
        path = self.places.run / f"{self.service}.sock"
        if path.is_socket():
            path.unlink()

    async def _until_exit(self, child: Child) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child.listen)
            nursery.start_soon(self._kill_if_hung, child)
            nursery.start_soon(self._stop_when_asked, child)
            if self._nice:
                nursery.start_soon(self._yield_when_ready, child)
            await wait_exit(child.process.pid)
            nursery.cancel_scope.cancel()

    async def _yield_when_ready(self, child: Child) -> None:
        """Not before: clients wait for a service that starts again, and busy cores would make it many times slower."""
        await child.was_ready.wait()
        if self.service in YIELDING:
            lower_process(child.process.pid, self._nice)
        while not yield_session(child.process.pid, self._nice):  # noqa: ASYNC110 - the kernel tells nobody
            await trio.sleep(YIELD_AGAIN_S)

    async def _stop_when_asked(self, child: Child) -> None:
        await self._stopping.wait()
        await child.stop(self.config.grace_s)

    async def _kill_if_hung(self, child: Child) -> None:
        while True:
            limit = self.config.hang_s
            state, used_s = sign_of(child.process.pid)
            if hangs(time.monotonic() - child.heard, limit, state=state, used_s=used_s - child.used_s):
                self.log.error("hung", incarnation=child.incarnation, silent_s=limit, state=state)
                child.process.kill()
                return
            pause_s, began = self.config.hang_s / 4, time.monotonic()
            await trio.sleep(pause_s)
            late_s = time.monotonic() - began - pause_s
            if late_s > pause_s:  # stopped, or starved ourselves: what we did not hear meanwhile says nothing
                child.heard += late_s

    async def _watch_ancestor(self, pid: int) -> None:
        await wait_exit(pid)
        self.log.warning("orphaned", ancestor=pid)
        self._stop()

    async def _watch_starter(self, pid: int) -> None:
        """Nobody is left who would continue a honcho that was stopped, so that it sees all of us end."""
        await wait_exit(pid)
        self.log.warning("starter_gone", starter=pid)
        stack = os.environ.get(STACK_PID, "")
        if stack.isdecimal():
            with suppress(ProcessLookupError):
                os.kill(int(stack), signal.SIGCONT)
        self._stop()

    async def _signals(self) -> None:
        async with trio.open_nursery() as nursery:
            with trio.open_signal_receiver(*SIGNALS) as signals:
                take_signals()
                try:
                    async for number in signals:
                        self._obey(number, nursery)
                finally:
                    hold_signals()

    def _obey(self, number: int, nursery: trio.Nursery) -> None:
        if number == signal.SIGUSR2:
            if self._holding:
                self._end_of_hold.set()
            return
        if number not in (signal.SIGHUP, signal.SIGUSR1):
            self._stop()
            return
        self._holding = self._holding or number == signal.SIGUSR1
        self._renewing = True
        if self.child is not None and not self.child.planned_stop:
            nursery.start_soon(self.child.stop, self.config.grace_s)
