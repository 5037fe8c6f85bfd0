"""Processes of an engine: started in a group of their own, stopped while others are measured, ended as a group.

Standard library only.
"""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

END_S = 10.0


class Group:
    """One command and all that it starts."""

    def __init__(
        self, command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None, *, talks: bool = False
    ) -> None:
        """`log` takes what it says; with `talks` its stdin and stdout are pipes (lines of text) instead."""
        self.log = log
        with log.open("ab") as said:
            self.process = subprocess.Popen(
                list(command),
                cwd=Path(__file__).resolve().parents[3],
                env=dict(os.environ) | dict(environ or {}),
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else said,
                stderr=said,
                text=talks,
                start_new_session=True,
            )

    def signal(self, number: int) -> None:
        """To every process of the group; nothing when it is gone."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return

    def ended_within(self, seconds: float) -> bool:
        """Waits so long for its end."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def pause(self) -> None:
        """Takes the cores from it."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Gives them back."""
        self.signal(signal.SIGCONT)

    def stop(self) -> None:
        """Asks it to end, then kills what is left."""
        self.resume()
        self.signal(signal.SIGTERM)
        self.ended_within(END_S)
        self.signal(signal.SIGKILL)
        self.process.wait()

    def tail(self, lines: int = 12) -> str:
        """The end of what it said."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
