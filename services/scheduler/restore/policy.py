"""Whether a prefix that the store holds is loaded or computed, and how much of it is computed beside a load.

    load alone     L(n)   by the curves of host and disk
    compute alone  C(n)   by the curve of prefill, behind what older requests have pending

The quicker one by what was measured is chosen: by construction it is predicted to be no later than the better of both.

KV of a block needs the blocks before it, so computing goes up from the front; a block that is loaded needs nobody. So
both at once are possible: the load comes down from the back, and they meet wherever they meet, with no split to be
guessed. How much they disturb each other can't be known without trying, and a try can cost half as much again. So it is
done where somebody asks for it, for a load that falls far behind its forecast, and as a probe; before each chunk it is
asked of what is left whether computing it ends sooner than waiting for the load.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from services.scheduler.restore.rates import Rates

WORTH_LOADING = 0.98
"""Of the time of computing; loading must promise to take no more."""
LATE = 2.0
"""A load that takes so many times longer than predicted is computed against, whatever was decided."""
LATE_S = 0.02
UNDER_WAY = 16
"""Blocks that may be on their way at once, so that they all arrive late and then together."""

Way = Literal["load", "both", "compute"]


@dataclass(frozen=True)
class Prefix:
    """Blocks that could be loaded, by tier, front to back: `disk` per block, whether it lies there.

    `start`: tokens before them. `ahead`: tokens of older requests that are computed first.
    """

    start: int
    block_tokens: int
    disk: bytes
    ahead: int = 0

    @property
    def blocks(self) -> int:
        """How many."""
        return len(self.disk)

    def tail(self, first: int) -> tuple[int, int]:
        """Blocks from `first` on: (on host, on disk)."""
        disk = self.disk.count(1, first)
        return self.blocks - first - disk, disk


def choice(rates: Rates, prefix: Prefix) -> Literal["load", "compute"]:
    """The quicker way; what was never measured is measured by loading."""
    load = rates.load_s(*prefix.tail(0))
    compute = rates.compute_s(prefix.start, prefix.start + prefix.ahead)
    compute += rates.compute_s(prefix.start, prefix.start + prefix.blocks * prefix.block_tokens)
    if load is None or compute <= 0:
        return "load"
    return "load" if load <= WORTH_LOADING * compute else "compute"


@dataclass(frozen=True)
class Progress:
    """A load under way: blocks [low, held) of its prefix are neither computed nor loaded, from `held` on all are.

    `computed` and `planned`: tokens that are computed, and will be when the plans that are out are done.
    """

    low: int
    held: int
    computed: int
    planned: int
    elapsed_s: float


def rest_s(rates: Rates, prefix: Prefix, progress: Progress, skipped: int = 0) -> float:
    """Seconds until the load alone has brought all but the first `skipped` blocks of what is left.

    By its curve; when it has fallen behind that, in proportion.
    """
    host, disk = prefix.tail(progress.low + skipped)
    due = rates.load_s(*prefix.tail(max(0, progress.held - UNDER_WAY))) or 0.0
    behind = progress.elapsed_s / (LATE * due + LATE_S)
    left = (rates.load_s(host, disk) or 0.0) - (rates.load_s(*prefix.tail(progress.held)) or 0.0)
    return max(0.0, left) * max(1.0, behind)


def chunk(rates: Rates, prefix: Prefix, progress: Progress, way: Way, most: int) -> int:
    """Blocks that computing may take now, of those before `held`; 0: the load is waited for.

    `most`: blocks that a step can take.
    """
    late = progress.elapsed_s > LATE * (rates.load_s(*prefix.tail(0)) or 0.0) + LATE_S
    if not rates.known or (way != "both" and not late):
        return 0

    def front(count: int) -> float:
        end = progress.planned + count * prefix.block_tokens
        delay = rates.compute_s(prefix.start, prefix.start + prefix.ahead)
        return (delay + rates.compute_s(progress.computed, end)) * rates.compute_drag

    def back(count: int) -> float:
        return rest_s(rates, prefix, progress, count) * rates.load_drag

    count, seconds = _meeting(front, back, progress.held - progress.low)
    return min(count, most) if seconds < rest_s(rates, prefix, progress) else 0


def _meeting(front: Callable[[int], float], back: Callable[[int], float], blocks: int) -> tuple[int, float]:
    """Blocks to be computed so that both are done soonest, and when: the front grows with them, the back shrinks."""
    low, high = 0, blocks
    while low < high:  # the first count at which the front takes longer than the back
        middle = (low + high) // 2
        if front(middle) < back(middle):
            low = middle + 1
        else:
            high = middle
    seconds, count = min((max(front(m), back(m)), m) for m in {low, max(low - 1, 0)})
    return count, seconds
