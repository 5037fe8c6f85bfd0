"""Who is examined: one home, its configuration, which of its services live, and what several checks look at."""

import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ops.doctor.arena_view import ArenaView, read_arena
from ops.doctor.index import IndexRows, read_index
from ops.doctor.journal_view import JournalView, read_journal
from ops.doctor.segments import Segments, read_segments
from services.store.arena.records import VALID
from shared.config import Config
from shared.lock_files import holder
from shared.paths import Places
from shared.welcome import SERVICES


@dataclass
class Patient:
    """`quick`: checksums of payloads are not verified. `now`: the wall clock when the examination began.

    `alone`: we hold the locks of all services ourselves, so that none of them runs.
    """

    places: Places
    config: Config
    quick: bool = False
    now: float = field(default_factory=time.time)
    alone: bool = False

    @cached_property
    def alive(self) -> frozenset[str]:
        """Services of this home whose lock a living process holds."""
        if self.alone:
            return frozenset()
        return frozenset(role for role in SERVICES if holder(self.places.run / f"{role}.lock") is not None)

    @property
    def store_lives(self) -> bool:
        """Whether arena and disk tier may change while we look."""
        return self._stack_runs or "store" in self.alive

    @property
    def journal_lives(self) -> bool:
        """Whether a scheduler writes while we look."""
        return self._stack_runs or "scheduler" in self.alive

    @cached_property
    def _stack_runs(self) -> bool:
        """Whether somebody holds the home: another environment may mean another run dir."""
        return not self.alone and holder(self.places.lock) is not None

    @property
    def arena_path(self) -> Path:
        """The host tier's file: where it is configured, or where the store puts it when it can't be there."""
        shared, fallback = self.places.arena(self.config.store.arena_dir), self.places.store / "arena"
        return fallback if fallback.is_file() and not shared.is_file() else shared

    @cached_property
    def arena(self) -> ArenaView:
        """The host tier's file."""
        return read_arena(self.arena_path, payloads=not self.quick)

    @cached_property
    def host_identities(self) -> frozenset[bytes]:
        """Blocks that the arena holds."""
        records = self.arena.records
        return frozenset(item.tobytes() for item in records[records["state"] == VALID]["identity"])

    @cached_property
    def disk_identities(self) -> frozenset[bytes]:
        """Blocks that the index names."""
        return frozenset(self.index.entries["identity"].tolist())

    @cached_property
    def index(self) -> IndexRows:
        """The disk tier's index, read in a process of its own."""
        return read_index(self.places.store / "index", live=self.store_lives)

    @cached_property
    def segments(self) -> Segments:
        """The disk tier's slots. Read after the index, so that a block saved meanwhile is an orphan at worst."""
        _ = self.index
        return read_segments(self.places.store / "segments", payloads=not self.quick)

    @cached_property
    def journal(self) -> JournalView:
        """What the scheduler has promised."""
        retained = self.config.scheduler.result_ttl_s
        return read_journal(self.places.journal, now=self.now, retained_s=retained, live=self.journal_lives)
