"""What the store finds at a start: arena tables, index rows, footers and superblocks of segments."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from random import Random

import crc32c
import numpy as np
import xxhash

from ops.fuzz.mutate import INTEGERS, bent
from ops.fuzz.target import Target, joined, parted, same
from services.store.arena.headers import Headers
from services.store.arena.records import (
    EXTENT_BYTES,
    GRANTED,
    NAMED,
    PAGE,
    RECORD,
    VALID,
    Geometry,
    header_crc,
    pack_extent,
    pack_superblock,
    unpack_superblock,
)
from services.store.catalog.catalog import Catalog
from services.store.catalog.integrity import check_integrity
from services.store.catalog.recovery import recover
from services.store.disk.errors import DiskTierError
from services.store.disk.footer import Footer, Superblock, pack_footer, unpack_footer
from services.store.disk.footer import pack_superblock as pack_segment
from services.store.disk.index_record import ROW_BYTES, Entry, checked_rows, pack_value, unpack_value, unsealed
from services.store.disk.lmdb_file import damage
from services.store.disk.tier import DiskTier

GEOMETRY = Geometry(extents=2, extent_bytes=8 * PAGE, wanted=0)
_STRIDES = (PAGE, 2 * PAGE)


def _identity(label: object) -> bytes:
    return hashlib.sha256(str(label).encode()).digest()


# --- arena: superblock, extent table, then each extent's first records ------------------------------------------------


def _record(slot: int, rng: Random) -> bytes:
    number = rng.randrange(6)
    parent = _identity(number - 1) if number else _identity("root")
    state = rng.choice((VALID, VALID, GRANTED))
    engine = 0 if state == GRANTED and rng.random() < 0.5 else 5
    named = NAMED.pack(_identity(number), parent, _identity("root"), (1 << 32) + number, engine, 99, 0, 4000, state)
    tail = rng.choice((0, 7, 2**40)).to_bytes(8, "little") + rng.randrange(4).to_bytes(8, "little")
    return named + header_crc(slot, named).to_bytes(4, "little") + bytes(4) + tail


def _arena_seeds(rng: Random) -> list[bytes]:
    made = []
    for _ in range(4):
        table = b"".join(
            pack_extent(extent, stride, GEOMETRY.slots(stride)).ljust(EXTENT_BYTES, b"\0")
            for extent, stride in enumerate(_STRIDES)
        )
        rows = [
            b"".join(_record(extent * GEOMETRY.slot_span + slot, rng) for slot in range(GEOMETRY.slots(stride)))
            for extent, stride in enumerate(_STRIDES)
        ]
        made.append(joined([pack_superblock(GEOMETRY, rng.randbytes(16)), table, *rows]))
    return made


def _arena(data: bytes, _: Path) -> bool:
    """A catalogue comes out that holds together, whatever the tables say; it serves and recovers again."""
    superblock, table, *rows = parted(data, 4)
    buffer = bytearray(GEOMETRY.total)
    for at, part in ((0, superblock), (PAGE, table), *zip(map(GEOMETRY.extent_start, range(2)), rows, strict=True)):
        buffer[at : at + len(part)] = part
    del buffer[GEOMETRY.total :]
    try:
        geometry, _key = unpack_superblock(bytes(buffer[:PAGE]))
    except ValueError:
        return False
    if geometry.total != len(buffer):  # as at an attach
        return False
    catalog = Catalog(Headers(buffer, geometry), starts=3)
    recover(catalog)
    check_integrity(catalog)
    found = catalog.lookup(("e0", 1), [_identity(n) for n in range(6)])
    if found.lease is not None:
        catalog.leases.release(found.lease.number)
    root, new = _identity("root"), _identity("new")
    grants = catalog.reserve(("e0", 1), root=root, epoch=catalog.epoch, length=4000, blocks=[(new, root)])
    same(len(grants) == 1, "a reserve without an answer")
    check_integrity(catalog)
    again = Catalog(Headers(buffer, geometry), starts=4)
    recover(again)
    check_integrity(again)
    return True


_NUMBERS = ("generation", "engine", "checksum", "epoch", "length", "state", "recency", "flags", "copy")
"""Fields whose value says nothing about another record; who follows whom is bound by the names themselves."""


def _arena_bend(data: bytes, rng: Random, corpus: Sequence[bytes]) -> bytes:
    """Mostly one field of a record, its CRC made anew."""
    parts = parted(data, 4)
    if rng.random() < 0.4:
        which = rng.randrange(4)
        parts[which] = bent(parts[which], rng, [parted(other, 4)[which] for other in corpus])
        return joined(parts)
    extent = rng.randrange(2)
    table = np.frombuffer(bytearray(parts[2 + extent]), RECORD).copy()
    for _ in range(rng.randint(1, 3)):
        index = rng.randrange(len(table))
        name = rng.choice(_NUMBERS)
        if name == "copy":
            table[index] = table[rng.randrange(len(table))]
        else:
            bits = 8 * table[name].itemsize
            table[name][index] = rng.choice((rng.getrandbits(bits), rng.choice(INTEGERS) & (1 << bits) - 1))
        slot = extent * GEOMETRY.slot_span + index
        table["crc"][index] = header_crc(slot, table[index].tobytes()[: NAMED.size])
    parts[2 + extent] = table.tobytes()
    return joined(parts)


# --- index rows, and the file itself before LMDB sees it --------------------------------------------------------------


def _rows_seeds(rng: Random) -> list[bytes]:
    entries = [
        Entry(_identity(n), _identity(n - 1), _identity("root"), n, 4096, n, rng.getrandbits(64), n) for n in range(4)
    ]
    return [joined([entry.identity, pack_value(entry)]) for entry in entries]


def _rows(data: bytes, place: Path) -> bool:
    key, stored = parted(data, 2)
    entry = unpack_value(key, stored)
    row = key + stored
    packed = checked_rows(row if len(row) == ROW_BYTES else b"")[0]
    unsealed(key, stored)
    (place / "data.mdb").write_bytes(data)
    same(damage(place / "data.mdb") is not None, "an index file that is none passes for whole")
    if entry is None:
        return False
    same(pack_value(entry) == stored, "an index row is another after a round trip")
    same([item.tobytes() for item in packed] == [row[:-4]] * len(packed), "a row and its packed form differ")
    return True


def _rows_bend(data: bytes, rng: Random, corpus: Sequence[bytes]) -> bytes:
    key, stored = parted(data, 2)
    if rng.random() < 0.5:
        return bent(data, rng, corpus)
    body = bent(stored[:-4], rng, corpus)
    return joined([key, body + crc32c.crc32c(key + body).to_bytes(4, "little")])


# --- segments: a tier without an index is rebuilt from what lies there ------------------------------------------------

_SLOTS = 4
_SLOT_BYTES = 2 * PAGE


def _segment_seeds(rng: Random) -> list[bytes]:
    """The pages that mean something: superblock, four footers; payloads are made from the footers' numbers."""
    made = []
    for _ in range(3):
        footers = [
            Footer(n, _identity(n), _identity(n - 1), _identity("root"), 4000, rng.randint(1, 9), _sum(n))
            for n in range(_SLOTS)
        ]
        superblock = pack_segment(Superblock(1, 0, PAGE, _SLOTS))[:64]
        made.append(joined([superblock, *(pack_footer(footer)[:256] for footer in footers)]))
    return made


def _payload(number: int) -> bytes:
    return hashlib.shake_128(b"%d" % number).digest(PAGE)


def _sum(number: int) -> int:
    return int(xxhash.xxh3_64_intdigest(_payload(number)[:4000]))


def _segment(data: bytes, place: Path) -> bool:
    """Whatever footers say: no error but the tier's own, no bytes that are not their block's, no slot counted twice."""
    superblock, *footers = parted(data, 1 + _SLOTS)
    file = superblock[:PAGE].ljust(PAGE, b"\0")
    for number, footer in enumerate(footers):
        file += _payload(number) + footer[:PAGE].ljust(PAGE, b"\0")
        unpack_footer(footer, number)
    (place / "segments").mkdir(mode=0o700)
    (place / "segments" / f"00000-{PAGE}.seg").write_bytes(file)
    try:
        size = _SLOTS * _SLOT_BYTES + PAGE
        tier = DiskTier(place, capacity=1 << 20, floor=0.0, segment_bytes=size, map_bytes=64 << 10)
    except DiskTierError:
        return False
    try:
        told = 0
        while (batch := tier.recover_step(16)) is not None:
            told += len(batch)
        tier.check_integrity()
        for number in range(_SLOTS):
            entry = tier.lookup(_identity(number))
            if entry is not None and tier.load([entry], [memoryview(out := bytearray(PAGE))])[0]:
                same(xxhash.xxh3_64_intdigest(out[: entry.length]) == entry.checksum, "bytes that are not the block's")
        tier.check_integrity()
    finally:
        tier.close()
    return told == _SLOTS


def _segment_bend(data: bytes, rng: Random, corpus: Sequence[bytes]) -> bytes:
    """Half of them one field of a page, sealed again."""
    parts = parted(data, 1 + _SLOTS)
    which = rng.randrange(1 + _SLOTS)
    others = [parted(other, 1 + _SLOTS)[rng.randrange(1 + _SLOTS)] for other in corpus]
    if rng.random() < 0.3:
        parts[which] = bent(parts[which], rng, others)
        return joined(parts)
    length = 24 if which == 0 else 132
    fields = bent(parts[which][8:length], rng, others)[: length - 8].ljust(length - 8, b"\0")
    fields = parts[which][:8] + fields
    parts[which] = fields + crc32c.crc32c(fields).to_bytes(4, "little")
    return joined(parts)


TARGETS = [
    Target("arena", _arena_seeds, _arena, _arena_bend),
    Target("index-rows", _rows_seeds, _rows, _rows_bend),
    Target("segments", _segment_seeds, _segment, _segment_bend),
]
