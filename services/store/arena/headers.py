"""The header tables of an arena: the only record of what the host tier holds, written only by the store.

    reserve: GRANTED header, then the grant is told      commit: bytes complete, then the VALID header
    free:    state word to FREE, then the rest wiped     a torn header has a bad CRC and is FREE

Works on any writable buffer of the arena's layout: the mapped file, or a bytearray. Every store into it goes through
`_put`, `_put_word` or `_free_rows` and nothing else, so that a test can count them, tear them and die at each.
"""

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.store.arena.records import (
    BOOT_AT,
    EPOCH_AT,
    EXTENT,
    EXTENT_BYTES,
    FLAGS_AT,
    FREE,
    GRANTED,
    NAMED,
    PAGE,
    RECENCY_AT,
    RECORD,
    STARTS_AT,
    STATE_AT,
    VALID,
    Geometry,
    aligned,
    header_crc,
    header_crcs,
    pack_extent,
    unpack_extent,
)

FOUND = np.dtype([("slot", "<u4"), *((name, RECORD.fields[name][0]) for name in RECORD.names or ())])  # type: ignore[index]
"""A record that holds, with its slot."""

MOST_RECENT = 1 << 62
"""No CRC covers a recency: a damaged one must leave the clock room to go on."""

_WORD = struct.Struct("<Q")
_WHOLE = f"V{RECORD.itemsize}"


class Headers:
    """Header tables over `buffer`, whose superblock has been checked and says `geometry`.

    `check`: called before memory is touched; it does not return when that would be SIGBUS.
    """

    def __init__(self, buffer: Any, geometry: Geometry, check: Callable[[], None] = lambda: None) -> None:
        self.geometry = geometry
        self.damaged = 0
        """Headers that `recover` found torn or damaged."""
        self._check = check
        self._bytes = memoryview(buffer).cast("B")
        usable = geometry.total // 8 * 8
        self._words = self._bytes[:usable].cast("Q")
        self.strides = [
            unpack_extent(extent, bytes(self._bytes[at : at + EXTENT.size]), geometry)
            for extent in range(geometry.extents)
            for at in (PAGE + extent * EXTENT_BYTES,)
        ]
        self._span = geometry.slot_span
        self._starts = [geometry.extent_start(extent) for extent in range(geometry.extents)]
        self._payloads = [self._payload_start(extent) for extent in range(geometry.extents)]

    def _payload_start(self, extent: int) -> int:
        return self._starts[extent] + aligned(self.count(extent) * RECORD.itemsize)

    # --- the seam: every store ---------------------------------------------------------------------------------

    def _put(self, at: int, data: bytes) -> None:
        """A run of bytes; a kill may leave any part of it done."""
        self._check()
        self._bytes[at : at + len(data)] = data

    def _put_word(self, at: int, value: int) -> None:
        """One aligned 8-byte store: there or not."""
        self._check()
        self._words[at // 8] = value

    def _free_rows(self, start: int, count: int, chosen: NDArray[Any]) -> None:
        """Rows `chosen` of the `count` records at `start`: first all states to FREE, then all wiped."""
        self._check()
        table = np.frombuffer(self._bytes[start : start + count * RECORD.itemsize], RECORD)
        table["state"][chosen] = FREE
        table[chosen] = np.zeros(1, RECORD)

    # --- words of the superblock -----------------------------------------------------------------------------

    @property
    def starts(self) -> int:
        """How often a store has started on this file."""
        return self._words[STARTS_AT // 8]

    @starts.setter
    def starts(self, value: int) -> None:
        self._put_word(STARTS_AT, value)

    @property
    def epoch(self) -> int:
        """The clear epoch."""
        return self._words[EPOCH_AT // 8]

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._put_word(EPOCH_AT, value)

    @property
    def boot(self) -> int:
        """A number of the machine's boot in which a store last started on this file."""
        return self._words[BOOT_AT // 8]

    @boot.setter
    def boot(self, value: int) -> None:
        self._put_word(BOOT_AT, value)

    # --- extents ---------------------------------------------------------------------------------------------

    def format_extent(self, extent: int, stride: int) -> int:
        """Gives an extent without a live slot to slots of `stride` bytes (multiple of 4 KiB); their count."""
        at = PAGE + extent * EXTENT_BYTES
        count = self.geometry.slots(stride)
        self._put_word(at, 0)  # a kill from here on leaves an extent that serves nothing
        start = self.geometry.extent_start(extent)
        self._put(start, bytes(count * RECORD.itemsize))
        record = pack_extent(extent, stride, count)
        self._put(at + 8, record[8:])
        self._put_word(at, stride)
        self.strides[extent] = stride
        self._payloads[extent] = self._payload_start(extent)
        return count

    def count(self, extent: int) -> int:
        """Slots of an extent."""
        return self.geometry.slots(self.strides[extent]) if self.strides[extent] else 0

    def offset(self, slot: int) -> int:
        """Byte offset in the file of a slot's payload; a multiple of 4 KiB."""
        extent, index = divmod(slot, self._span)
        return self._payloads[extent] + index * self.strides[extent]

    def _record(self, slot: int) -> int:
        extent, index = divmod(slot, self._span)
        return self._starts[extent] + index * RECORD.itemsize

    # --- one header ------------------------------------------------------------------------------------------

    def write(
        self,
        slot: int,
        state: int,
        *,
        identity: bytes,
        parent: bytes,
        root: bytes,
        generation: int,
        engine: int,
        epoch: int,
        length: int,
        checksum: int = 0,
        recency: int = 0,
        flags: int = 0,
    ) -> None:
        """Writes a whole header; torn anywhere it is FREE."""
        named = NAMED.pack(identity, parent, root, generation, engine, checksum, epoch, length, state)
        at = self._record(slot)
        self._put_word(at + RECENCY_AT, recency)
        self._put_word(at + FLAGS_AT, flags)
        self._put(at, named + header_crc(slot, named).to_bytes(4, "little"))

    def publish(self, slot: int, *, state: int, checksum: int, recency: int, flags: int) -> None:
        """GRANTED -> `state` (VALID) with the payload's checksum; the rest of the header stays."""
        self._check()
        at = self._record(slot)
        held = NAMED.unpack(self._bytes[at : at + NAMED.size])
        named = NAMED.pack(*held[:5], checksum, *held[6:8], state)
        self._put_word(at + RECENCY_AT, recency)
        self._put_word(at + FLAGS_AT, flags)
        self._put(at, named + header_crc(slot, named).to_bytes(4, "little"))

    def free(self, slot: int) -> None:
        """FREE in one store; then wiped, so that no flipped bit brings the old block back."""
        at = self._record(slot)
        self._put(at + STATE_AT, bytes((FREE,)))
        self._put(at, bytes(RECORD.itemsize))

    def free_many(self, slots: NDArray[Any]) -> None:
        """`free` of many: all states first, so that a kill in between leaves none half."""
        for start, count, chosen in self._tables(slots):
            self._free_rows(start, count, chosen)

    def set_recency(self, slot: int, recency: int) -> None:
        """One aligned store."""
        self._put_word(self._record(slot) + RECENCY_AT, recency)

    def set_flags(self, slot: int, flags: int) -> None:
        """One aligned store."""
        self._put_word(self._record(slot) + FLAGS_AT, flags)

    def set_flags_many(self, slots: NDArray[Any], flags: int) -> None:
        """`set_flags` of many, where they differ."""
        self._check()
        for start, count, chosen in self._tables(slots):
            table = np.frombuffer(self._bytes[start : start + count * RECORD.itemsize], RECORD)
            for index in chosen[table["flags"][chosen] != flags].tolist():
                self._put_word(start + index * RECORD.itemsize + FLAGS_AT, flags)

    def _tables(self, slots: NDArray[Any]) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
        """Per extent: where its table begins, its slots, and which of them are meant."""
        extents, indices = np.divmod(slots.astype(np.int64), self.geometry.slot_span)
        for extent in np.unique(extents).tolist():
            yield self.geometry.extent_start(extent), self.count(extent), indices[extents == extent]

    def parent_and_root(self, slot: int) -> tuple[bytes, bytes]:
        """32 bytes each, of a slot that is not FREE."""
        self._check()
        at = self._record(slot)
        return bytes(self._bytes[at + 32 : at + 64]), bytes(self._bytes[at + 64 : at + 96])

    # --- recovery --------------------------------------------------------------------------------------------

    def recover(self) -> NDArray[Any]:
        """All headers that hold, FOUND [n], in slot order. 0.5 us a slot; damaged ones are wiped."""
        self._check()
        found = [self._recover_extent(extent) for extent, stride in enumerate(self.strides) if stride]
        return np.concatenate(found) if found else np.empty(0, FOUND)

    def _recover_extent(self, extent: int) -> NDArray[Any]:
        count = self.count(extent)
        start = self.geometry.extent_start(extent)
        table = np.frombuffer(self._bytes[start : start + count * RECORD.itemsize], RECORD)
        used = np.flatnonzero(table["state"] != FREE)
        records = table.view(_WHOLE)[used].view(RECORD)  # field by field it takes ten times as long
        slots = (used + extent * self.geometry.slot_span).astype(np.uint32)
        holds = (header_crcs(slots, records) == records["crc"]) & (records["length"] <= self.strides[extent])
        holds &= np.isin(records["state"], (GRANTED, VALID))
        self.damaged += int(np.count_nonzero(~holds))
        for slot in slots[~holds].tolist():
            self.free(slot)
        if not holds.all():
            slots, records = slots[holds], records.view(_WHOLE)[holds].view(RECORD)
        out = np.empty(len(slots), FOUND)
        plain = out.view(np.uint8).reshape(-1, FOUND.itemsize)  # FOUND is the slot and then the record
        plain[:, 4:] = records.view(np.uint8).reshape(-1, RECORD.itemsize)
        out["slot"] = slots
        np.minimum(out["recency"], MOST_RECENT, out=out["recency"])
        return out
