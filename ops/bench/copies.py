"""Copies from the arena into the pool against memcpy of the same scattered blocks, both in one thread, interleaved.

Ours is what the worker's copy lane runs for a load: the real transfer code on a real arena file in shared memory,
each block checksummed where it arrives. The alternative moves the same bytes and does nothing else.
"""

import ctypes
import os
import time
from collections.abc import Callable

import numpy as np

from ops.bench.figures import Figures
from ops.bench.measure import Spread
from services.store.arena.arena import Arena, open_arena
from services.store.arena.records import aligned
from services.worker.page_store import PageStore
from services.worker.transfer import Transfers
from shared.config import FaultsConfig
from shared.faults import Faults
from shared.messages.base import unpack_u64
from shared.messages.engine import Copy, Transfer
from shared.paths import Places, default_home

BLOCK_BYTES = 2 * 30 * 3 * 64 * 4 * 32
"""SmolLM2's block of 32 tokens in fp32."""
BLOCKS = 188
"""A prefix of 6,000 tokens."""

_libc = ctypes.CDLL(None)
_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def copies(rounds: int, book: Figures) -> None:
    """The section."""
    path = Places(default_home() / f"bench-{os.getpid()}").arena()
    arena = open_arena(path, 3 * BLOCKS * aligned(BLOCK_BYTES))
    try:
        _compare(arena, rounds, book)
    finally:
        arena.close()
        path.unlink(missing_ok=True)


def _compare(arena: Arena, rounds: int, book: Figures) -> None:
    span, dice = arena.geometry.slot_span, np.random.default_rng(1)
    slots = [
        extent * span + index
        for extent in range(arena.geometry.extents)
        for index in range(arena.headers.format_extent(extent, aligned(BLOCK_BYTES)))
    ]
    offsets = [arena.headers.offset(slots[i]) for i in dice.permutation(len(slots))[:BLOCKS].tolist()]
    pool = PageStore(2 * BLOCKS, BLOCK_BYTES)
    pool.blocks[:] = dice.integers(0, 256, BLOCK_BYTES, np.uint8)
    blocks = dice.permutation(2 * BLOCKS)[:BLOCKS].tolist()
    transfers = Transfers(pool, Faults(FaultsConfig()))
    wanted = tuple(Copy(block, offset) for block, offset in zip(blocks, offsets, strict=True))

    def run(save: bool, work: tuple[Copy, ...]) -> list[int]:
        batch = Transfer(epoch=1, seq=1, save=save, arena=str(arena.path), arena_key=arena.key, copies=work)
        done = transfers.execute(batch, lambda: True)
        if done is None or not all(done.ok):
            raise RuntimeError("a copy failed")
        return list(unpack_u64(done.checksums))

    sums = run(True, wanted)
    load = tuple(Copy(copy.block, copy.offset, checksum) for copy, checksum in zip(wanted, sums, strict=True))
    base = np.frombuffer(arena.buffer, np.uint8).ctypes.data
    pairs = [(pool.block(block).ctypes.data, base + offset) for block, offset in zip(blocks, offsets, strict=True)]

    def memcpy() -> None:
        for to, source in pairs:
            _libc.memcpy(to, source, BLOCK_BYTES)

    memcpy()
    run(False, load)
    before = transfers.statistics().bytes_loaded
    ours, theirs = [], []
    for _ in range(max(rounds, 1) * 4):  # tens of milliseconds each
        theirs.append(_rate(memcpy))
        ours.append(_rate(lambda: run(False, load)))
    moved = (transfers.statistics().bytes_loaded - before) / (len(ours) * BLOCKS * BLOCK_BYTES)
    a, b = Spread.of(ours), Spread.of(theirs)
    book.note("6,000 tokens from the arena, checksummed, GB/s against memcpy", a, b, a.median / b.median, ">= 0.7")
    book.note("bytes moved by a load against its payload", Spread.of([moved]), None, moved, "<= 1.05")


def _rate(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return BLOCKS * BLOCK_BYTES / (time.perf_counter() - begun) / 1e9
