"""One load: where each leased block stands, and which part of the prefix is computed meanwhile.

    block    EXPECTED ── Staged ─► HERE ── copy ordered ─► SENT ── verified ─► HELD ─► attached
                 └── failed, late, cleared, computed instead ──┴── bad ──► LOST

    blocks   [ on the device | computed, or being so │ not yet held      │ held, from the back │ never found )
             0             begin                   low                                       end
                                 the front ──►                ◄── the load

Copies go in any order, so whatever is in the arena is copied while the rest is read. A held block is attached when all
before it are: loaded, or computed. A block that is lost leaves a hole, which is computed; what is held behind it stays.
"""

from dataclasses import dataclass, field

from services.scheduler.request import Request
from services.scheduler.restore.policy import Prefix, Progress, Way
from shared.messages.store import TIER_DISK

EXPECTED, HERE, SENT, HELD, LOST = range(5)


@dataclass(eq=False)
class Load:
    """Leased blocks by index: block i holds tokens of the request's block `first` + i.

    `low`: blocks before it need no load. `copying`: transfers that are out. `bad`: blocks whose bytes were wrong.
    `allowed`: tokens that the next plan may compute of its request. `moved_at`: when blocks last arrived in the arena.
    """

    request: Request
    ticket: int
    first: int
    wanted: int
    found_at: float = 0.0
    lease: int = 0
    tiers: bytes = b""
    state: bytearray = field(default_factory=bytearray)
    offsets: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    moved_at: float = 0.0
    origin: int = 0
    """`low` at its begin."""
    low: int = 0
    prefix: Prefix = field(default_factory=lambda: Prefix(0, 1, b""))
    way: Way = "load"
    beside_s: float = 0.0
    """How long something was computed while it was under way."""
    copying: int = 0
    bad: list[int] = field(default_factory=list)
    allowed: int = 0
    timed_out: bool = False
    short: bool = False
    """Some blocks never arrived."""
    void: bool = False
    """Its request is gone, or the cache was cleared: nothing is attached."""

    @property
    def end(self) -> int:
        """Blocks that were found."""
        return len(self.state)

    @property
    def on_disk(self) -> int:
        """Blocks that come from there."""
        return self.tiers.count(TIER_DISK, self.low)

    @property
    def missing(self) -> int:
        """Blocks that are still to arrive in the arena."""
        return self.state.count(EXPECTED, self.low)

    @property
    def busy(self) -> bool:
        """Whether anything more may come of it."""
        return bool(self.copying or self.missing)

    @property
    def front(self) -> int:
        """Where what is loaded, or being copied, begins by now."""
        held = self.next_held()
        return self.end if held < 0 else held

    def progress(self, now: float) -> Progress:
        """For the policy, which counts from `origin`."""
        request = self.request
        low, front = self.low - self.origin, self.front - self.origin
        return Progress(low, front, request.computed, request.planned, max(0.0, now - self.found_at))

    def held_by_tier(self) -> tuple[int, int]:
        """Blocks that were loaded: from host, from disk."""
        tiers = [tier for tier, state in zip(self.tiers, self.state, strict=True) if state == HELD]
        disk = tiers.count(TIER_DISK)
        return len(tiers) - disk, disk

    def ready(self) -> list[int]:
        """Blocks whose copy may be ordered."""
        return self._all(HERE)

    def next_held(self) -> int:
        """The first block from `low` on that need not, and must not, be computed; -1: there is none."""
        found = [at for state in (SENT, HELD) if (at := self.state.find(state, self.low)) >= 0]
        return min(found, default=-1)

    def held_from_low(self) -> int:
        """Where the run of held blocks ends that begins at `low`."""
        end = self.low
        while end < self.end and self.state[end] == HELD:
            end += 1
        return end

    def set(self, first: int, last: int, state: int) -> None:
        """The state of blocks [first, last)."""
        self.state[first:last] = bytes([state]) * (last - first)

    def pass_to(self, low: int) -> None:
        """Blocks before `low` are attached, computed or being so."""
        self.low = max(self.low, min(low, self.end))

    def give_up(self, *, held: bool = False) -> int:
        """What has not arrived will not be waited for; with `held`, what has is lost too. How many were missing."""
        missing = self.missing
        doomed = (EXPECTED, HERE, HELD) if held else (EXPECTED, HERE)
        self.state = bytearray(LOST if state in doomed else state for state in self.state)
        return missing

    def _all(self, state: int) -> list[int]:
        found, at = [], self.state.find(state, self.low)
        while at >= 0:
            found.append(at)
            at = self.state.find(state, at + 1)
        return found
