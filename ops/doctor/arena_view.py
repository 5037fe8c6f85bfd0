"""The arena as a stranger sees it: mapped read-only, every header judged, nothing wiped as the store would."""

import mmap
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from services.store.arena.headers import FOUND
from services.store.arena.records import (
    EXTENT,
    EXTENT_BYTES,
    FREE,
    GRANTED,
    PAGE,
    RECORD,
    STARTS_AT,
    VALID,
    Geometry,
    aligned,
    header_crcs,
    unpack_extent,
    unpack_superblock,
)


@dataclass
class ArenaView:
    """`refused`: why nobody may use the file; `trouble`: why its headers can't be read; `unfinished`: it was being
    made. `records`: FOUND, headers that hold; `torn`: slots whose header's CRC fails; `extents`: those whose record in
    the table fails; `bad`: slots whose payload fails its checksum. `starts`: how often a store started on the file.
    """

    path: Path
    there: bool = False
    refused: str = ""
    trouble: str = ""
    unfinished: bool = False
    size: int = 0
    allocated: int = 0
    geometry: Geometry | None = None
    starts: int = 0
    slots: int = 0
    torn: list[int] = field(default_factory=list)
    extents: list[int] = field(default_factory=list)
    bad: list[int] = field(default_factory=list)
    records: "np.ndarray[Any, Any]" = field(default_factory=lambda: np.empty(0, FOUND))


def read_arena(path: Path, *, payloads: bool) -> ArenaView:
    """All of it, in time linear in its slots (and bytes, with `payloads`). Never raises for what lies there."""
    view = ArenaView(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return view
    except OSError as error:
        view.there, view.refused = True, f"it can't be opened: {error.strerror}"
        return view
    try:
        view.there = True
        _read(view, fd, payloads=payloads)
    finally:
        os.close(fd)
    return view


def _read(view: ArenaView, fd: int, *, payloads: bool) -> None:
    facts = os.fstat(fd)
    view.size, view.allocated = facts.st_size, facts.st_blocks * 512
    if not stat.S_ISREG(facts.st_mode):
        view.refused = "it is no regular file"
    elif facts.st_uid != os.getuid():
        view.refused = f"it belongs to uid {facts.st_uid}, we are {os.getuid()}"
    if view.refused:
        return
    page = os.pread(fd, PAGE, 0)
    try:
        geometry, _ = unpack_superblock(page)
    except ValueError as error:
        view.trouble, view.unfinished = str(error), not any(page)
        return
    view.geometry = geometry
    view.starts = int.from_bytes(page[STARTS_AT : STARTS_AT + 8], "little")
    if facts.st_size < geometry.total:
        view.trouble = f"it has {facts.st_size:,} bytes, its superblock says {geometry.total:,}"
        return
    memory = memoryview(mmap.mmap(fd, geometry.total, access=mmap.ACCESS_READ))
    found = []
    for extent in range(geometry.extents):
        at = PAGE + extent * EXTENT_BYTES
        record = bytes(memory[at : at + EXTENT.size])
        stride = unpack_extent(extent, record, geometry)
        if stride:
            found.append(_extent(view, memory, geometry, extent, stride, payloads=payloads))
        elif any(record[:8]):  # a kill while it is formatted leaves its stride 0
            view.extents.append(extent)
    view.records = np.concatenate(found) if found else np.empty(0, FOUND)


def _extent(
    view: ArenaView, memory: memoryview, geometry: Geometry, extent: int, stride: int, *, payloads: bool
) -> "np.ndarray[Any, Any]":
    count, start = geometry.slots(stride), geometry.extent_start(extent)
    view.slots += count
    table = np.frombuffer(memory[start : start + count * RECORD.itemsize], RECORD).copy()
    used = np.flatnonzero(table["state"] != FREE)
    records = table[used]
    slots = (used + extent * geometry.slot_span).astype(np.uint32)
    holds = (header_crcs(slots, records) == records["crc"]) & (records["length"] <= stride)
    holds &= np.isin(records["state"], (GRANTED, VALID))
    view.torn += slots[~holds].tolist()
    out = np.empty(int(np.count_nonzero(holds)), FOUND)
    out["slot"] = slots[holds]
    for name in RECORD.names or ():
        out[name] = records[name][holds]
    if payloads:
        first = start + aligned(count * RECORD.itemsize)
        for record in out[out["state"] == VALID]:
            at = first + (int(record["slot"]) - extent * geometry.slot_span) * stride
            if xxhash.xxh3_64_intdigest(memory[at : at + int(record["length"])]) != int(record["checksum"]):
                view.bad.append(int(record["slot"]))
    return out
