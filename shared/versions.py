"""What running processes and the code on disk must agree on, so that a restart may go service by service."""

from typing import NamedTuple

from shared.config import FaultsConfig
from shared.messages.base import PROTOCOL

STATE = 1
"""Raised whenever journal, ledger, arena, segments or index change so that the code before can't work on them."""


class Versions(NamedTuple):
    """`protocol`: of the messages; `state`: of everything that outlives a process."""

    protocol: int
    state: int

    @classmethod
    def announced(cls, faults: FaultsConfig) -> "Versions":
        """Ours, or what a test lets us claim."""
        return cls(faults.announce_protocol or PROTOCOL, faults.announce_state or STATE)

    def __str__(self) -> str:
        return f"messages {self.protocol}, state {self.state}"
