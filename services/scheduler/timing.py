"""The loader's clockwork: measures loads and steps, asks the policy, sets its timers.

A load is *alone* when no prefill step ran meanwhile, and a prefill step when nothing was loaded. What overlapped tells
how much they disturb each other.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from services.scheduler.desk import Desk
from services.scheduler.load import Load
from services.scheduler.restore.policy import Prefix, Way, choice, chunk, rest_s
from services.scheduler.restore.rates import Rates
from shared.messages.store import TIER_DISK

PROBE_EVERY = 16
"""So many times a load is not made; then one is, with computing beside it: else a store that has become quicker would
never be found out.
"""
LEAST_S = 0.005
"""How soon a load that is waited for is looked at again."""
KEPT = 8
"""Kinds of workers whose rates are kept in the file."""


class Timing:
    """`rates`: of the present worker's kind, by its fingerprint."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._known: dict[str, Rates] = {}
        self._declined = 0
        self._last = (0.0, 0.0)
        """When the load that ended last began and ended."""
        self.rates = Rates()

    def worker_up(self, fingerprint: bytes, token_s: float) -> None:
        """Computing a token takes about so many seconds, where nothing was measured; 0: no time, or unknown."""
        name = fingerprint.hex()
        self.rates = self._known.pop(name) if name in self._known else Rates()
        self._known[name] = self.rates  # the last one used is the last one forgotten
        if not self.rates.known:
            self.rates.prefill.note(self._desk.settings.step_tokens / 2, token_s)

    def recall(self, plain: Mapping[str, Any]) -> None:
        """What an earlier life has saved; what can't be read is measured again."""
        for name, rates in plain.items():
            try:
                self._known[name] = Rates.of(rates)
            except (ValueError, TypeError, KeyError, AttributeError):
                continue

    def plain(self) -> dict[str, Any]:
        """To be saved."""
        return {name: rates.plain() for name, rates in list(self._known.items())[-KEPT:]}

    # --- choosing

    def choose(self, load: Load, begin: int, ahead: int, block_tokens: int) -> None:
        """Decides how a found prefix comes to be, behind `begin` blocks that the device has."""
        load.low = load.origin = begin
        disk = bytes(tier == TIER_DISK for tier in load.tiers[begin:])
        load.prefix = Prefix((load.first + begin) * block_tokens, block_tokens, disk, ahead)
        load.way = self._way(load.prefix)
        self._desk.counters.loads_declined += load.way == "compute"
        self._desk.counters.loads_beside += load.way == "both"

    def _way(self, prefix: Prefix) -> Way:
        wish = self._desk.settings.restore
        if wish != "auto":
            return wish
        way = choice(self.rates, prefix)
        if way == "compute":
            self._declined += 1
            if self._declined % PROBE_EVERY == 0:
                return "both"
        return way

    def beside(self, now: float, load: Load) -> int:
        """Blocks of a load under way that the next plan may compute."""
        settings, progress = self._desk.settings, load.progress(now)
        if settings.restore != "auto":
            return progress.held - progress.low if settings.restore == "both" else 0
        most = max(1, settings.step_tokens // load.prefix.block_tokens)
        count = chunk(self.rates, load.prefix, progress, load.way, most)
        if not count and self.rates.known:
            again = now + max(LEAST_S, rest_s(self.rates, load.prefix, progress))
            self._desk.timers.set(("pace", load.ticket), again)
        return count

    # --- measuring

    def loaded(self, now: float, load: Load) -> None:
        """Nothing more comes of a load."""
        self._last = load.found_at, now
        host, disk = load.held_by_tier()
        if not (load.void or load.short) and host + disk:
            self.rates.note_load(host, disk, now - load.found_at, min(load.beside_s, now - load.found_at))

    def computed(self, now: float, tokens: int, start: int, seconds: float, loads: Iterable[Load]) -> None:
        """A step has computed part of a prompt, while these loads are under way."""
        overlaps = [_overlap(now - seconds, now, *self._last)]
        for load in loads:
            overlaps.append(_overlap(now - seconds, now, load.found_at, now))
            load.beside_s += overlaps[-1]
        self.rates.note_step(tokens, start, seconds, max(overlaps))


def _overlap(begin: float, end: float, other_begin: float, other_end: float) -> float:
    return max(0.0, min(end, other_end) - max(begin, other_begin))
