"""The store's books checked while it runs: once whenever it has become idle, and when `perdure doctor` asks.

A catalogue that contradicts itself or the arena's headers must not serve: found when idle, it ends the store, and the
next one makes its catalogue anew from headers and index. Asked for, it is told instead.
"""

from typing import Any

import trio

from services.store.catalog.catalog import Catalog
from services.store.catalog.integrity import check_conservation, check_integrity
from services.store.disk_lane import DiskLane
from shared.messages.admin import Integrity

IDLE_S = 1.0
"""How long nothing must have happened."""
CHECK_BLOCKS = 4096
"""Of more blocks only the sums are checked: the whole is done on the loop, at about ten microseconds a block."""


class SelfCheck:
    """Of one catalogue. `checks`: how often it was found idle and right."""

    def __init__(self, catalog: Catalog, lane: DiskLane, log: Any) -> None:
        self._catalog = catalog
        self._lane = lane
        self._log = log
        self.checks = 0

    async def run(self) -> None:
        """For ever; AssertionError ends the store."""
        checked: tuple[int, ...] = ()
        seen: tuple[int, ...] = ()
        while True:
            await trio.sleep(IDLE_S)
            before, seen = seen, self._mark()
            if seen == before and seen != checked:
                complaint = await self._complaint()
                if complaint:
                    self._log.error("catalogue_wrong", reason=complaint)
                    raise AssertionError(complaint)
                checked = self._mark()
                self.checks += 1

    async def asked(self) -> Integrity:
        """Now, between two turns of the disk lane."""
        complaint, skipped = await self._complaint(), ""
        if self._too_large() and not complaint:
            blocks = self._catalog.blocks.entries.live
            skipped = (
                f"it holds {blocks:,} blocks; of more than {CHECK_BLOCKS:,} only the sums are checked, they are right"
            )
        return Integrity(complaint=complaint, skipped=skipped, idle_checks=self.checks)

    async def _complaint(self) -> str:
        async with self._lane.resting():  # then no batch of writes pins anything
            try:
                (check_conservation if self._too_large() else check_integrity)(self._catalog)
            except AssertionError as error:
                return str(error) or "the catalogue contradicts itself"
        return ""

    def _too_large(self) -> bool:
        return self._catalog.blocks.entries.live > CHECK_BLOCKS

    def _mark(self) -> tuple[int, ...]:
        """Changes whenever something happens to the catalogue."""
        catalog = self._catalog
        leases = (len(catalog.leases.open), catalog.leases.counters.asked, catalog.leases.counters.lookups)
        return (catalog.blocks.tick, catalog.epoch, catalog.blocks.entries.live, catalog.behind.length, *leases)
