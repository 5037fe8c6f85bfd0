"""Forking a service out of a process that has imported it."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ops.admin import SERVICES

ROOT = Path(__file__).resolve().parents[2]


def run(script: str) -> str:
    """Output of a process of its own: one that forks must have no threads."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_imported_in_advance_starts_no_thread_and_needs_no_torch(service: str) -> None:
    said = run(f"""
        import os, sys
        from ops.supervise.fork import entry_of
        before = dict(os.environ)
        assert entry_of({service!r}).main
        assert dict(os.environ) == before
        print(len(os.listdir("/proc/self/task")), "torch" in sys.modules)
    """)
    assert said == "1 False\n"


FORKS = """
    import os, signal, sys, types
    from ops.supervise.fork import Process, hold_signals
    hold_signals()
    entry = types.ModuleType("entry")
    def main():
        {body}
    entry.main = main
    kept, lost = os.pipe()
    process = Process("worker", entry, {{"TOLD": "this"}}, [lost])
    {then}
    print(process.wait())
"""


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", 0),
        ("sys.exit(4)", 4),
        ("sys.exit('words')", 1),
        ("raise ValueError", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),  # no longer held back
    ],
)
def test_exit_codes(body: str, code: int) -> None:
    assert run(FORKS.format(body=body, then="pass")) == f"{code}\n"


def test_the_service_has_what_it_is_told_a_session_of_its_own_and_none_of_its_supervisors_files() -> None:
    body = "print(os.environ['TOLD'], os.getsid(0) == os.getpid(), os.path.exists(f'/proc/self/fd/{lost}'))"
    assert run(FORKS.format(body=body, then="os.fstat(lost)")) == "this True False\n0\n"


def test_the_supervisor_sends_signals_until_it_is_reaped() -> None:
    body = "signal.pause()"
    assert run(FORKS.format(body=body, then="process.terminate()")) == f"{-signal.SIGTERM}\n"
    assert run(FORKS.format(body=body, then="process.kill()")) == f"{-signal.SIGKILL}\n"


def test_a_process_with_threads_does_not_fork() -> None:
    said = run("""
        import threading, types
        from ops.supervise.fork import Process
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        try:
            Process("worker", types.ModuleType("entry"), {}, [])
        except RuntimeError as error:
            print(error)
    """)
    assert "with threads can't fork" in said
