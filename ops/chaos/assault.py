"""Carries out strikes on a real stack, and sees to it that the stack comes back as the design says.

strike ──► signals in one go ──► proven exits ──► (started again, where the whole stack stops) ──► serving
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from ops.admin import SERVICES, serving, snapshots
from ops.chaos.inspection import processes
from ops.chaos.models import Subject
from ops.chaos.schedule import HONCHO, SUPERVISOR, Strike
from ops.chaos.volume import Volume
from ops.stack import Stack, children
from shared.lock_files import holder
from shared.node import Node
from shared.peers import wait_exit

ABOUT_S = 60.0
"""How long a target may take to appear: the strike before it may have just killed it."""
END_S = 30.0
"""How long a stack may take to end once its honcho or a supervisor is gone."""
PAUSE_SHARE = 0.4
"""Of `hang_s`: how long a pause lasts at most, so that most services outlive it."""
LOOP_KILLS = 60
TIDES: tuple[tuple[int, float], ...] = ((0, 1.0), (2 << 20, 1.5), (64 << 10, 0.5), (-1, 2.0))
"""Bytes that a full disk has left, and for how long; -1: room for everything. Less than the journal keeps in reserve
refuses new requests, nothing at all stops the others until there is room again.
"""


class Broken(Exception):
    """The stack did not do what the design says; the text tells what."""


@dataclass
class Tally:
    """What has been struck: strikes by name and way, deaths by service, seconds until all served again by kind."""

    strikes: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    pauses: int = 0
    starts: int = 0
    recovery_s: dict[str, list[float]] = field(default_factory=dict)


class Assault:
    """Strikes one stack. `node` is an admin node of its home."""

    def __init__(
        self, stack: Stack, subject: Subject, node: Node, say: Callable[[str], None], volume: Volume | None = None
    ) -> None:
        self.stack = stack
        self._volume = volume
        self._weather = "calm"
        self._sheltered = False
        self.subject = subject
        self.tally = Tally()
        self._base = dict(stack.settings)
        self._node = node
        self._say = say

    async def start(self, weather: str) -> None:
        """Starts the stack under a weather and waits until it serves."""
        self._launch(weather)
        await self.wait_serving()

    def _launch(self, weather: str) -> None:
        self._weather = weather
        real = weather == "full_disk" and self._volume is not None
        self.stack.settings = self._base | self.subject.hooks("calm" if real else weather)
        self.stack.launch()
        self.tally.starts += 1

    async def tides(self) -> None:
        """For ever: while the weather is a full disk, the home's file system fills up and is relieved again."""
        while self._volume is not None:
            for left, seconds in TIDES:
                if self._weather != "full_disk" or self._sheltered or left < 0:
                    self._volume.relieve()
                else:
                    self._volume.leave(left)
                await trio.sleep(seconds)  # the weather itself

    @contextmanager
    def sheltered(self) -> Iterator[None]:
        """Inside, there is room on the disk."""
        self._sheltered = True
        if self._volume is not None:
            self._volume.relieve()
        try:
            yield
        finally:
            self._sheltered = False

    @property
    def disk_works(self) -> bool:
        """Whether what is saved must reach the disk, once there is room."""
        return self._weather != "broken_disk"

    async def wait_serving(self) -> None:
        """Broken when the stack ends meanwhile, or does not serve within the subject's patience."""
        with trio.move_on_after(self.subject.patience_s):
            while not serving(found := await snapshots(self._node, deadline_s=1.0)):
                code = self.stack.process.poll() if self.stack.process is not None else 0
                if code is not None:
                    raise Broken(f"the stack ended by itself with code {code}")
                await trio.sleep(0.05)  # a poll of status
            return
        state = {role: one and one.ready for role, one in found.items()}
        raise Broken(f"not serving {self.subject.patience_s:.0f} s after a strike; ready: {state}")

    async def carry_out(self, strike: Strike, *, then_wait: bool) -> None:
        """Waits `delay_s`, strikes, waits for the exits, starts again what has to be, and until all serve if told."""
        await trio.sleep(strike.delay_s)  # the moment of the blow, from the schedule
        self._say(str(strike))
        self.tally.strikes[strike.name] += strike.is_kill
        self.tally.ways[strike.way] += 1
        self.tally.moments[strike.moment] += 1
        self.tally.kills += strike.is_kill
        self.tally.pauses += not strike.is_kill
        begun = time.monotonic()
        match strike.way:
            case "pause":
                await self._pause(strike)
            case "crash_loop":
                await self._crash_loop(strike.targets[0])
            case "hang":
                await self._hang(strike)
            case "kill":
                self._signal(pids := await self._pids(strike.targets), signal.SIGKILL)
                await self._exits(pids, END_S)
        if strike.ends_stack:
            await self._ended()
            self._launch(strike.weather)
        if then_wait:
            await self.wait_serving()
            kind = "whole stack" if strike.ends_stack else strike.way
            self.tally.recovery_s.setdefault(kind, []).append(time.monotonic() - begun)

    async def kill_services(self) -> None:
        """SIGKILL to all five, beyond the schedule; their supervisors start them again."""
        self._signal(pids := await self._pids(SERVICES), signal.SIGKILL)
        await self._exits(pids, END_S)

    # --- ways -----------------------------------------------------------------------------------------------------

    async def _hang(self, strike: Strike) -> None:
        pids = await self._pids(strike.targets)
        self._signal(pids, signal.SIGSTOP)
        if not await self._exits(pids, self.subject.hang_s + END_S):
            self._signal(pids, signal.SIGKILL)
            raise Broken(f"{strike.name} stopped, and not killed by its supervisor")

    async def _pause(self, strike: Strike) -> None:
        pids = await self._pids(strike.targets)
        self._signal(pids, signal.SIGSTOP)
        await trio.sleep(PAUSE_SHARE * self.subject.hang_s * (1 + strike.number % 3) / 3)  # the pause itself
        self._signal(pids, signal.SIGCONT)

    async def _crash_loop(self, service: str) -> None:
        """Kills each new life before it can be ready, until the supervisor gives up, which ends the stack."""
        supervisor = (await self._pids((SUPERVISOR + service,)))[SUPERVISOR + service]
        with trio.move_on_after(ABOUT_S):
            for _ in range(LOOP_KILLS):
                while not (found := _children(supervisor)) and _alive(supervisor):  # noqa: ASYNC110
                    await trio.sleep(0.005)  # a poll of another process's children
                if not found:
                    return
                self._signal({service: found[0]}, signal.SIGKILL)
                await wait_exit(found[0])
        raise Broken(f"{service} killed {LOOP_KILLS} times before it was ready, and its supervisor has not given up")

    # --- exits and starts -----------------------------------------------------------------------------------------

    def _pid(self, target: str) -> int | None:
        run = self.stack.places.run
        if target == HONCHO:
            return self.stack.process.pid if self.stack.process is not None else None
        if target.startswith(SUPERVISOR):
            return holder(run / f"{target.removeprefix(SUPERVISOR)}.supervisor")
        return holder(run / f"{target}.lock")

    async def _pids(self, targets: tuple[str, ...]) -> dict[str, int]:
        """The processes of all targets, once all of them are there."""
        with trio.move_on_after(ABOUT_S):
            while True:
                found = {target: pid for target in targets if (pid := self._pid(target)) is not None}
                if len(found) == len(targets):
                    return found
                await trio.sleep(0.01)  # a poll of the locks
        raise Broken(f"{sorted(set(targets) - set(found))} did not come up within {ABOUT_S:.0f} s")

    def _signal(self, pids: dict[str, int], number: int) -> None:
        for target, pid in pids.items():
            try:
                os.kill(pid, number)
            except ProcessLookupError:  # died a moment ago by itself, or by the strike before
                continue
            if number == signal.SIGKILL and target in SERVICES:
                self.tally.deaths[target] += 1

    async def _exits(self, pids: dict[str, int], limit_s: float) -> bool:
        with trio.move_on_after(limit_s):
            for target, pid in pids.items():
                await wait_exit(pid)
                if target == HONCHO and self.stack.process is not None:
                    self.stack.process.wait()
            return True
        return False

    async def _ended(self) -> None:
        """Waits until nothing of the stack runs; Broken, after killing them, when processes outlive it."""
        with trio.move_on_after(END_S):
            if self.stack.process is not None:
                await wait_exit(self.stack.process.pid)
                self.stack.process.wait()
            while processes(self.stack.places.home):  # noqa: ASYNC110 - they are nobody's children any more
                await trio.sleep(0.02)
            self.stack.process = None
            return
        left = processes(self.stack.places.home)
        raise Broken(f"{len(left)} processes outlive their stack by {END_S:.0f} s: {[_command(pid) for pid in left]}")

    async def stop(self) -> None:
        """Ctrl-C; Broken when anything is left running."""
        if self.stack.process is not None:
            self.stack.process.send_signal(signal.SIGINT)
            await self._ended()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return f"{pid}, just ended"


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _children(pid: int) -> list[int]:
    return [child for child in children(pid) if _alive(child)]
