"""What the doctor says: findings with a name, a level, the numbers and the way out; and the report they make."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Level(IntEnum):
    """How bad. OK: looked at and good. NOTE: what a kill may leave, cared for at the next start. WARNING: works, but
    somebody should look. FAULT: a promise is broken, or will be.
    """

    OK = 0
    NOTE = 1
    WARNING = 2
    FAULT = 3


NAMES = frozenset(
    {
        # the home and its surroundings
        "home",
        "unreadable",
        "home-mode",
        "home-owner",
        "identity-key",
        "leftovers",
        "run-dir-dead",
        "machine",
        "shm-small",
        "remove-ipc",
        "memlock-low",
        "fault-hooks",
        "clock",
        "clock-behind",
        "clock-jump",
        # host tier
        "arena",
        "arena-refused",
        "arena-unfinished",
        "arena-damaged",
        "arena-format",
        "arena-size",
        "arena-holes",
        "arena-extent",
        "arena-header",
        "arena-payload",
        "arena-double",
        "arena-granted",
        "arena-dead",
        "arena-idle",
        "arena-unknown",
        # disk tier
        "disk",
        "disk-format",
        "disk-meta",
        "clear-pending",
        "generation-behind",
        "disk-space",
        "disk-floor",
        "index-damaged",
        "index-format",
        "index-distrusted",
        "index-record",
        "index-dangling",
        "index-double",
        "index-aside",
        "segment-missing",
        "segment-truncated",
        "segment-superblock",
        "segment-foreign",
        "slot-footer",
        "slot-payload",
        "slot-orphan",
        "chain-broken",
        # promises
        "journal",
        "journal-format",
        "journal-loss",
        "journal-torn",
        "journal-kept",
        "journal-aside",
        "ledger",
        "ledger-damaged",
        "ledger-behind",
        "ledger-differs",
        "ledger-mode",
        # what runs
        "services",
        "service-away",
        "service-complains",
        "pool-conservation",
        "arena-conservation",
        "lease-left",
        "grant-left",
    }
)
"""Every name that a finding may have; docs/doctor.md explains each."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `what` is a line with its numbers; `way_out` what a person does, "" for nothing.

    `mend`: does it, and says what it did; None when it can't be mended here.
    """

    level: Level
    name: str
    what: str
    way_out: str = ""
    mend: Callable[[], str] | None = None

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"a finding {self.name!r} is not among NAMES, so nobody could look it up")


def ok(name: str, what: str) -> Finding:
    """Looked at and good."""
    return Finding(Level.OK, name, what)


def note(name: str, what: str, way_out: str = "", mend: Callable[[], str] | None = None) -> Finding:
    """As it may be; worth knowing."""
    return Finding(Level.NOTE, name, what, way_out, mend)


def warning(name: str, what: str, way_out: str = "", mend: Callable[[], str] | None = None) -> Finding:
    """Nothing is broken; it will hurt somebody."""
    return Finding(Level.WARNING, name, what, way_out, mend)


def fault(name: str, what: str, way_out: str = "", mend: Callable[[], str] | None = None) -> Finding:
    """Broken."""
    return Finding(Level.FAULT, name, what, way_out, mend)


@dataclass
class Report:
    """All findings of one examination, in the order of the checks, and what `--repair` did before it."""

    home: str
    findings: list[Finding] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def worst(self) -> Level:
        """The level of the worst finding."""
        return max((finding.level for finding in self.findings), default=Level.OK)

    @property
    def content(self) -> bool:
        """Whether there is no fault; notes and warnings are allowed."""
        return self.worst < Level.FAULT

    def named(self, name: str) -> list[Finding]:
        """Findings of one name."""
        return [finding for finding in self.findings if finding.name == name]

    def at_least(self, level: Level) -> list[Finding]:
        """Findings as bad as `level`, or worse."""
        return [finding for finding in self.findings if finding.level >= level]

    def plain(self) -> dict[str, Any]:
        """For `--json`: `home`, `content`, `worst`, `seconds`, `mended`, `findings` (level, name, what, way_out,
        mendable).
        """
        return {
            "home": self.home,
            "content": self.content,
            "worst": self.worst.name.lower(),
            "seconds": round(self.seconds, 3),
            "mended": self.mended,
            "findings": [
                {
                    "level": finding.level.name.lower(),
                    "name": finding.name,
                    "what": finding.what,
                    "way_out": finding.way_out,
                    "mendable": finding.mend is not None,
                }
                for finding in self.findings
            ],
        }
