"""The disk tier: segment files and their index, behind one synchronous object.

    save:   bytes + footer ── fdatasync ── index transaction        a crash leaves footers without an index entry
    delete: index transaction ── hole punched, footer gone          a crash leaves the same: swept at recovery
    load:   index entry ── bytes + footer read, both verified       anything that differs is a miss, never bytes

A slot is an int (u32): segment number << 16 | index in the segment. Nothing here decides what to keep: the
catalogue does, and calls `save`, `delete`, `touch`. Policy-free, trio-free; called from the store's IO threads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shared.config import FaultsConfig
from shared.faults import Faults


class Entry(NamedTuple):
    """One block on disk, as the index knows it. `recency` is a number of the catalogue's own clock."""

    identity: bytes
    parent: bytes
    root: bytes
    slot: int
    length: int
    generation: int
    checksum: int
    recency: int


class Block(NamedTuple):
    """A block to save: `payload` is `length` bytes, best page-aligned and padded with zeros or anything to 4 KiB."""

    identity: bytes
    parent: bytes
    root: bytes
    generation: int
    checksum: int
    recency: int
    payload: memoryview


@dataclass(frozen=True)
class DiskStatistics:
    """Counters since open, and sizes now. `state`: recovering, rebuilding, ready, damaged or closed."""

    state: str
    reason: str
    blocks: int
    bytes: int
    capacity: int
    room: int
    read_bytes: int
    written_bytes: int
    counters: dict[str, int]


class DiskTier:
    """Thread-safe unless stated; all calls block on IO except where stated."""

    def __init__(
        self,
        directory: Path,
        *,
        capacity: int,
        floor: float = 0.05,
        faults: Faults | None = None,
        max_blocks: int = 0,
    ) -> None:
        """Opens (DiskUnusable, IndexBusy) what lies in `directory`, in time independent of the number of entries.

        Lookups, loads and saves work at once; call `recover_step` in a thread until it returns None.
        """
        raise NotImplementedError

    def lookup(self, identity: bytes) -> Entry | None:
        """2 us; never raises for a damaged index: then it is a miss and `statistics().state` is damaged."""
        raise NotImplementedError

    def lookup_run(self, identities: Sequence[bytes]) -> list[Entry]:
        """Entries of the leading run that is on disk, in one read transaction."""
        raise NotImplementedError

    def load(self, entries: Sequence[Entry], buffers: Sequence[memoryview]) -> list[bool]:
        """Reads payloads into `buffers` (writable, `length` bytes or padded to 4 KiB; arena memory), verified.

        False: a miss; the buffer's content is then undefined and the entry has been dropped from disk and index.
        """
        raise NotImplementedError

    def save(self, blocks: Sequence[Block]) -> list[Entry]:
        """Writes blocks (one length for all) durably; give a chain in order, parents first: neighbours.

        Returns entries of a prefix of `blocks`: fewer than given when there is no more room. DiskFault, DiskFull
        (nothing fitted): what was not returned is not on disk.
        """
        raise NotImplementedError

    def delete(self, identities: Sequence[bytes]) -> int:
        """Drops blocks, idempotent; returns how many there were."""
        raise NotImplementedError

    def clear(self, root: bytes | None = None) -> tuple[int, int]:
        """Drops all blocks, or those of one root, durably before it returns: (blocks, bytes)."""
        raise NotImplementedError

    def touch(self, recency: Mapping[bytes, int]) -> None:
        """Notes recencies, no IO; they reach the index with the next save or sync."""
        raise NotImplementedError

    def room(self, length: int) -> int:
        """How many more blocks of `length` bytes fit now; no IO but statvfs."""
        raise NotImplementedError

    def sync(self) -> None:
        """Pending recencies and the index to the device; call each second or so."""
        raise NotImplementedError

    def recover_step(self, limit: int = 4096) -> "np.ndarray[Any, Any] | None":
        """The next batch of entries on disk (dtype `ENTRY`), for the catalogue; None when all are told.

        After a damaged index this reads footers instead (and is slower); saves go on meanwhile. Entries saved or
        deleted since open may or may not be among them: ask `lookup` if it matters, or let the catalogue ignore
        identities that it knows. One thread at a time.
        """
        raise NotImplementedError

    def heal(self) -> None:
        """After state `damaged`: moves the index aside and starts a rebuild; then call `recover_step` again."""
        raise NotImplementedError

    def get_meta(self, name: str) -> bytes | None:
        """A small durable record (clear epoch, next generation, ...)."""
        raise NotImplementedError

    def put_meta(self, values: Mapping[str, bytes]) -> None:
        """Sets small records durably."""
        raise NotImplementedError

    def statistics(self) -> DiskStatistics:
        """No IO."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raises AssertionError with the numbers when index, allocator and files disagree; reads everything."""
        raise NotImplementedError

    def close(self) -> None:
        """Syncs and closes; idempotent. No other call may run."""
        raise NotImplementedError


ENTRY = np.dtype(
    [
        ("identity", "V32"),
        ("parent", "V32"),
        ("root", "V32"),
        ("slot", "<u4"),
        ("length", "<u4"),
        ("generation", "<u8"),
        ("checksum", "<u8"),
        ("recency", "<u8"),
    ]
)
_NO_FAULTS = Faults(FaultsConfig())
