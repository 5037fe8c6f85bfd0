import errno
import gc
import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from services.store.arena import arena as arena_module
from services.store.arena import size as arena_size
from services.store.arena.arena import Arena, ArenaCut, ArenaRefused, open_arena
from services.store.arena.headers import Headers
from services.store.arena.records import (
    GRANTED,
    PAGE,
    RECORD,
    VALID,
    Geometry,
    header_crc,
    header_crcs,
    pack_superblock,
)
from services.store.arena.size import clamped, geometry_for
from services.store.catalog.catalog import Catalog
from services.store.catalog.integrity import check_integrity
from services.store.catalog.recovery import recover
from shared.fileio import FileIO

MIB = 1 << 20
ROOT = b"R" * 32


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    where = Path("/dev/shm") / f"perdure-test-{os.getpid()}-{tmp_path.name}"
    yield where
    if where.is_dir():
        where.rmdir()
    else:
        where.unlink(missing_ok=True)


def open_files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the listing's own
            continue
    return found


def started(arena: Arena) -> Catalog:
    catalog = Catalog(arena.headers, starts=arena.headers.starts + 1, epoch=arena.headers.epoch)
    recover(catalog)
    return catalog


def save(arena: Arena, catalog: Catalog, count: int, length: int = 5000) -> list[bytes]:
    """A chain of committed blocks."""
    identities = [bytes([i + 1]) * 32 for i in range(count)]
    pairs = list(zip(identities, [ROOT, *identities[:-1]], strict=True))
    grants = catalog.reserve(("e0", 1), root=ROOT, epoch=catalog.epoch, length=length, blocks=pairs)
    for identity, grant in zip(identities, grants, strict=True):
        arena.payload(grant.offset, length)[:32] = identity
        catalog.commit(("e0", 1), grant.slot, grant.generation, 42)
    return identities


def held(catalog: Catalog, identities: list[bytes]) -> int:
    found = catalog.lookup(("e0", 1), identities)
    if found.lease:
        catalog.leases.release(found.lease.number)
    return len(found.places)


def test_attaches_again_with_all_blocks_and_a_new_generation_range(path: Path) -> None:
    arena = open_arena(path, 4 * MIB)
    assert not arena.recovered
    catalog = started(arena)
    identities = save(arena, catalog, 20)
    last = catalog.generations.next()
    arena.close()
    again = open_arena(path, 4 * MIB)
    assert again.recovered
    assert again.key == arena.key
    assert not again.notes
    catalog = started(again)
    assert held(catalog, identities) == 20
    assert catalog.generations.next() > last
    check_integrity(catalog)
    again.close()


def test_is_private_allocated_in_full_and_within_what_was_asked_for(path: Path) -> None:
    arena = open_arena(path, 3 * MIB)
    facts = path.stat()
    assert facts.st_mode & 0o777 == 0o600
    assert facts.st_blocks * 512 >= facts.st_size == arena.geometry.total <= 3 * MIB
    arena.close()


@pytest.mark.parametrize("damage", ["half", "random", "older", "other version", "superblock", "empty", "grown"])
def test_p29_a_bad_file_of_ours_is_replaced_with_a_clear_word(path: Path, damage: str) -> None:
    arena = open_arena(path, MIB)
    save(arena, started(arena), 5)
    total = arena.geometry.total
    arena.close()
    content = path.read_bytes()
    if damage == "half":
        os.truncate(path, total // 2)
    elif damage == "empty":
        os.truncate(path, 0)
    elif damage == "grown":
        os.truncate(path, total + PAGE)
    elif damage == "random":
        path.write_bytes(random.Random(1).randbytes(total))
    elif damage == "older":
        path.write_bytes(b"PERDURE0" + content[8:])
    elif damage == "other version":
        path.write_bytes(content[:8] + (9).to_bytes(4, "little") + content[12:])
    else:
        path.write_bytes(content[:20] + bytes([content[20] ^ 1]) + content[21:])
    again = open_arena(path, MIB)
    assert not again.recovered
    assert again.key != arena.key
    assert "discarded" in again.notes[0]
    catalog = started(again)
    assert held(catalog, save(again, catalog, 5)) == 5
    again.close()


def test_p29_good_content_of_a_dead_owner_is_kept(path: Path) -> None:
    code = (
        "import sys, os; sys.path.insert(0, sys.argv[2])\n"
        "from tests.unit.test_arena import *\n"
        "arena = open_arena(Path(sys.argv[1]), MIB)\n"
        "save(arena, started(arena), 7)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    root = str(Path(arena_module.__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", code, str(path), root], cwd=root, check=False)
    assert done.returncode == -9
    arena = open_arena(path, MIB)
    assert arena.recovered
    assert held(started(arena), [bytes([i + 1]) * 32 for i in range(7)]) == 7
    arena.close()


def test_a_size_that_changed_in_the_configuration_makes_a_new_file(path: Path) -> None:
    open_arena(path, MIB).close()
    again = open_arena(path, 2 * MIB)
    assert "configuration asks for 2,097,152" in again.notes[0]
    again.close()


def test_links_directories_and_files_of_others_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.symlink_to("/dev/null")
    with pytest.raises(ArenaRefused, match="can't be opened"):
        open_arena(path, MIB)
    path.unlink()
    path.mkdir()
    with pytest.raises(ArenaRefused):
        open_arena(path, MIB)
    path.rmdir()
    open_arena(path, MIB).close()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(ArenaRefused, match="belongs to uid"):
        open_arena(path, MIB)
    assert path.exists()


def test_two_stores_never_share_a_file(path: Path) -> None:
    arena = open_arena(path, MIB)
    with pytest.raises(ArenaRefused, match="in use"):
        open_arena(path, MIB)
    arena.close()


def test_a_punched_file_is_filled_before_it_is_mapped(path: Path) -> None:
    arena = open_arena(path, MIB)
    arena.close()
    head = path.read_bytes()[:PAGE]
    with path.open("r+b") as file:
        file.truncate(PAGE)
        file.truncate(arena.geometry.total)
    assert path.read_bytes()[:PAGE] == head
    again = open_arena(path, MIB)
    assert path.stat().st_blocks * 512 >= path.stat().st_size
    again.close()


def test_notices_that_it_was_removed_or_cut(path: Path) -> None:
    arena = open_arena(path, MIB)
    assert arena.trouble() == ""
    path.unlink()
    assert "removed" in arena.trouble()
    path.write_bytes(b"another")
    assert "removed" in arena.trouble()
    os.ftruncate(arena.fd, PAGE)
    with pytest.raises(ArenaCut, match=f"cut by somebody, to 4,096 of {arena.geometry.total:,} bytes"):
        arena.trouble()
    arena.close()


def test_nothing_touches_what_was_cut_off_instead_of_dying_of_sigbus(path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from tests.unit.test_arena import touch_what_was_cut\n"
        "touch_what_was_cut(sys.argv[1])\n"
    )
    root = str(Path(arena_module.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), root], cwd=root, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cut"] * 9


def touch_what_was_cut(where: str) -> None:
    """In a process of its own: each way into the arena, once its file has been emptied."""
    arena = open_arena(Path(where), MIB)
    catalog = started(arena)
    save(arena, catalog, 5)
    (grant,) = catalog.reserve(("e0", 1), root=ROOT, epoch=0, length=5000, blocks=[(b"z" * 32, ROOT)])
    os.ftruncate(arena.fd, 0)
    fields = {"identity": ROOT, "parent": ROOT, "root": ROOT, "generation": 1}
    ways = [
        lambda: arena.payload(grant.offset, 5000),
        lambda: catalog.reserve(("e0", 1), root=ROOT, epoch=0, length=5000, blocks=[(b"y" * 32, ROOT)]),
        lambda: catalog.commit(("e0", 1), grant.slot, grant.generation, 1),
        lambda: catalog.clear(),
        lambda: arena.headers.recover(),
        lambda: arena.headers.parent_and_root(0),
        lambda: arena.headers.write(0, VALID, engine=1, epoch=0, length=1, **fields),  # type: ignore[arg-type]
        lambda: arena.headers.free(0),
        lambda: arena.headers.set_recency(0, 1),
    ]
    for way in ways:
        with pytest.raises(ArenaCut):
            way()
        print("cut")


def test_a_tmpfs_that_fills_up_between_sizing_and_allocating_gets_a_smaller_arena(path: Path) -> None:
    class Filling(FileIO):
        asked: ClassVar[list[int]] = []

        def allocate(self, fd: int, size: int) -> None:
            self.asked.append(size)
            if len(self.asked) < 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().allocate(fd, size)

    arena = open_arena(path, 4 * MIB, Filling())
    assert [size > MIB for size in Filling.asked] == [True, True, False]
    assert Filling.asked == sorted(Filling.asked, reverse=True)
    assert path.stat().st_size == arena.geometry.total == Filling.asked[-1]
    assert len(arena.notes) == 1
    assert "no room" in arena.notes[0]
    assert held(started(arena), []) == 0
    arena.close()
    again = open_arena(path, 4 * MIB)  # it is what was asked for, as far as it could be had
    assert again.recovered
    again.close()


def test_a_file_that_can_not_be_allocated_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaRefused, match="No space left"):
        open_arena(path, MIB)
    assert not path.exists()
    assert not [where for where in open_files() if where.startswith(str(path))]


def test_z05_sizes_are_clamped_to_half_of_what_is_free_with_one_line(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    size, note = clamped(1 << 60, tmp_path)
    assert size <= free.f_bavail * free.f_frsize // 2 + PAGE
    assert f"{1 << 60:,}" in note
    assert clamped(5000, tmp_path) == (2 * PAGE, "")


def test_memory_that_the_cgroup_leaves_clamps_what_lies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_size, "available_memory", lambda: 100 * PAGE)
    size, note = clamped(MIB, Path("/dev/shm"))
    assert size == 50 * PAGE
    assert f"{100 * PAGE:,}" in note


@pytest.mark.parametrize("nbytes", [64 << 10, MIB, 3 * MIB, 4 * MIB, 64 * MIB, 100 * MIB, 1 << 30, 5 << 30])
def test_geometry_uses_the_file_well_and_stays_within_it(nbytes: int) -> None:
    geometry = geometry_for(nbytes)
    assert geometry.total <= nbytes
    assert geometry.total > nbytes * 0.9
    assert geometry.extent_bytes <= 64 * MIB
    for stride in (PAGE, 3 * PAGE, geometry.extent_bytes // 2 // PAGE * PAGE):
        count = geometry.slots(stride)
        assert count * (stride + RECORD.itemsize) <= geometry.extent_bytes
        assert (count + 1) * (stride + RECORD.itemsize) + PAGE > geometry.extent_bytes


def test_crcs_in_numpy_equal_crc32c() -> None:
    dice = np.random.default_rng(3)
    records = dice.integers(0, 256, (5000, RECORD.itemsize), np.uint8).view(RECORD)[:, 0]
    slots = dice.integers(0, 1 << 32, 5000, np.uint32)
    expected = [header_crc(int(slot), record.tobytes()[:136]) for slot, record in zip(slots, records, strict=True)]
    assert header_crcs(slots, records).tolist() == expected


GEOMETRY = Geometry(extents=1, extent_bytes=8 * PAGE, wanted=0)


def headers_with_blocks() -> tuple[bytearray, list[int]]:
    buffer = bytearray(GEOMETRY.total)
    buffer[: len(pack_superblock(GEOMETRY, bytes(16)))] = pack_superblock(GEOMETRY, bytes(16))
    headers = Headers(buffer, GEOMETRY)
    headers.format_extent(0, PAGE)
    for slot, state in ((0, VALID), (1, GRANTED), (2, VALID)):
        fields = {"identity": bytes([slot + 1]) * 32, "parent": ROOT, "root": ROOT, "generation": slot + 5}
        headers.write(slot, state, engine=3, epoch=0, length=1000, checksum=9, recency=4, **fields)  # type: ignore[arg-type]
    headers.write(3, VALID, identity=b"f" * 32, parent=ROOT, root=ROOT, generation=1, engine=3, epoch=0, length=10)
    headers.free(3)
    return buffer, [0, 1, 2]


def test_any_flipped_bit_of_a_header_makes_it_free_or_is_harmless() -> None:
    buffer, slots = headers_with_blocks()
    start = GEOMETRY.data_start
    whole = {int(record["slot"]): record for record in Headers(bytearray(buffer), GEOMETRY).recover()}
    assert list(whole) == slots
    named = [name for name in RECORD.names or () if name not in ("unused", "recency", "flags")]
    freed = 0
    for position in range(start, start + 4 * RECORD.itemsize):
        for bit in range(8):
            flipped = bytearray(buffer)
            flipped[position] ^= 1 << bit
            found = {int(record["slot"]): record for record in Headers(flipped, GEOMETRY).recover()}
            assert set(found) <= set(whole)
            assert len(found) >= len(whole) - 1
            freed += len(found) < len(whole)
            for slot, record in found.items():
                assert all((record[name] == whole[slot][name]).all() for name in named)
    assert freed == 3 * 8 * 140  # every bit of the three records that their CRC covers, and of the CRC


def test_a_header_torn_anywhere_is_free_and_its_neighbours_stay() -> None:
    buffer, _ = headers_with_blocks()
    for change in ("reserve", "publish", "free"):
        after = bytearray(buffer)
        headers = Headers(after, GEOMETRY)
        if change == "reserve":
            headers.write(
                3, GRANTED, identity=b"n" * 32, parent=ROOT, root=ROOT, generation=99, engine=3, epoch=1, length=77
            )
        elif change == "publish":
            headers.publish(1, state=VALID, checksum=1234567, recency=9, flags=0)
        else:
            headers.free(2)
        slot = {"reserve": 3, "publish": 1, "free": 2}[change]
        start = GEOMETRY.data_start + slot * RECORD.itemsize
        for cut in range(start, start + RECORD.itemsize + 1):
            torn = after[:cut] + buffer[cut:]
            found = {int(record["slot"]): record for record in Headers(torn, GEOMETRY).recover()}
            others = {0, 1, 2} - {slot}
            assert others <= set(found)
            if slot in found:
                before_or_after = {(GRANTED, 9), (VALID, 1234567), (GRANTED, 0), (VALID, 9)}
                assert (int(found[slot]["state"]), int(found[slot]["checksum"])) in before_or_after


def test_a_damaged_extent_record_serves_nothing_and_harms_nothing() -> None:
    buffer, _ = headers_with_blocks()
    for position in range(PAGE, PAGE + 16):
        flipped = bytearray(buffer)
        flipped[position] ^= 4
        assert len(Headers(flipped, GEOMETRY).recover()) == 0


def test_recovery_of_many_slots_takes_about_a_microsecond_each_and_no_file_descriptors(path: Path) -> None:
    arena = open_arena(path, 64 * MIB)
    catalog = started(arena)
    count = 3000
    identities = [index.to_bytes(32, "little") for index in range(1, count + 1)]
    pairs = list(zip(identities, [ROOT, *identities[:-1]], strict=True))
    for grant in catalog.reserve(("e0", 1), root=ROOT, epoch=0, length=PAGE, blocks=pairs):
        catalog.commit(("e0", 1), grant.slot, grant.generation, 1)
    arena.close()
    del arena, catalog
    gc.collect()
    fds = len(os.listdir("/proc/self/fd"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    again = open_arena(path, 64 * MIB)
    catalog = started(again)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert catalog.statistics().host_dirty == count
    assert faults < 20_000, "recovery touched the payloads"
    assert held(catalog, identities) == count
    again.close()
    del again, catalog
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == fds
