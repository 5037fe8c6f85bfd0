"""The index of the disk tier: identity -> where the block lies and what it is. LMDB, rebuildable from footers.

Commits are not synced one by one (7 us against 7 ms); `sync` makes all of them durable. Any thread may call
anything; transactions never outlive one method. Any error of LMDB but a full disk is `IndexDamaged`: the caller
answers misses, moves the index aside and rebuilds it.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np

from services.store.disk import row_table
from services.store.disk.errors import DiskFault, DiskFull, DiskTierError, DiskUnusable, IndexBusy, IndexDamaged
from services.store.disk.gate import Gate
from services.store.disk.index_place import IndexPlace
from services.store.disk.index_record import (
    ENTRY,
    ROW_BYTES,
    Entry,
    checked_rows,
    pack_value,
    sealed,
    unpack_value,
    unsealed,
)
from shared.fileio import NO_ROOM, FileIO

FORMAT = b"2"
"""Raised when the meaning of a record changes; an index of another format is rebuilt."""

MAP_BYTES = 4 << 20
MAX_MAP_BYTES = 1 << 42
REBUILDING = b"rebuilding"
"""Small record that is there from an index's first transaction until all slots on disk have been gone through."""

_FORMAT_KEY = b"format"


class Rows(NamedTuple):
    """A batch of a scan: dtype ENTRY, where to go on (None: it was the last), identities of damaged rows."""

    entries: "np.ndarray[Any, Any]"
    last: bytes | None
    damaged: list[bytes]


class DiskIndex:
    """`reason`: why it was begun anew although there had been one (None: it was not, or there was none)."""

    def __init__(self, directory: Path, *, io: FileIO, map_bytes: int = MAP_BYTES) -> None:
        """Opens or creates; what can't be trusted is moved aside first. DiskUnusable, DiskFull, DiskFault.

        Takes no lock of its own: its owner holds the tier's. `map_bytes` is where the map starts; it doubles.
        """
        self.reason: str | None = None
        self.created = False
        self._place = IndexPlace(directory, io)
        self._io = io
        self._gate = Gate()
        self._syncing = threading.Lock()
        self._pid = os.getpid()
        self._map_bytes = map_bytes
        self._env: Any = None
        try:
            self._open()
        except BaseException as error:
            self._drop_env()
            if not isinstance(error, OSError):
                raise
            raise DiskUnusable(f"disk tier: index {directory} can't be used: {error.strerror or error}") from error

    # --- open and close

    def _open(self) -> None:
        self.reason = self._place.distrust()
        if self.reason is None:
            try:
                self._open_env()
                return
            except IndexDamaged as error:
                self.reason = error.reason
                self._drop_env()
        self._place.move_aside()
        self._open_env()

    def _open_env(self) -> None:
        with self._place.opening():
            self.created = not self._place.data.exists()
            self._place.in_use()
            size = 0 if self.created else self._place.data.stat().st_size
            with self._typed():
                self._env = lmdb.open(
                    str(self._place.directory),
                    map_size=max(self._map_bytes, size),
                    sync=False,
                    readahead=False,
                    max_dbs=4,
                    mode=0o600,
                    max_spare_txns=4,
                )
                self._env.reader_check()
            self._place.has_opened()
            self._place.reach(self._env.info()["map_size"])
            self._meta = self._table(b"meta")
            found = self.get_meta(_FORMAT_KEY)
            if found != FORMAT and not self.created:
                raise IndexDamaged(f"the index is of format {found!r}, this version writes {FORMAT!r}")
            self._blocks = self._table(b"blocks", **row_table.KIND)
            if self.created:
                self.apply(meta={_FORMAT_KEY: FORMAT, REBUILDING: b"1"})

    def _table(self, name: bytes, **kind: bool) -> Any:
        while True:
            try:
                with self._typed():
                    return self._env.open_db(name, **kind)
            except _MapFull:
                self._grow()

    def close(self, *, clean: bool = True) -> None:
        """Syncs and closes; idempotent. `clean` False leaves everything as a kill would."""
        if self._env is None:
            return
        if clean:
            self.sync()
        self._drop_env()
        if clean:
            self._place.clean()

    def _drop_env(self) -> None:
        with self._gate.alone():
            env, self._env = self._env, None
            if env is not None:
                env.close()

    def start_anew(self, reason: str) -> None:
        """Moves the index aside and begins an empty one; what others read or write meanwhile is IndexDamaged."""
        self._drop_env()
        try:
            self._place.move_aside()
            self._open_env()
        except OSError as error:
            raise DiskFault(f"the index can't be begun anew: {error.strerror or error}") from error
        self.reason = reason

    # --- reading

    def get(self, identity: bytes) -> Entry | None:
        """None also for a row whose CRC fails."""
        with self._reading() as txn, txn.cursor(db=self._blocks) as cursor:
            stored = row_table.find(cursor, identity)
        return None if stored is None else unpack_value(identity, stored)

    def get_run(self, identities: Iterable[bytes]) -> list[Entry]:
        """Entries of the leading run that is here."""
        found: list[Entry] = []
        self._gate.enter()  # not `_reading`: on the path of every lookup, and half as long without it
        try:
            with self._alive().begin() as txn, txn.cursor(db=self._blocks) as cursor:
                for identity in identities:
                    stored = row_table.find(cursor, identity)
                    entry = None if stored is None else unpack_value(identity, stored)
                    if entry is None:
                        break
                    found.append(entry)
        except lmdb.Error as error:
            raise _typed_error(error) from error
        finally:
            self._gate.leave()
        return found

    def scan(self, after: bytes | None, limit: int) -> Rows:
        """`limit` rows or some more, in key order, in one read transaction; `after`: the last scan's `last`."""
        first = 0 if after is None else after[0]
        with self._reading() as txn, txn.cursor(db=self._blocks) as cursor:
            raw, following = row_table.read(cursor, first, limit)
        if len(raw) % ROW_BYTES:
            raise IndexDamaged(f"the index gives rows of {len(raw)} bytes, which is no multiple of {ROW_BYTES}")
        entries, damaged = checked_rows(raw)
        return Rows(entries, bytes((following,)) if following < row_table.KEYS else None, damaged)

    def count(self) -> int:
        """Rows, damaged ones included."""
        with self._reading() as txn:
            return int(txn.stat(self._blocks)["entries"])

    def get_meta(self, name: bytes) -> bytes | None:
        """A small record; None when it is not there or damaged."""
        with self._reading() as txn:
            stored = txn.get(name, db=self._meta)
        return None if stored is None else unsealed(name, stored)

    def file_bytes(self) -> int:
        """What the index takes of the file system, with one that was moved aside."""
        return self._place.file_bytes()

    # --- writing

    def apply(
        self,
        puts: Sequence[Entry] = (),
        deletes: Iterable[bytes] = (),
        *,
        recency: Mapping[bytes, int] | None = None,
        meta: Mapping[bytes, bytes | None] | None = None,
    ) -> list[Entry]:
        """One transaction; returns the entries that are no longer there: deleted, or replaced by a put.

        `recency` changes rows that exist and no others. `meta`: None deletes. All or nothing: DiskFull, DiskFault,
        IndexDamaged leave what was. Deletes go first.
        """
        deletes = list(deletes)
        while True:
            gone: list[Entry] = []
            try:
                with self._writing() as txn, txn.cursor(db=self._blocks) as cursor:
                    for identity in deletes:
                        self._collect(gone, identity, row_table.pop(cursor, identity))
                    for entry in puts:
                        self._collect(gone, entry.identity, row_table.put(cursor, entry.identity, pack_value(entry)))
                    for identity, value in (recency or {}).items():
                        stored = row_table.find(cursor, identity)
                        found = None if stored is None else unpack_value(identity, stored)
                        if found is not None:
                            row_table.put(cursor, identity, pack_value(found._replace(recency=value)))
                    for name, content in (meta or {}).items():
                        if content is None:
                            txn.delete(name, db=self._meta)
                        else:
                            txn.put(name, sealed(name, content), db=self._meta)
                return gone
            except _MapFull:
                self._grow()

    def drop_all(self) -> None:
        """All blocks, in one transaction; small records stay."""
        while True:
            try:
                with self._writing() as txn:
                    txn.drop(self._blocks, delete=False)
                return
            except _MapFull:
                self._grow()

    def sync(self) -> None:
        """Everything committed is on the device. IndexDamaged when the file is not there any more."""
        if (moved := self._place.moved()) is not None:
            raise IndexDamaged(f"the index: {moved}")
        with self._syncing, self._gate.shared(), self._typed():
            self._io.mark("index sync")
            self._alive().sync(True)

    def scan_begins(self) -> None:
        """Notes that a start reads the whole index: if that kills it again and again, the index is at fault."""
        self._place.scan_begins()

    def scan_ends(self) -> None:
        """The note of `scan_begins` is over."""
        self._place.scan_ends()

    def distrust_next_time(self) -> None:
        """After IndexDamaged: the next start moves the index aside."""
        self._place.distrust_next_time()

    # --- inside

    @staticmethod
    def _collect(gone: list[Entry], identity: bytes, stored: bytes | None) -> None:
        entry = None if stored is None else unpack_value(identity, stored)
        if entry is not None:
            gone.append(entry)

    def _alive(self) -> Any:
        if self._env is None:
            raise IndexDamaged("the index is closed")
        if os.getpid() != self._pid:
            raise IndexBusy("the index was opened before a fork; LMDB must not be used in the child")
        return self._env

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        with self._gate.shared(), self._typed(), self._alive().begin() as txn:
            yield txn

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        with self._gate.shared(), self._typed(), self._alive().begin(write=True) as txn:
            yield txn
            self._io.mark("index transaction")

    def _grow(self) -> None:
        # A sync takes as long as the device likes; to wait for it inside the gate would keep readers out as well.
        with self._syncing, self._gate.alone(), self._typed():
            size = self._alive().info()["map_size"]
            if size >= MAX_MAP_BYTES:
                raise DiskFull(f"the index has reached its largest map, {size} bytes")
            if (moved := self._place.moved()) is not None:
                raise IndexDamaged(f"the index: {moved}")
            try:
                self._place.reach(2 * size)
            except OSError as error:
                raise (DiskFull if error.errno in NO_ROOM else DiskFault)(
                    f"the index can't grow: {error.strerror}"
                ) from error
            self._alive().set_mapsize(2 * size)

    @contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise _typed_error(error) from error


def _typed_error(error: Exception) -> DiskTierError:
    text = f"the index: {error}"
    if isinstance(error, lmdb.MapFullError):
        return _MapFull(text)
    if isinstance(error, lmdb.DiskError):
        return DiskFull(text)
    return DiskFault(text) if any(words in text for words in _NOT_THE_INDEX) else IndexDamaged(text)


_NOT_THE_INDEX = (
    "Input/output",
    "Read-only",
    "Permission denied",
    "Too many open files",
    "Cannot allocate memory",
    "No space left",
    "quota exceeded",
)
"""Errors of the system; LMDB has no types for them. To begin the index anew would not help, and cost a rebuild."""


class _MapFull(DiskTierError):
    """The transaction is lost; grow and do it again."""


__all__ = ["ENTRY", "DiskIndex", "Entry", "IndexBusy", "IndexDamaged", "Rows"]
