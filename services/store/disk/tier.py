"""The disk tier: segment files and their index, behind one synchronous object.

    save:   bytes + footer ── fdatasync ── index transaction        a crash leaves footers without an index entry
    delete: index transaction ── hole punched, footer gone          a crash leaves the same: swept at recovery
    load:   index entry ── bytes + footer read, both verified       anything that differs is a miss, never bytes

Who owns a slot: nobody (hole) ─ save ─► this save, until its index transaction ─► the index ─ delete ─► nobody.

A slot is an int (u32): segment number << 16 | index in the segment. Nothing here decides what to keep: the
catalogue does, and calls `save`, `delete`, `touch`. Policy-free, trio-free; called from the store's IO threads.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from services.store.disk.block import Block, DiskStatistics, footer_of
from services.store.disk.errors import DiskFault, DiskFull, DiskTierError, DiskUnusable, IndexBusy, IndexDamaged
from services.store.disk.gate import Gate
from services.store.disk.index import MAP_BYTES, DiskIndex
from services.store.disk.index_record import ENTRY, Entry
from services.store.disk.meta_file import MetaFile
from services.store.disk.recovery import Recovery
from services.store.disk.segments import SEGMENT_BYTES, SegmentFiles
from shared.config import FaultsConfig
from shared.faults import Faults
from shared.fileio import FileIO
from shared.paths import Lock, PlaceError, Taken

_TOUCHES = 1 << 17
"""Recencies kept until the next sync; they are hints, more than this many are dropped."""

_INDEX_SLACK = 128 << 10
"""Bytes of the capacity kept for what the next transactions add to the index."""


class DiskTier:
    """Thread-safe unless stated; all calls block on IO except where stated."""

    def __init__(
        self,
        directory: Path,
        *,
        capacity: int,
        floor: float = 0.05,
        faults: Faults | None = None,
        io: FileIO | None = None,
        max_blocks: int = 0,
        map_bytes: int = MAP_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Opens what lies in `directory`, in time independent of the number of entries.

        DiskUnusable (also when the disk is so full that no index can be made): run without, try again later.
        IndexBusy: another owner has it. Lookups, loads and saves work at once; call `recover_step` in a thread
        until it returns None.
        """
        self.reason = ""
        self._io = io or FileIO()
        self._faults = faults or Faults(FaultsConfig())
        self._counters: Counter[str] = Counter()
        self._saves = Gate()
        self._mutate = threading.Lock()
        self._touching = threading.Lock()
        self._touched: dict[bytes, int] = {}
        self._damaged = False
        self._closed = False
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = Lock(directory / "lock", "the disk tier")
        except Taken as error:
            raise IndexBusy(str(error)) from error
        except (OSError, PlaceError) as error:
            raise DiskUnusable(f"disk tier: {error}") from error
        try:
            self._open(directory, capacity, floor, max_blocks, map_bytes, segment_bytes)
        except BaseException as error:
            self._abandon()
            if isinstance(error, DiskFull | DiskFault | IndexDamaged | OSError):
                raise DiskUnusable(f"disk tier: {error}") from error
            raise

    def _open(
        self, directory: Path, capacity: int, floor: float, max_blocks: int, map_bytes: int, segment_bytes: int
    ) -> None:
        self._meta = MetaFile(directory / "meta", self._io)
        self._index = DiskIndex(directory / "index", io=self._io, map_bytes=map_bytes)
        slack = min(_INDEX_SLACK, capacity // 16)
        self._files = SegmentFiles(
            directory / "segments",
            capacity=capacity,
            floor=floor,
            io=self._io,
            overhead=lambda: self._index.file_bytes() + slack,
            max_slots=max_blocks,
            segment_bytes=segment_bytes,
        )
        if self._index.reason:
            self._trouble(self._index.reason)
        self._recovery = Recovery(self._index, self._files)

    def _abandon(self) -> None:
        """Opening failed: what is open already is closed again."""
        if hasattr(self, "_files"):
            self._files.close()
        if hasattr(self, "_index"):
            self._index.close(clean=False)
        self._lock.release()

    # --- reading

    def lookup(self, identity: bytes) -> Entry | None:
        """A few us. Never raises for a damaged index: it is a miss, and `statistics().state` says damaged."""
        found = self.lookup_run([identity])
        return found[0] if found else None

    def lookup_run(self, identities: Sequence[bytes]) -> list[Entry]:
        """Entries of the leading run that is on disk, in one read transaction."""
        try:
            return self._index.get_run(identities)
        except DiskTierError as error:
            self._note(error)
            return []

    def load(self, entries: Sequence[Entry], buffers: Sequence[memoryview]) -> list[bool]:
        """Reads payloads into `buffers` (writable, `length` bytes or padded to 4 KiB; arena memory), verified.

        False: a miss; the buffer's content is then undefined, and the block has been dropped from disk and index.
        OSError of a fault hook.
        """
        self._faults.at("store_in_load")
        held = self._files.read([footer_of(entry) for entry in entries], buffers)
        bad = [entry for entry, good in zip(entries, held, strict=True) if not good]
        if bad:
            self._counters["load_misses"] += len(bad)
            try:
                self._drop(bad)
            except DiskTierError as error:
                self._note(error)
        return held

    def _drop(self, bad: Sequence[Entry]) -> None:
        """Drops blocks that can't be read, unless their identity lies elsewhere by now."""
        with self._mutate:
            same = [entry for entry in bad if _where(self._index.get(entry.identity)) == _where(entry)]
            self._delete([entry.identity for entry in same])

    # --- writing

    def save(self, blocks: Sequence[Block]) -> list[Entry]:
        """Writes blocks (of one length) durably; give a chain in order, parents first: they become neighbours.

        Returns the entries of those that are on disk now, in order: fewer than given when room or the device gave
        out, in which case `reason` says why. DiskFull, DiskFault, IndexDamaged: none is. What was not saved has
        left nothing behind.
        """
        if not blocks:
            return []
        with self._saves.shared(), self._noted():
            self._faults.at("store_before_data")
            entries, mark, error = self._write(blocks)
            try:
                if not entries:
                    raise error or DiskFull("no room on disk: capacity or free-space floor reached")
                self._files.flush()
                if self._files.sync_failures != mark:
                    raise DiskFault("a flush failed since these blocks were written")
                self._faults.at("store_after_data")
                self._faults.at("store_commit_index")
                with self._mutate:
                    gone = self._index.apply(entries)
                    self._recovery.saved(entries)
            except (DiskTierError, OSError):
                self._files.free([entry.slot for entry in entries])
                raise
            self._faults.at("store_after_index")
            self._files.free([entry.slot for entry in gone])
            self._counters["saved_blocks"] += len(entries)
            if error is not None:
                self._note(error)
            return entries

    def _write(self, blocks: Sequence[Block]) -> tuple[list[Entry], int, DiskTierError | None]:
        """(entries of what is written, the count of failed flushes before, the first error)."""
        length = blocks[0].length
        if any(block.length != length or len(block.payload) < length for block in blocks):
            raise ValueError("blocks of one save have one length, and a payload of at least that")
        parent = self._index.get(blocks[0].parent)
        slots = self._files.allocate(length, len(blocks), None if parent is None else parent.slot)
        mark = self._files.sync_failures
        entries = [
            Entry(b.identity, b.parent, b.root, slot, length, b.generation, b.checksum, b.recency)
            for b, slot in zip(blocks, slots, strict=False)
        ]
        payloads = [block.payload for block in blocks[: len(slots)]]
        done, error = self._files.write([(footer_of(e), p) for e, p in zip(entries, payloads, strict=True)])
        return [entry for entry, good in zip(entries, done, strict=True) if good], mark, error

    def delete(self, identities: Sequence[bytes]) -> int:
        """Drops blocks, idempotent; returns how many there were. DiskFault, IndexDamaged.

        In state rebuilding, a copy that the rebuild has not come to yet is not known and comes back; `clear` reaches
        these too.
        """
        with self._noted(), self._mutate:
            return self._delete(identities)

    def _delete(self, identities: Sequence[bytes]) -> int:
        if not identities:
            return 0
        try:
            gone = self._index.apply(deletes=identities)
        except DiskFull:
            # A full disk may leave the index no page to write its deletion on. Then the bytes go first: an entry
            # of a hole is a miss, and recovery drops it.
            entries = [entry for entry in map(self._index.get, identities) if entry is not None]
            self._files.free([entry.slot for entry in entries])
            self._index.apply(deletes=identities)
            gone = entries
        self._faults.at("store_in_delete")
        self._files.free([entry.slot for entry in gone])
        self._counters["deleted_blocks"] += len(gone)
        return len(gone)

    def clear(self, root: bytes | None = None) -> tuple[int, int]:
        """Drops all blocks, or those of one root, durably before it returns: (blocks, bytes).

        Waits for saves that are under way; those that begin later are not touched.
        """
        with self._saves.alone(), self._noted(), self._mutate:
            found = self._slots_of(root)
            if root is None:
                self._index.drop_all()
            else:
                identities = [identity for batch in found for identity in batch["identity"].tolist()]
                for start in range(0, len(identities), 4096):
                    self._index.apply(deletes=identities[start : start + 4096])
            self._index.sync()
            self._faults.at("store_in_delete")
            slots = [slot for batch in found for slot in batch["slot"].tolist()]
            size = sum(int(batch["length"].sum()) for batch in found)
            self._files.free(slots)
            strays = self._recovery.strays(root)
            self._files.free([footer.slot for footer in strays])
            self._files.flush()
            return len(slots) + len(strays), size + sum(footer.length for footer in strays)

    def _slots_of(self, root: bytes | None) -> "list[np.ndarray[Any, Any]]":
        found = []
        last: bytes | None = None
        while True:
            rows = self._index.scan(last, 8192)
            wanted = rows.entries
            if root is not None:
                wanted = wanted[wanted["root"] == np.frombuffer(root, dtype="V32")[0]]
            found.append(wanted)
            last = rows.last
            if last is None:
                return found

    def touch(self, recency: Mapping[bytes, int]) -> None:
        """Notes recencies, no IO; they reach the index with the next sync."""
        with self._touching:
            if len(self._touched) < _TOUCHES:
                self._touched.update(recency)

    def sync(self) -> None:
        """Pending recencies and the index to the device; call each second or so. DiskFull, DiskFault, IndexDamaged."""
        with self._noted():
            with self._touching:
                touched, self._touched = self._touched, {}
            if touched:
                with self._mutate:
                    self._index.apply(recency=touched)
            self._index.sync()

    # --- upkeep

    def room(self, length: int) -> int:
        """How many more blocks of `length` bytes fit now; no IO but statvfs."""
        return self._files.room(length)

    def recover_step(self, limit: int = 4096) -> "np.ndarray[Any, Any] | None":
        """The next batch of entries on disk (dtype ENTRY), for the catalogue; None when all are told.

        After a damaged index this reads footers instead, which is slower; saves and loads go on meanwhile. Entries
        that were saved or deleted since open may or may not be among them: ask `lookup` where it matters.
        One thread at a time. DiskFull, DiskFault: call again later. IndexDamaged: `heal` first.
        """
        with self._noted(), self._mutate:
            batch = self._recovery.step(limit)
            self._counters.update(self._recovery.take_counters())
            return batch

    def heal(self) -> None:
        """After state `damaged`: moves the index aside and begins a rebuild from the footers.

        The catalogue forgets what it has on disk, then calls `recover_step` as at a start. DiskFault, DiskUnusable.
        """
        with self._saves.alone(), self._noted(), self._mutate:
            self._index.start_anew(self.reason or "healed")
            self._files.disown_all()
            self._recovery = Recovery(self._index, self._files)
            self._damaged = False

    def get_meta(self, name: str) -> bytes | None:
        """A small durable record (clear epoch, next generation, ...); survives a damaged index. No IO."""
        return self._meta.values.get(name)

    def put_meta(self, values: Mapping[str, bytes]) -> None:
        """Sets small records, durably. DiskFull, DiskFault."""
        with self._noted(), self._mutate:
            self._meta.put(values)

    def statistics(self) -> DiskStatistics:
        """No IO."""
        blocks, size = self._files.used()
        counters = dict(self._counters + self._files.counters)
        state = "damaged" if self._damaged else self._recovery.state
        return DiskStatistics(state, self.reason, blocks, size, self._files.capacity, counters)

    def taken_bytes(self) -> int:
        """What the tier takes of the file system, index included."""
        return self._files.taken_bytes() + self._index.file_bytes()

    def check_integrity(self) -> None:
        """AssertionError with the numbers when index, accounting and footers disagree. Reads everything."""
        with self._saves.alone(), self._mutate:
            self._files.check_integrity()
            seen: set[int] = set()
            for batch in self._slots_of(None):
                for entry in map(Entry._make, batch.tolist()):
                    if entry.slot in seen:
                        raise AssertionError(f"slot {entry.slot} is in the index twice")
                    seen.add(entry.slot)
                    if self._files.footer(entry.slot) != footer_of(entry):
                        raise AssertionError(f"slot {entry.slot} does not hold {entry.identity.hex()}")
            blocks, _ = self._files.used()
            if self._recovery.state == "ready" and blocks != len(seen):
                raise AssertionError(f"{blocks} slots are in use, {len(seen)} are in the index")

    def close(self, *, clean: bool = True) -> None:
        """Syncs and closes; idempotent. No other call may run. `clean` False leaves everything as a kill would."""
        if self._closed:
            return
        self._closed = True
        try:
            if clean and not self._damaged:
                self.sync()
                self._files.flush()
            self._index.close(clean=clean and not self._damaged)
        except DiskTierError as error:
            self._note(error)
        except OSError as error:
            self._trouble(f"closing the disk tier: {error}")
        finally:
            self._files.close()
            self._lock.release()

    # --- trouble

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except DiskTierError as error:
            self._note(error)
            raise
        except OSError as error:
            fault = DiskFault(str(error))
            self._note(fault)
            raise fault from error

    def _note(self, error: DiskTierError) -> None:
        self._counters[type(error).__name__] += 1
        self._trouble(error.reason)
        if isinstance(error, IndexDamaged) and not self._damaged:
            self._damaged = True
            try:
                self._index.distrust_next_time()
            except OSError as failed:
                self._trouble(f"{error.reason}; and its note can't be written: {failed}")

    def _trouble(self, reason: str) -> None:
        self.reason = reason


def _where(entry: Entry | None) -> tuple[int, int] | None:
    return None if entry is None else (entry.slot, entry.generation)


__all__ = ["ENTRY", "Block", "DiskStatistics", "DiskTier", "Entry"]
