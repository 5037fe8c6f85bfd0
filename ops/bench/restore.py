"""A prefix from disk into the arena, as the store does it, against plain direct reads of the same slots.

Ours is the store's own path: lookup in the catalogue, reader threads, one direct vectored read for a run of
neighbours, every footer and checksum verified, the blocks told in order. The alternative issues the same reads, of the
same sizes, as many at a time, into memory of the same kind, and looks at nothing. The page cache is cold on both sides:
reads are direct, and what the file system keeps of the files is given up before each.
"""

import mmap
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
import trio
import xxhash

from ops.bench.copies import BLOCK_BYTES, BLOCKS
from ops.bench.direct_reads import forget_pages
from ops.bench.figures import Figures
from ops.bench.measure import Spread
from services.store.arena.records import aligned
from services.store.catalog.catalog import Catalog
from services.store.catalog.leases import Lease, StagedRun
from services.store.catalog.order import NONE
from services.store.disk.block import Block
from services.store.disk.footer import MAX_SLOTS, PAGE, SLOT_BITS, slot_bytes
from services.store.disk.slot_io import cut_runs
from services.store.disk.tier import DiskTier
from services.store.opening import Opened, open_store
from services.store.stager import READERS, Stager
from shared.config import Config, FaultsConfig, StoreConfig
from shared.faults import Faults
from shared.paths import Places, default_home

OWNER = ("bench", 1)
PREFIXES = 2
"""Loaded in turn."""
ROOT = b"bench".ljust(32)


@dataclass
class Prefix:
    """The names of its blocks, and the reads that bring it: (offset in the file, how many slots)."""

    names: list[bytes]
    reads: list[tuple[Path, int, int]]


def restore(rounds: int, book: Figures) -> None:
    """The section; about 600 MB of disk beside the home, and as much shared memory, until it ends."""
    base = default_home() / f"bench-{os.getpid()}"
    places = Places(base)
    base.mkdir(parents=True, mode=0o700)
    try:
        prefixes = _fill(places)
        trio.run(_compare, places, prefixes, rounds, book)
    finally:
        shutil.rmtree(base, ignore_errors=True)
        places.arena().unlink(missing_ok=True)


def _fill(places: Places) -> list[Prefix]:
    """Two prefixes on disk, written as the write-behind lane does."""
    tier = DiskTier(places.store, capacity=4 << 30, floor=0.0)
    memory = memoryview(mmap.mmap(-1, aligned(BLOCK_BYTES)))
    memory[:BLOCK_BYTES] = np.random.default_rng(1).bytes(BLOCK_BYTES)
    checksum = xxhash.xxh3_64_intdigest(memory[:BLOCK_BYTES])
    prefixes = []
    for number in range(PREFIXES):
        names = [bytes([number + 1, index]).ljust(32, b"b") for index in range(BLOCKS)]
        slots: list[int] = []
        for start in range(0, BLOCKS, 6):
            blocks = [
                Block(names[i], names[i - 1] if i else ROOT, ROOT, 1, checksum, i, BLOCK_BYTES, memory)
                for i in range(start, min(start + 6, BLOCKS))
            ]
            slots += [entry.slot for entry in tier.save(blocks)]
        size = slot_bytes(BLOCK_BYTES)
        reads = []
        for run in cut_runs(sorted(slots), size):
            path = places.store / "segments" / f"{run[0] >> SLOT_BITS:05d}-{size - PAGE}.seg"
            reads.append((path, PAGE + (run[0] & (MAX_SLOTS - 1)) * size, len(run)))
        prefixes.append(Prefix(names, reads))
    tier.close()
    return prefixes


async def _compare(places: Places, prefixes: list[Prefix], rounds: int, book: Figures) -> None:
    host = (BLOCKS + BLOCKS // 4) * aligned(BLOCK_BYTES)
    config = Config(store=StoreConfig(host_bytes=host, disk_bytes=4 << 30, disk_floor=0.0))
    opened = open_store(places, config, Faults(FaultsConfig()), structlog.get_logger())
    arena, catalog, disk = opened.arena, opened.catalog, opened.disk
    if arena is None or catalog is None or disk is None:
        raise RuntimeError(f"the store did not open: {opened.notes}, {opened.disk_reason}")
    direct = _Direct(arena.path.with_name(arena.path.name + "-direct"), host)
    ours: list[float] = []
    theirs: list[float] = []
    moved: list[float] = []
    try:
        async with trio.open_nursery() as nursery:
            loader = _Loader(opened, catalog)
            loader.stager.disk = disk
            nursery.start_soon(loader.stager.run)
            for turn in range(PREFIXES + 2 * max(rounds, 1)):
                prefix = prefixes[turn % PREFIXES]
                before = disk.statistics().counters.get("read_bytes", 0)
                sides = [loader.load, direct.load]
                for side in sides if turn // 2 % 2 else reversed(sides):
                    forget_pages(places.store)
                    begun = time.perf_counter()
                    await side(prefix)
                    rate = BLOCKS * BLOCK_BYTES / (time.perf_counter() - begun) / 1e9
                    if turn >= PREFIXES:  # the first of each is not counted: memory is touched, threads are started
                        (ours if side is sides[0] else theirs).append(rate)
                loader.forget(prefix)
                moved.append((disk.statistics().counters["read_bytes"] - before) / (BLOCKS * BLOCK_BYTES))
            nursery.cancel_scope.cancel()
    finally:
        direct.close()
        disk.close()
        arena.close()
    a, b = Spread.of(ours), Spread.of(theirs)
    book.note("6,000 tokens from disk, verified, GB/s against plain reads", a, b, a.median / b.median, ">= 0.7")
    total = Spread.of(moved)
    book.note("bytes read from disk against their payload", total, None, total.high, "<= 1.05")


class _Loader:
    """What the store does for a lookup, without the sockets."""

    def __init__(self, opened: Opened, catalog: Catalog) -> None:
        assert opened.arena is not None
        self.catalog = catalog
        self.stager = Stager(opened.arena, catalog, self._told)
        self._lease: Lease | None = None
        self._told_blocks = 0
        self._done = trio.Event()

    def _told(self, run: StagedRun) -> None:
        if run.failed:
            raise RuntimeError(f"block {run.first} did not come from disk")
        if self._lease is run.lease:
            self._told_blocks += len(run.places)
            self.catalog.leases.taken(run.lease.number, OWNER, range(run.first, run.first + len(run.places)))
            self.stager.begin(self.catalog.leases.more())
            if self._told_blocks == BLOCKS:
                self._done.set()

    async def load(self, prefix: Prefix) -> None:
        """From the lookup until the last block is told."""
        self._done = trio.Event()
        found = self.catalog.lookup(OWNER, prefix.names)
        missing = sum(place.from_disk for place in found.places)
        if found.lease is None or missing != BLOCKS:
            raise RuntimeError(f"{missing} of {BLOCKS} blocks would come from disk")
        self._lease, self._told_blocks = found.lease, 0
        self.stager.begin(found.orders)
        await self._done.wait()

    def forget(self, prefix: Prefix) -> None:
        """Gives the lease back, and the host's copies up, so that all comes from disk again."""
        assert self._lease is not None
        self.catalog.leases.release(self._lease.number, OWNER)
        blocks = self.catalog.blocks
        for entry in map(blocks.entries.map.get, prefix.names):
            if blocks.entries.host[entry] != NONE:
                blocks.drop_host(entry)


class _Direct:
    """Reads as many runs at a time as the store has readers, into a file in shared memory."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.posix_fallocate(fd, 0, nbytes)
        self._memory = memoryview(mmap.mmap(fd, nbytes))
        os.close(fd)
        self._threads = ThreadPoolExecutor(READERS)
        self._footers = memoryview(mmap.mmap(-1, BLOCKS * PAGE))

    async def load(self, prefix: Prefix) -> None:
        """Returns when all is read."""
        await trio.to_thread.run_sync(self._read_all, prefix)

    def _read_all(self, prefix: Prefix) -> None:
        files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path, _, _ in prefix.reads}
        size, work, done = aligned(BLOCK_BYTES), [], 0
        for path, offset, count in prefix.reads:
            parts: list[memoryview] = []
            for index in range(done, done + count):
                parts += [self._memory[index * size : (index + 1) * size], self._footers[index * PAGE :][:PAGE]]
            work.append((files[path], parts, offset, count * slot_bytes(BLOCK_BYTES)))
            done += count
        got = list(self._threads.map(lambda each: os.preadv(each[0], each[1], each[2]), work))
        for fd in files.values():
            os.close(fd)
        if got != [each[3] for each in work]:
            raise RuntimeError(f"short reads: {got}")

    def close(self) -> None:
        """Removes the file."""
        self._threads.shutdown()
        self._path.unlink()
