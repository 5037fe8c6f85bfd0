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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.store.disk.block import Block, DiskStatistics, footer_of
from services.store.disk.errors import DiskFault, DiskFull, DiskTierError, DiskUnusable, IndexDamaged
from services.store.disk.gate import Gate
from services.store.disk.index import MAP_BYTES, DiskIndex
from services.store.disk.index_record import ENTRY, Entry
from services.store.disk.meta_file import MetaFile
from services.store.disk.pending import Pending, same_copy
from services.store.disk.recovery import Recovery
from services.store.disk.segments import SEGMENT_BYTES, SegmentFiles
from services.store.disk.survey import check, identities_in, rows_in
from services.store.disk.tier_place import TierPlace
from services.store.disk.troubles import Troubles
from shared.config import FaultsConfig
from shared.faults import Faults
from shared.fileio import FileIO
from shared.scope import EVERYTHING, Scope

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
        nice: int = 0,
    ) -> None:
        """Opens what lies in `directory`, in time independent of the number of entries.

        DiskUnusable (also when the disk is so full that no index can be made): run without, try again later.
        IndexBusy: another owner has it. Lookups, loads and saves work at once; call `recover_step` in a thread
        until it returns None. `nice`: of the threads that help a save or a rebuild.
        """
        self._io = io or FileIO()
        self._faults = faults or Faults(FaultsConfig())
        self._counters: Counter[str] = Counter()
        self._troubles = Troubles(self._counters, lambda: self._index.distrust_next_time())
        self._saves = Gate()
        self._loads = Gate()
        self._mutate = threading.Lock()
        self._pending = Pending()
        self._closed = False
        self.place = TierPlace(directory)
        try:
            self._open(directory, capacity, floor, max_blocks, map_bytes, segment_bytes, nice)
        except BaseException as error:
            self._abandon()
            if isinstance(error, DiskFull | DiskFault | IndexDamaged | OSError):
                raise DiskUnusable(f"disk tier: {error}") from error
            raise

    def _open(
        self, place: Path, capacity: int, floor: float, max_blocks: int, map_bytes: int, segment_bytes: int, nice: int
    ) -> None:
        self._meta = MetaFile(place / "meta", self._io)
        self._index = DiskIndex(place / "index", io=self._io, map_bytes=map_bytes)
        slack = min(_INDEX_SLACK, capacity // 16)
        self._files = SegmentFiles(
            place / "segments",
            capacity=capacity,
            floor=floor,
            io=self._io,
            overhead=lambda: self._index.file_bytes() + slack,
            max_slots=max_blocks,
            segment_bytes=segment_bytes,
            nice=nice,
        )
        if self._index.reason:
            self._troubles.note("IndexDamaged", self._index.reason)
        self._recovery = Recovery(self._index, self._files)

    def _abandon(self) -> None:
        """Opening failed: what is open already is closed again."""
        if hasattr(self, "_files"):
            self._files.close()
        if hasattr(self, "_index"):
            self._index.close(clean=False)
        self.place.release()

    # --- reading

    def lookup(self, identity: bytes) -> Entry | None:
        """A few us. Never raises for a damaged index: it is a miss, and `statistics().state` says damaged."""
        found = self.lookup_run([identity])
        return found[0] if found else None

    def lookup_run(self, identities: Sequence[bytes]) -> list[Entry]:
        """Entries of the leading run that is on disk, in one read transaction."""
        if self._closed:
            return []
        try:
            found = self._index.get_run(identities)
        except DiskTierError as error:
            self._troubles.note_error(error)
            return []
        return self._pending.leading_good(found)

    def load(self, entries: Sequence[Entry], buffers: Sequence[memoryview]) -> list[bool]:
        """Reads payloads into `buffers` (writable, `length` bytes or padded to 4 KiB; arena memory), verified.

        False: a miss; the buffer's content is then undefined, and the block is no longer found. It leaves index and
        disk at the next `sync`: a load waits for no write. OSError of a fault hook.
        """
        with self._loads.shared():
            if self._closed:
                return [False] * len(entries)
            self._faults.at("store_in_load")
            held = self._files.read([footer_of(entry) for entry in entries], buffers)
            bad = [entry for entry, good in zip(entries, held, strict=True) if not good]
            if bad:
                self._counters["load_misses"] += len(bad)
                self._troubles.note("unreadable", f"a block could not be read back: {self._files.last_fault}", len(bad))
                self._pending.give_up(bad)
            return held

    @property
    def reason(self) -> str:
        """The last trouble, "" for none."""
        return self._troubles.reason

    @property
    def can_tell(self) -> bool:
        """Whether a block that is not found is not here; False when the tier can't tell."""
        return not (self._closed or self._troubles.damaged)

    def _drop_bad(self) -> None:
        """Drops blocks that could not be read, unless their identity lies elsewhere by now."""
        bad = self._pending.take_bad()
        try:
            self._delete([entry.identity for entry in bad if same_copy(self._index.get(entry.identity), entry)])
        except DiskTierError:
            self._pending.give_up(bad)
            raise

    # --- writing

    def save(self, blocks: Sequence[Block]) -> list[Entry]:
        """Writes blocks (of one length) durably; give a chain in order, parents first: they become neighbours.

        Returns the entries of those that are on disk now, in order: fewer than given when room or the device gave
        out, in which case `reason` says why. DiskFull, DiskFault, IndexDamaged: none is. What was not saved has
        left nothing behind.
        """
        if not blocks:
            return []
        with self._saves.shared(), self._troubles.noted():
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
                self._troubles.note_error(error)
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
        with self._troubles.noted(), self._mutate:
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

    def clear(self, scope: Scope = EVERYTHING, names: Sequence[bytes] = ()) -> tuple[int, int]:
        """Drops the blocks of a scope, durably before it returns: (blocks, bytes). Of a line: those of `names`.

        Waits for saves that are under way; those that begin later are not touched.
        """
        with self._saves.alone(), self._troubles.noted(), self._mutate:
            found = rows_in(self._index, scope, names)
            if not scope.mask:
                self._index.drop_all()
            else:
                identities = found["identity"].tolist()
                for start in range(0, len(identities), 4096):
                    self._index.apply(deletes=identities[start : start + 4096])
            self._index.sync()
            self._faults.at("store_in_delete")
            self._files.free(found["slot"].tolist())
            strays = self._recovery.strays(scope)
            self._files.free([footer.slot for footer in strays])
            self._files.flush()
            self._files.remove_empty()
            size = int(found["length"].sum()) + sum(footer.length for footer in strays)
            return len(found) + len(strays), size

    def touch(self, recency: Mapping[bytes, int]) -> None:
        """Notes recencies, no IO; they reach the index with the next sync."""
        self._pending.touch(recency)

    def sync(self) -> list[bytes]:
        """Pending recencies and the index to the device, and upkeep; call each second or so.

        Returns identities of blocks that turned out to be gone with their segment file. DiskFull, DiskFault,
        IndexDamaged, DiskGone.
        """
        with self._troubles.noted():
            self.place.check()
            if touched := self._pending.take_touched():
                with self._mutate:
                    self._index.apply(recency=touched)
            self._index.sync()
            with self._mutate:
                self._drop_bad()
                return self._forget_lost(self._files.tidy())

    def _forget_lost(self, segments: list[int]) -> list[bytes]:
        if not segments:
            return []
        gone = identities_in(self._index, segments)
        self._index.apply(deletes=gone)
        self._files.lost_told(segments)
        self._counters["lost_blocks"] += len(gone)
        names = ", ".join(f"{number:05d}" for number in segments)
        self._troubles.note("unreadable", f"{len(gone)} blocks are gone with segment {names}: removed under us")
        return gone

    # --- upkeep

    def room(self, length: int) -> int:
        """How many more blocks of `length` bytes fit now; no IO but statvfs."""
        return self._files.room(length)

    def shortage(self, length: int, count: int) -> int | None:
        """How many blocks must go before `count` more fit; None when even all of them are not enough. DiskFault."""
        with self._troubles.noted():
            return self._files.shortage(length, count)

    def excess(self) -> int:
        """Bytes beyond the capacity, as after it was lowered."""
        return self._files.excess()

    def recover_step(self, limit: int = 4096) -> "np.ndarray[Any, Any] | None":
        """The next batch of entries on disk (dtype ENTRY), for the catalogue; None when all are told.

        After a damaged index this reads footers instead, which is slower; saves and loads go on meanwhile. Entries
        that were saved or deleted since open may or may not be among them: ask `lookup` where it matters.
        One thread at a time. DiskFull, DiskFault: call again later. IndexDamaged: `heal` first.
        """
        with self._troubles.noted(), self._mutate:
            self.place.check()
            self._drop_bad()
            batch = self._recovery.step(limit)
            self._counters.update(self._recovery.take_counters())
            return batch

    def heal(self) -> None:
        """After state `damaged`: moves the index aside and begins a rebuild from the footers.

        The catalogue forgets what it has on disk, then calls `recover_step` as at a start. DiskFault, DiskUnusable.
        """
        with self._saves.alone(), self._troubles.noted(), self._mutate:
            self.place.check()
            self._pending.take_bad()
            self._index.start_anew(self.reason or "healed")
            self._files.disown_all()
            self._recovery = Recovery(self._index, self._files)
            self._troubles.damaged = False

    def get_meta(self, name: str) -> bytes | None:
        """A small durable record (clear epoch, next generation, ...); survives a damaged index. No IO."""
        return self._meta.values.get(name)

    def get_number(self, name: str) -> int:
        """A small record that is a number; 0 when there is none. No IO."""
        return int.from_bytes((self.get_meta(name) or b"")[:8], "little")

    def put_meta(self, values: Mapping[str, bytes]) -> None:
        """Sets small records, durably. DiskFull, DiskFault."""
        with self._troubles.noted(), self._mutate:
            self._meta.put(values)

    def statistics(self) -> DiskStatistics:
        """No IO."""
        blocks, size = self._files.used()
        counters = Counter(dict(self._counters))  # copied in one step: other threads count meanwhile
        counters.update(dict(self._files.counters))
        state = "damaged" if self._troubles.damaged else self._recovery.state
        unclaimed = self._files.unclaimed() if state != "ready" else 0
        troubles = self._troubles.all()
        return DiskStatistics(
            state, self.reason, blocks, size, unclaimed, self._files.capacity, dict(counters), troubles
        )

    def taken_bytes(self) -> int:
        """What the tier takes of the file system, index included."""
        return self._files.taken_bytes() + self._index.file_bytes()

    def check_integrity(self) -> None:
        """AssertionError with the numbers when index, accounting and footers disagree. Reads all footers."""
        with self._saves.alone(), self._mutate:
            check(self._index, self._files, complete=self._recovery.state == "ready")

    def close(self, *, clean: bool = True) -> None:
        """Syncs and closes, once the loads under way have ended; idempotent. Only loads and lookups may run still.

        `clean` False leaves everything as a kill would.
        """
        if self._closed:
            return
        with self._loads.alone():
            self._closed = True
        try:
            if clean and not self._troubles.damaged:
                self.sync()
                self._files.flush()
            self._index.close(clean=clean and not self._troubles.damaged)
        except DiskTierError as error:
            self._troubles.note_error(error)
        except OSError as error:
            self._troubles.note("DiskFault", f"closing the disk tier: {error.strerror}")
        finally:
            self._files.close()
            self.place.release()


__all__ = ["ENTRY", "Block", "DiskStatistics", "DiskTier", "Entry"]
