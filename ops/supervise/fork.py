"""A service is forked out of its supervisor, which has imported what the service needs: no interpreter to start, no
imports, and pages of code that both share. Of two starts of Python for each service one is left, and none when a
service that was killed comes back.

A fork copies one thread and every lock as it is. So a supervisor has no other thread, and forks between two runs of
its event loop, never in one. What is on disk now may be newer than what was imported: a planned restart goes through
`renew`, a service that died is what it was.
"""

import gc
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType

from setproctitle import setproctitle

BLAS_THREADS = "OPENBLAS_NUM_THREADS"
"""Read by NumPy's OpenBLAS, which starts threads when it is imported; nothing of ours multiplies by NumPy."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Those that a supervisor obeys. They are blocked whenever nobody receives them, so none is lost and none kills it."""


def hold_signals() -> None:
    """Lets them wait."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def take_signals() -> None:
    """Lets them come, those that waited first."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def entry_of(service: str) -> ModuleType:
    """Imports the service: its `main`, and what its `preload`, if it has one, finds worth having in advance."""
    threads = os.environ.get(BLAS_THREADS)
    os.environ[BLAS_THREADS] = "1"
    try:
        entry = importlib.import_module(f"services.{service}.__main__")
        getattr(entry, "preload", lambda: None)()
    finally:
        del os.environ[BLAS_THREADS]
        if threads is not None:
            os.environ[BLAS_THREADS] = threads
    gc.collect()
    gc.freeze()  # a collection in the child would write to, and so copy, all these pages
    return entry


class Process:
    """A forked service, child of this process. `pid` is its own until `wait` has returned."""

    def __init__(self, service: str, entry: ModuleType, environ: Mapping[str, str], close: Sequence[int]) -> None:
        """`environ` is added to ours; `close`: file descriptors that are ours alone."""
        if threading.active_count() > 1:
            raise RuntimeError(f"a supervisor with threads can't fork: {threading.enumerate()}")
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _live(lambda: _become(service, entry, environ, close))

    def terminate(self) -> None:
        """SIGTERM."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._send(signal.SIGKILL)

    def wait(self) -> int:
        """Reaps it; its exit code, negative for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):  # a zombie takes signals, too; reaped, its pid could be another's
            os.kill(self.pid, number)


def _become(service: str, entry: ModuleType, environ: Mapping[str, str], close: Sequence[int]) -> None:
    for fd in close:
        os.close(fd)
    os.setsid()
    os.environ.update(environ)
    setproctitle(f"perdure {service}")
    take_signals()
    entry.main()


def _live(life: Callable[[], None]) -> None:
    """All that this process does. It never returns into the supervisor's frames, whose ends are not for it to run."""
    code = 1
    try:
        life()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # where an interpreter would end, too: it says why, and code 1 tells the supervisor
        traceback.print_exc()
    finally:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        with suppress(OSError, ValueError):  # a stream that is gone or closed
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
