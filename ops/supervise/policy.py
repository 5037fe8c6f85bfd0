"""When to start a service again, pure: back-off, giving up, what an exit code means."""

from dataclasses import dataclass

EXIT_CONFIGURATION = 2
EXIT_TAKEN = 4
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True)
class Verdict:
    """Start again after `pause_s`, or give up with `exit_code` and the reason."""

    again: bool
    pause_s: float = 0.0
    exit_code: int = 0
    reason: str = ""


class RestartPolicy:
    """Only exits before ready count towards a crash loop; one life that reached ready resets the count."""

    def __init__(self, max_failures: int) -> None:
        self.max_failures = max_failures
        self.failures = 0

    def after_exit(self, code: int, *, was_ready: bool, planned: bool) -> Verdict:
        """What to do after the service's process has exited (`code` negative for a signal)."""
        if was_ready or planned:
            self.failures = 0
            return Verdict(again=True, pause_s=0.0 if planned else FIRST_PAUSE_S)
        if code == EXIT_CONFIGURATION:
            return Verdict(again=False, exit_code=code, reason="its configuration is wrong, see the line above")
        if code == EXIT_TAKEN:
            return Verdict(again=False, exit_code=code, reason="its place or endpoint is taken, see the line above")
        self.failures += 1
        if self.failures >= self.max_failures:
            reason = f"it exited {self.failures} times in a row before it was ready (last code {code})"
            return Verdict(again=False, exit_code=1, reason=reason)
        return Verdict(again=True, pause_s=min(FIRST_PAUSE_S * 4**self.failures, LONGEST_PAUSE_S))
