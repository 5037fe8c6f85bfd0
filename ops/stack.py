"""A whole stack as a child process on a home of its own: for the demo, end-to-end tests, chaos and benchmarks.

The stack is exactly what `perdure serve` starts; nothing here knows how a service works. Leaving the `with` block
stops it and removes home, run dir and arena, also on an error. Should this process be killed, the stack stops, too.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import trio

from ops.admin import SERVICES, admin, snapshots, wait_serving
from ops.supervise.supervisor import STARTER_PID
from shared.lock_files import holder
from shared.messages.hello import Snapshot
from shared.paths import Places, default_home
from shared.peers import wait_exit

ROOT = Path(__file__).resolve().parents[1]
STOP_S = 15.0


def children(pid: int) -> list[int]:
    """Processes that it has started and that live; none when it is gone."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def exit_of(pid: int) -> int:
    """A file descriptor that becomes readable when the process ends; -1 when it has."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1


def _ends_by(fd: int, deadline: float) -> bool:
    """Whether the process behind a descriptor of `exit_of` has ended by then."""
    poll = select.poll()  # and not select(): a descriptor may be larger than it takes
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))


class StackError(RuntimeError):
    """The stack did not do what it was told; the text ends with what it last said."""


class Stack:
    """One stack. `settings` are environment overrides (PERDURE_SECTION__KEY)."""

    entry: tuple[str, ...] = ("ops.cli", "serve")
    """The module, and its arguments, that becomes the stack."""

    def __init__(
        self, settings: dict[str, str] | None = None, *, share_models: bool = True, home: Path | None = None
    ) -> None:
        """`home`: where its state lies, if not beside its log; whoever gives it removes it."""
        self.base = Path(tempfile.mkdtemp(prefix="perdure-stack-"))
        self.places = Places(home or self.base / "home")
        self.log_path = self.base / "log"
        self.settings = dict(settings or {})
        self.arena_dir = self.settings.get("PERDURE_STORE__ARENA_DIR", "/dev/shm")
        self.process: subprocess.Popen[bytes] | None = None
        if share_models:
            models = default_home() / "models"
            models.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.settings.setdefault("PERDURE_MODEL__DIR", str(models))

    def __enter__(self) -> "Stack":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    @property
    def environ(self) -> dict[str, str]:
        """Environment for commands on this stack's home."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
        return clean | self.settings | {"PERDURE_HOME": str(self.places.home), "PERDURE_PYTHON": sys.executable}

    def launch(self) -> None:
        """Starts the stack; `wait_serving` says when it serves."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.entry],
                cwd=ROOT,
                env=self.environ | {STARTER_PID: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def wait_serving(self, *, deadline_s: float = 120.0) -> None:
        """Returns once every service is ready and the scheduler has its worker; StackError otherwise."""
        ended: list[int] = []
        serves = False
        async with admin(self.places) as node, trio.open_nursery() as nursery:

            async def watch(process: "subprocess.Popen[bytes]") -> None:
                await wait_exit(process.pid)
                ended.append(process.wait())
                nursery.cancel_scope.cancel()

            if self.process is not None:
                nursery.start_soon(watch, self.process)
            serves = await wait_serving(node, deadline_s=deadline_s)
            nursery.cancel_scope.cancel()
        if ended:
            raise StackError(f"the stack ended with code {ended[0]}:\n{self.log_tail()}")
        if not serves:
            raise StackError(f"the stack does not serve after {deadline_s:g} s:\n{self.log_tail()}")

    async def start(self, *, deadline_s: float = 120.0) -> None:
        """`launch` and `wait_serving`."""
        self.launch()
        await self.wait_serving(deadline_s=deadline_s)

    async def snapshots(self) -> dict[str, Snapshot | None]:
        """What each service says of itself."""
        async with admin(self.places) as node:
            return await snapshots(node)

    def pid(self, service: str) -> int:
        """The process of a service, from the lock that it holds."""
        return int((self.places.run / f"{service}.lock").read_text())

    def kill(self, service: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal to a service's process (not to its supervisor); its pid."""
        pid = self.pid(service)
        os.kill(pid, number)
        return pid

    async def stop(self, number: int = signal.SIGINT) -> int:
        """Ctrl-C for the whole stack; the exit code of honcho. StackError when something is left running."""
        if self.process is None:
            return 0
        pids = self.running()
        self.process.send_signal(number)
        with trio.move_on_after(STOP_S):
            await wait_exit(self.process.pid)
        code = self.process.poll()
        if code is None:
            raise StackError(f"the stack does not stop within {STOP_S:g} s:\n{self.log_tail()}")
        self.process = None
        with trio.move_on_after(STOP_S):
            for pid in pids:
                await wait_exit(pid)
            return code
        raise StackError(f"processes {self.running()} outlived the stack:\n{self.log_tail()}")

    def running(self) -> list[int]:
        """Pids of the services and supervisors that hold their locks."""
        files = [self.places.run / f"{service}.{kind}" for service in SERVICES for kind in ("lock", "supervisor")]
        return [pid for pid in map(holder, files) if pid is not None]

    def kill_all(self) -> None:
        """`kill -9` of honcho, every supervisor and every service at once. StackError when something outlives it."""
        pids = self.running()
        if self.process is not None:
            pids.append(self.process.pid)
        # honcho's own helpers end behind it, and hold the home's lock until then
        ends = [fd for pid in {*pids, *(child for pid in pids for child in children(pid))} if (fd := exit_of(pid)) >= 0]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self.process is not None:
            self.process.wait()
            self.process = None
        deadline = time.monotonic() + STOP_S
        late = [fd for fd in ends if not _ends_by(fd, deadline)]
        for fd in ends:
            os.close(fd)
        if late:
            raise StackError(f"{len(late)} processes outlived their kill by {STOP_S:g} s:\n{self.log_tail()}")

    def log_tail(self, lines: int = 40) -> str:
        """The last lines that the stack wrote."""
        if not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def remove_arena(self) -> None:
        """Removes the host tier's file, as a reboot would."""
        self.places.arena(self.arena_dir).unlink(missing_ok=True)

    def remove(self) -> None:
        """Kills what still runs and removes everything of this home."""
        self.kill_all()
        self.remove_arena()
        shutil.rmtree(self.places.run, ignore_errors=True)
        shutil.rmtree(self.base, ignore_errors=True)
