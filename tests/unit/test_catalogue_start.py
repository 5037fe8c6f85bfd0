"""P25: what a start does grows with the number of entries by numpy's constant, never by Python's."""

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from ops.bench.catalogue import fill, settings
from services.store.catalog.catalog import Catalog
from services.store.catalog.integrity import check_integrity
from services.store.disk.segment_file import SegmentFile
from services.store.disk.slot_space import UNKNOWN
from services.store.opening import Opened, open_store
from shared.config import FaultsConfig
from shared.faults import Faults
from shared.paths import Places


@pytest.fixture
def full_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentFile, "extents", lambda self: bytearray((UNKNOWN,)) * self.slots)


def opened(home: Path, entries: int) -> Opened:
    return open_store(Places(home), settings(entries), Faults(FaultsConfig()), structlog.get_logger())


def closed(store: Opened) -> None:
    assert store.arena is not None
    assert store.disk is not None
    store.disk.close(clean=False)
    store.arena.close()


@pytest.mark.usefixtures("full_segments")
def test_p25_a_start_makes_no_python_call_an_entry(tmp_path: Path) -> None:
    calls: dict[int, int] = {}
    for entries in (2_000, 20_000):
        home = tmp_path / str(entries)
        home.mkdir(mode=0o700)
        count = 0

        def event(frame: Any, what: str, argument: Any) -> None:
            nonlocal count
            count += what in ("call", "c_call")

        try:
            fill(home, entries)
            threading.setprofile(event)
            sys.setprofile(event)
            try:
                store = opened(home, entries)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
            assert store.catalog is not None
            assert store.catalog.blocks.entries.live == entries
            closed(store)
        finally:
            Places(home).arena().unlink(missing_ok=True)
        calls[entries] = count
    assert calls[20_000] - calls[2_000] < 2_000


@pytest.mark.usefixtures("full_segments")
def test_p25_what_a_start_finds_is_the_whole_of_both_tiers_in_order(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    try:
        fill(home, 2_000)
        store = opened(home, 2_000)
        catalog: Catalog | None = store.catalog
        assert catalog is not None
        check_integrity(catalog)
        entries = catalog.blocks.entries
        linked = np.count_nonzero(entries.columns["parent"][: entries.top] < entries.top)
        assert linked == 2_000 - -(-2_000 // 64)  # all but the first of each chain
        oldest = list(entries.disk_order.from_oldest(0))
        ticks = [entries.tick[entry] for entry in oldest]
        assert ticks == sorted(ticks)
        place = {entry: at for at, entry in enumerate(oldest)}
        parents = [(entry, entries.parent[entry]) for entry in oldest if entries.parent[entry] < entries.top]
        assert all(place[parent] > place[entry] for entry, parent in parents)
        closed(store)
    finally:
        Places(home).arena().unlink(missing_ok=True)
