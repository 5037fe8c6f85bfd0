"""Blocks, buffers and tiers for the tests of the disk tier."""

import hashlib
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from services.store.disk.tier import Block, DiskTier, Entry
from shared.fileio import FileIO

LENGTH = 4096
SLOT = LENGTH + 4096
ROOT = b"r" * 32
NO_PARENT = bytes(32)


def name(label: str) -> bytes:
    """A 32-byte identity."""
    return hashlib.sha256(label.encode()).digest()


def payload_of(identity: bytes, length: int = LENGTH) -> bytes:
    """The bytes that a block of this identity has."""
    return hashlib.shake_128(identity).digest(length)


def aligned(nbytes: int) -> memoryview:
    """Page-aligned memory, as the arena's."""
    return memoryview(mmap.mmap(-1, -(-nbytes // 4096) * 4096))[:nbytes]


def block(
    identity: bytes, parent: bytes = NO_PARENT, root: bytes = ROOT, *, generation: int = 1, length: int = LENGTH
) -> Block:
    content = payload_of(identity, length)
    memory = aligned(length)
    memory[:] = content
    checksum = xxhash.xxh3_64_intdigest(content)
    return Block(identity, parent, root, generation, checksum, 0, length, memory)


def chain(label: str, count: int, root: bytes = ROOT, *, length: int = LENGTH) -> list[Block]:
    """Blocks of one prefix, parents first."""
    names = [NO_PARENT] + [name(f"{label}/{n}") for n in range(count)]
    return [block(names[n + 1], names[n], root, length=length) for n in range(count)]


def open_tier(directory: Path, io: FileIO | None = None, **options: Any) -> DiskTier:
    """A tier of 16 MiB with small segments, unless said otherwise; no floor, so that a full test disk is no matter."""
    settings: dict[str, Any] = {"capacity": 16 << 20, "floor": 0.0, "segment_bytes": 64 * SLOT + 4096, **options}
    return DiskTier(directory, io=io, **settings)


def recover(tier: DiskTier) -> "np.ndarray[Any, Any]":
    """Recovers to the end; all entries told."""
    batches = []
    while (batch := tier.recover_step(16)) is not None:
        batches.append(batch)
    return np.concatenate(batches) if batches else np.empty(0)


def read(tier: DiskTier, entries: Sequence[Entry]) -> list[bytes | None]:
    """Payloads of entries, None for a miss."""
    buffers = [aligned(entry.length) for entry in entries]
    held = tier.load(entries, buffers)
    return [bytes(buffer) if good else None for buffer, good in zip(buffers, held, strict=True)]


def fetch(tier: DiskTier, identity: bytes) -> bytes | None:
    """The payload of a block, None for a miss."""
    entry = tier.lookup(identity)
    return None if entry is None else read(tier, [entry])[0]


def segment_of(directory: Path) -> Path:
    """The only segment file there is."""
    (path,) = (directory / "segments").iterdir()
    return path


def offset_of(entry: Entry) -> int:
    """Where an entry's slot begins in its file."""
    return 4096 + (entry.slot & 0xFFFF) * SLOT


def used_bytes(data: Path) -> int:
    """Of an index's file, up to the end of the last page in use; the rest, up to its map's size, is a hole."""
    return -(-len(data.read_bytes().rstrip(b"\0")) // 4096) * 4096
