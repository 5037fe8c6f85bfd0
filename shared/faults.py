"""Fault hooks: named steps at which a test makes a service wait, fail or die. Nothing happens unless configured.

`faults.hooks` maps a step's name to an action: `exit` (die at once, like kill -9), `exit:N` (at the N-th passing),
`fail` (raise FaultInjected), `fail:N` (at the N-th passing only), `delay:SECONDS` (block this thread), `hang:N` (block
it for ever, at the N-th passing).
Steps that exist are listed in STEPS; an unknown name is a configuration error, so that no test waits for nothing.
"""

import os
import re
import signal
import threading
import time

from shared.config import ConfigError, FaultsConfig

STEPS = frozenset(
    {
        "journal_before_accept",
        "journal_after_accept",
        "scheduler_before_step",
        "scheduler_after_step",
        "worker_in_start",
        "worker_in_step",
        "worker_in_save",
        "worker_in_load",
        "store_after_granted",
        "store_after_commit_arrives",
        "store_before_data",
        "store_after_data",
        "store_after_index",
        "store_in_delete",
        "store_clear_noted",
        "store_clear_host",
        "store_clear_disk",
        "store_in_load",
        "store_commit_index",
        "tokenizer_before_submit",
        "tokenizer_after_journaled",
        "detokenizer_in_progress",
    }
)


_COUNT = re.compile("[0-9]{0,9}")
_NUMBER = {
    "exit": _COUNT,
    "fail": _COUNT,
    "hang": re.compile("[1-9][0-9]{0,8}"),
    "delay": re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?"),
}


class FaultInjected(OSError):
    """Raised by a `fail` hook; shells treat it as the IO error that it stands for."""


class Faults:
    """The hooks of one process. `active` is shown by status."""

    def __init__(self, config: FaultsConfig) -> None:
        self.config = config
        self._actions: dict[str, tuple[str, float]] = {}
        self._passed: dict[str, int] = {}
        self._lock = threading.Lock()
        for name, action in config.hooks.items():
            if name not in STEPS:
                raise ConfigError(f"unknown fault hook {name!r}; known are {', '.join(sorted(STEPS))}")
            verb, _, number = action.partition(":")
            if verb not in _NUMBER or not _NUMBER[verb].fullmatch(number):
                raise ConfigError(f"fault hook {name}: {action!r} is none of exit[:N], fail[:N], delay:SECONDS, hang:N")
            self._actions[name] = (verb, float(number or 0))

    @property
    def active(self) -> bool:
        """Whether anything of [faults] is set."""
        return self.config != FaultsConfig()

    def at(self, step: str) -> None:
        """Passes a named step: does what the configuration says, normally nothing."""
        if not self._actions or step not in self._actions:
            return
        verb, number = self._actions[step]
        with self._lock:
            self._passed[step] = count = self._passed.get(step, 0) + 1
        if verb == "delay":
            time.sleep(number)
        elif number and count != number:
            return
        elif verb == "hang":
            threading.Event().wait()
        elif verb == "exit":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise FaultInjected(f"injected fault at {step}")
