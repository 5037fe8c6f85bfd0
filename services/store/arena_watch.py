"""An arena file that somebody removed under its store: said once, then left for a new one, with nothing lost.

    removed ─► one warning; who has the file mapped is served on ─► every block is on disk ──────► this store stops,
            └► an engine could not reach its blocks (a worker that started since) ───────────────► the next makes a
                                                                                                   new arena
A file without a name can't get one again (linkat refuses it), and the copies of a live store can't move to another
file under the feet of its threads. A planned stop does it: its drain writes what is dirty, the supervisor starts the
next store, and the disk tier serves. Without a disk tier nothing is given up before somebody needs the file's name.
"""

from collections.abc import Callable
from typing import Any

import trio

from services.store.arena.arena import Arena
from services.store.catalog.catalog import Catalog
from services.store.disk_lane import DiskLane

LOOK_S = 1.0
PATIENCE_S = 30.0
"""How long blocks that keep coming may hold the stop up; its drain takes the rest."""
YOUNG_S = 5.0
"""A store lives at least so long: something may remove arena after arena."""


class ArenaWatch:
    """Of one arena. `trouble`: one line for status, "" while the file is there; `stop`: begins the planned stop."""

    def __init__(self, arena: Arena, catalog: Catalog, lane: DiskLane, *, stop: Callable[[], None], log: Any) -> None:
        self._arena = arena
        self._catalog = catalog
        self._lane = lane
        self._stop = stop
        self._log = log
        self._since = 0.0
        self._missed = False
        self.trouble = ""

    async def run(self) -> None:
        """For ever, or until the stop has begun."""
        began = trio.current_time()
        while True:
            await trio.sleep(LOOK_S)
            self._look()
            if self.trouble and self._due() and trio.current_time() - began >= YOUNG_S:
                self._stop()
                return

    def unreachable(self) -> bool:
        """An engine says that it could not read blocks: True when that is because the file has no name any more."""
        self._look()
        self._missed = self._missed or bool(self.trouble)
        return bool(self.trouble)

    def _look(self) -> None:
        before, self.trouble = self.trouble, self._arena.trouble() if self._arena.fd >= 0 else ""
        if self.trouble and not before:
            self._since = trio.current_time()
            self._log.warning("arena_trouble", reason=self.trouble)

    def _due(self) -> bool:
        if self._missed:
            return True
        if self._lane.state != "ready":
            return False
        return trio.current_time() - self._since > PATIENCE_S or not self._catalog.statistics().host_dirty
