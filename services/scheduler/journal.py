"""The journal: what the scheduler has promised, on file before anybody hears of it.

    append(records) ── one write ─► survives the death of every process ── sync(), each second ─► survives power loss

A batch of records is one frame, so a step is there as a whole or not at all. Files are `NNNNNNNN.log`; a new one
begins when the last is full. The oldest goes when every request in it is forgotten; a request that lives long
keeps the files from its Accept on. They are not compacted: a request lives for minutes and a busy scheduler
writes tens of megabytes an hour, which is less trouble than a second writer of promises.

No fsync and no thread on the step path. `append`, `forget` belong to the event loop; `sync` to one thread.
"""

import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from services.scheduler.journal_fold import Fold, keys_of
from services.scheduler.journal_segment import (
    FORMAT,
    HEADER_BYTES,
    pack_header,
    segment_numbers,
    segment_path,
    unpack_header,
)
from services.scheduler.records import AnyRecord
from shared.fileio import NO_ROOM, FileIO, write_all
from shared.framing import HEADER_BYTES as FRAME_HEADER_BYTES
from shared.framing import frame, read_frames
from shared.paths import private_dir

SEGMENT_BYTES = 16 << 20
_RESERVE_BYTES = 8 << 20
"""Left free for the steps of requests that were accepted already: new ones are refused below it."""

_SEARCH_BYTES = 64 << 10


class JournalError(Exception):
    """The journal can't do what it was asked. `reason` is one line for people."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class JournalFull(JournalError):
    """No room on the file system: nothing of the batch is in the journal. Emit nothing of it; append it again."""


class JournalFault(JournalError):
    """The device or file system failed: as JournalFull, but freeing space is not the cure."""


class JournalFormat(JournalError):
    """The journal was written by another version; nothing was changed."""


@dataclass(frozen=True)
class Recovered:
    """What the journal held. `torn_bytes`: of the last, unfinished write, cut off; nothing of it was promised.

    `losses`: one line for each place where whole records are gone, for the log, loudly. `cut_short`: keys of
    requests that lost tokens and go on from before the gap.
    """

    records: list[AnyRecord]
    torn_bytes: int = 0
    losses: list[str] = field(default_factory=list)
    cut_short: frozenset[int] = frozenset()


class Journal:
    """Call `recover` once, then the rest."""

    def __init__(self, directory: Path, *, io: FileIO | None = None, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.directory = directory
        self._io = io or FileIO()
        self._segment_bytes = segment_bytes
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[AnyRecord]).decode
        self._fd = -1
        self._number = 0
        self._size = 0
        self._good = True
        """False: behind `_size` the file may hold part of a failed batch; it takes no more."""
        self._keys: dict[int, set[int]] = {}
        """Per segment, oldest first: the requests in it that are not forgotten."""
        self._lock = threading.Lock()
        self._full: list[int] = []
        """Descriptors of segments that take no more, to be synced and closed."""
        self._gone: list[int] = []
        self._new_names = False
        self.counters: Counter[str] = Counter()

    # --- start

    def recover(self) -> Recovered:
        """Reads everything, cuts a torn tail and opens the journal for appending.

        JournalFormat, JournalFault, JournalFull; PlaceError when the directory is not ours.
        """
        try:
            private_dir(self.directory)
            return self._recover()
        except OSError as error:
            raise _typed(error, f"journal {self.directory}") from error

    def _recover(self) -> Recovered:
        fold = Fold()
        records: list[AnyRecord] = []
        losses: list[str] = []
        torn = 0
        numbers = segment_numbers(self.directory)
        for number in numbers:
            with segment_path(self.directory, number).open("rb") as file:
                head = unpack_header(file.read(HEADER_BYTES))
            if head is not None and head.version != FORMAT:
                raise JournalFormat(
                    f"{segment_path(self.directory, number)} is of journal format {head.version}, this version writes "
                    f"{FORMAT}; start the version that wrote it and let its requests end, or move the file away"
                )
        end = 0
        for position, number in enumerate(numbers):
            data = segment_path(self.directory, number).read_bytes()
            head = unpack_header(data)
            if position and numbers[position - 1] != number - 1:
                losses.append(f"{number - 1:08d}.log, or more before it, is missing")
            elif position and head is not None and head.previous_end > end:
                losses.append(f"{number - 1:08d}.log: ends at byte {end}, it had {head.previous_end}")
            batches, end, reason = self._read(data)
            self._keys[number] = set()
            for batch in batches:
                kept = fold.take(batch)
                records += kept
                self._keys[number] |= keys_of(kept)
            last = number == numbers[-1]
            if end < len(data) and reason == "torn" and last:
                torn = len(data) - end
            elif end < len(data):
                losses.append(f"{number:08d}.log: {reason} at byte {end}, {len(data) - end} bytes from there are lost")
            if last and head is not None and (reason == "torn" or end == len(data)) and end < self._segment_bytes:
                self._reopen(number, data, end)
        if self._fd < 0:
            self._size = end
            self._begin(1 + (numbers[-1] if numbers else 0))
        if fold.cut_short:
            losses.append(f"{len(fold.cut_short)} requests lost tokens and go on from before the gap")
        self.counters["torn_bytes"] += torn
        self.counters["lost_places"] += len(losses)
        self._collect()
        return Recovered(records, torn, losses, frozenset(fold.cut_short))

    def _read(self, data: bytes) -> tuple[list[list[AnyRecord]], int, str]:
        """(batches, where the good ones end, why they end there: torn, or what is wrong)."""
        frames = read_frames(data, HEADER_BYTES)
        batches: list[list[AnyRecord]] = []
        end = min(HEADER_BYTES, len(data))
        for payload, stop in zip(frames.payloads, frames.ends, strict=True):
            try:
                batches.append(self._decode(payload))
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                return batches, end, f"a record can't be read ({error})"
            end = stop
        return batches, end, "torn" if _is_torn(data, end) else "a damaged record"

    def _reopen(self, number: int, data: bytes, end: int) -> None:
        fd = self._io.open(segment_path(self.directory, number), os.O_WRONLY | os.O_APPEND)
        if end < len(data):
            self._io.truncate(fd, end)
        self._fd, self._number, self._size, self._good = fd, number, end, True

    # --- the step path

    def append(self, records: Sequence[AnyRecord]) -> None:
        """All of `records` in one write; they survive the death of this process when it returns.

        JournalFull, JournalFault: none of them is there, the journal is as before, and the same call may be made
        again. Nothing that depends on them may be sent to anybody until it has succeeded.
        """
        if not records:
            return
        batch = frame(self._encode(records))
        try:
            if not self._good or self._size >= self._segment_bytes:
                self._begin(self._number + 1)
            write_all(self._io, self._fd, batch)
        except OSError as error:
            self._cut_back()
            self.counters["failed_appends"] += 1
            raise _typed(error, "journal") from error
        self._size += len(batch)
        self._keys[self._number] |= keys_of(records)
        self.counters["appended_batches"] += 1
        self.counters["appended_bytes"] += len(batch)

    def refusal(self) -> str | None:
        """Why a new request should be refused as `overloaded`: too little room is left to promise more. Else None."""
        try:
            free, _ = self._io.free_bytes(self.directory)
        except OSError as error:
            return f"journal {self.directory} can't be reached: {error.strerror}"
        if free >= _RESERVE_BYTES and self._good:
            return None
        return f"the journal's disk has {free} bytes left, new requests need {_RESERVE_BYTES}; free some space"

    def _begin(self, number: int) -> None:
        """A new segment; the old one takes no more."""
        path = segment_path(self.directory, number)
        fd = self._io.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(self._io, fd, pack_header(number, self._size))
        except OSError:
            self._io.close(fd)
            raise
        with self._lock:
            if self._fd >= 0:
                self._full.append(self._fd)
            self._fd = fd
            self._new_names = True
        self._number, self._size, self._good = number, HEADER_BYTES, True
        self._keys.setdefault(number, set())
        self._collect()

    def _cut_back(self) -> None:
        """Takes what a failed append may have left off the file's end; if that fails, the file takes no more."""
        if self._fd < 0 or not self._good:
            return
        try:
            self._io.truncate(self._fd, self._size)
        except OSError:
            self._good = False

    # --- retention

    def forget(self, key: int) -> None:
        """The request is over and nobody may ask for it any more; files go when all their requests are forgotten."""
        for keys in self._keys.values():
            keys.discard(key)
        self._collect()

    def _collect(self) -> None:
        """The leading segments in which nothing lives are to be removed.

        In order: a request that lost its end before its beginning would come back to life.
        """
        for number in sorted(self._keys):
            if number == self._number or self._keys[number]:
                break
            del self._keys[number]
            with self._lock:
                self._gone.append(number)

    # --- beside the step path

    def sync(self) -> None:
        """Everything appended before is on the device; forgotten segments are removed. JournalFull, JournalFault."""
        with self._lock:
            full, self._full = self._full, []
            gone, self._gone = self._gone, []
            current = os.dup(self._fd) if self._fd >= 0 else -1
            new_names, self._new_names = self._new_names, False
        try:
            for fd in full:
                self._io.fdatasync(fd)
            if current >= 0:
                self._io.fdatasync(current)
            if new_names:
                self._io.sync_dir(self.directory)
            for number in gone:
                try:
                    self._io.unlink(segment_path(self.directory, number))
                    self.counters["removed_segments"] += 1
                except FileNotFoundError:
                    pass
        except OSError as error:
            self.counters["failed_syncs"] += 1
            with self._lock:
                self._gone += gone
                self._new_names |= new_names
            raise _typed(error, "journal") from error
        finally:
            for fd in full:
                self._io.close(fd)
            if current >= 0:
                os.close(current)

    def close(self) -> None:
        """Syncs and closes; idempotent."""
        if self._fd < 0:
            return
        try:
            self.sync()
        finally:
            self._io.close(self._fd)
            self._fd = -1

    def statistics(self) -> dict[str, int]:
        """Counters, and `segments`, `live` (requests not forgotten), `bytes` of the current segment."""
        live: set[int] = set().union(*self._keys.values())
        return {**self.counters, "segments": len(self._keys), "live": len(live), "bytes": self._size}


def _is_torn(data: bytes, end: int) -> bool:
    """Whether what follows `end` is one unfinished write rather than damage: a frame that says it is longer than the
    file, with no whole frame after it (a bounded search: the frame behind a damaged one is mostly near).
    """
    rest = memoryview(data)[end:]
    if len(rest) >= FRAME_HEADER_BYTES and FRAME_HEADER_BYTES + int.from_bytes(rest[:4], "little") <= len(rest):
        return False
    return not any(
        read_frames(rest, at).payloads for at in range(1, min(len(rest) - FRAME_HEADER_BYTES, _SEARCH_BYTES))
    )


def _typed(error: OSError, what: str) -> JournalError:
    reason = f"{what}: {error.strerror or error}"
    return JournalFull(reason) if error.errno in NO_ROOM else JournalFault(reason)
