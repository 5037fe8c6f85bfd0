"""How long the store takes from opening its files to ready, and what memory an entry takes: a synthetic home.

Index and arena headers are real and hold random identities in chains; the segments are sparse files of the right
size, told to be full of data, since a million footers would be gigabytes and no footer is read by a sound start.
Each measurement is a process of its own: `python -m ops.bench.catalogue HOME` prints one line of JSON.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from ops.bench.figures import Figures
from ops.bench.measure import Spread
from services.store.arena.arena import open_arena
from services.store.arena.records import FLAG_CLEAN, PAGE, VALID, Geometry
from services.store.arena.size import EXTENT_BYTES
from services.store.disk.footer import FORMAT, MAX_SLOTS, Superblock
from services.store.disk.index import DiskIndex
from services.store.disk.index_record import Entry
from services.store.disk.segment_file import SegmentFile
from services.store.disk.slot_space import UNKNOWN
from services.store.opening import open_store
from shared.config import Config, FaultsConfig, StoreConfig
from shared.faults import Faults
from shared.fileio import FileIO
from shared.paths import Places

ENTRIES = (20_000, 200_000, 1_000_000)
CHAIN = 64
"""Blocks of one prefix."""
ROOTS = 3
HOST_SHARE = 10
"""One block in so many lies in the arena too."""
BATCH = 20_000


def settings(entries: int) -> Config:
    """A configuration whose tiers hold `entries` blocks of one page."""
    extents = -(-max(entries // HOST_SHARE, 1) // Geometry(1, EXTENT_BYTES, 0).slots(PAGE))
    return Config(store=StoreConfig(host_bytes=(extents + 1) * EXTENT_BYTES, disk_bytes=1 << 50, disk_floor=0.0))


def fill(home: Path, entries: int) -> None:
    """Makes the home."""
    places = Places(home)
    config = settings(entries)
    identities = np.random.default_rng(entries).integers(0, 256, (entries, 32), np.uint8)
    names = [row.tobytes() for row in identities]
    roots = [bytes([number + 1]) * 32 for number in range(ROOTS)]
    io = FileIO()
    segments = places.store / "segments"
    segments.mkdir(parents=True, mode=0o700)
    for number, first in enumerate(range(0, entries, MAX_SLOTS)):
        io.close(SegmentFile.create(io, segments, Superblock(FORMAT, number, PAGE, min(MAX_SLOTS, entries - first))).fd)
    index = DiskIndex(places.store / "index", io=io)
    parent_of = [names[i - 1] if i % CHAIN else roots[i // CHAIN % ROOTS] for i in range(entries)]
    for start in range(0, entries, BATCH):
        index.apply(
            [
                Entry(names[i], parent_of[i], roots[i // CHAIN % ROOTS], i, PAGE, i + 1, i, i // CHAIN)
                for i in range(start, min(start + BATCH, entries))
            ]
        )
    index.apply(meta={b"rebuilding": None})
    index.close()
    arena = open_arena(places.arena(config.store.arena_dir), config.store.host_bytes)
    span, left = arena.geometry.slot_span, entries // HOST_SHARE
    for extent in range(arena.geometry.extents):
        count = arena.headers.format_extent(extent, PAGE) if left else 0
        for at in range(min(count, left)):
            i = entries - left + at
            arena.headers.write(
                extent * span + at,
                VALID,
                identity=names[i],
                parent=parent_of[i],
                root=roots[i // CHAIN % ROOTS],
                generation=i + 1,
                engine=1,
                epoch=0,
                length=PAGE,
                recency=i // CHAIN,
                flags=FLAG_CLEAN,
            )
        left -= min(count, left)
    arena.close()


def measure(home: Path, entries: int) -> dict[str, Any]:
    """In a fresh process: seconds and bytes of one opening."""
    SegmentFile.extents = lambda self: bytearray((UNKNOWN,)) * self.slots  # type: ignore[method-assign]
    config, places = settings(entries), Places(home)
    before = memory()
    begun = time.perf_counter()
    arena = open_arena(places.arena(config.store.arena_dir), config.store.host_bytes)
    headers = len(arena.headers.recover())
    headers_s = time.perf_counter() - begun
    arena.close()
    del arena
    begun, cpu = time.perf_counter(), time.process_time()
    opened = open_store(places, config, Faults(FaultsConfig()), structlog.get_logger())
    ready_s = time.perf_counter() - begun
    cpu_s = time.process_time() - cpu
    assert opened.catalog is not None
    if opened.catalog.blocks.entries.live != entries or opened.adopted != {"host": headers, "disk": entries}:
        raise RuntimeError(f"{entries} entries, {headers} headers, adopted {opened.adopted}")
    after = memory()
    return {
        "entries": entries,
        "headers": headers,
        "headers_s": headers_s,
        "ready_s": ready_s,
        "ready_cpu_s": cpu_s,
        "anon": after["RssAnon"] - before["RssAnon"],
        "file": after["RssFile"] - before["RssFile"],
        "shmem": after["RssShmem"] - before["RssShmem"],
    }


def memory() -> dict[str, int]:
    """Bytes of this process by kind."""
    status = Path("/proc/self/status").read_text()
    return {name: int(kib) << 10 for name, kib in re.findall(r"(Rss\w+):\s+(\d+) kB", status)}


def opened(home: Path, entries: int) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "ops.bench.catalogue", str(home), str(entries)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def catalogue(rounds: int, book: Figures) -> None:
    """The section: each size `rounds` times."""
    note = book.note
    empty: dict[str, Any] = {}
    for entries in (0, *ENTRIES):
        with tempfile.TemporaryDirectory(prefix="perdure-bench-") as base:
            home = Path(base) / "home"
            home.mkdir(mode=0o700)
            try:
                fill(home, entries)
                runs = [opened(home, entries) for _ in range(rounds)]
            finally:
                Places(home).arena().unlink(missing_ok=True)
        if not entries:
            empty = runs[0]
            continue
        ready, cpu = (Spread.of([run[name] for run in runs]) for name in ("ready_s", "ready_cpu_s"))
        largest = entries == max(ENTRIES)
        note(
            f"{entries:,} entries, files to ready, s (beside: CPU)",
            ready,
            cpu,
            ready.median,
            "<= 1" if largest else "none",
        )
        slots = runs[0]["headers"]
        headers = Spread.of([run["headers_s"] for run in runs])
        bar = 0.05 + 1e-6 * slots
        note(f"arena headers of {slots:,} slots, s", headers, None, headers.median / bar, f"<= 1 of {bar:.3f} s")
        each = Spread.of([(run["anon"] - empty["anon"]) / entries for run in runs])
        note(f"RssAnon an entry of {entries:,}, bytes", each, None, each.median, "<= 128" if largest else "none")
        beside = Spread.of([(run["file"] + run["shmem"] - empty["file"] - empty["shmem"]) / entries for run in runs])
        note(f"beside it, mapped index and arena, an entry of {entries:,}, bytes", beside, None, beside.median, "none")


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))))
