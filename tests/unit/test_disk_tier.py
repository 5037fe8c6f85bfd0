"""The disk tier's promises, one by one: what it holds, what damage does to it, how much it takes."""

import errno
import os
import threading
from pathlib import Path

import pytest

from services.store.disk.errors import DiskFault, DiskFull, DiskUnusable, IndexBusy
from services.store.disk.footer import Superblock, pack_superblock
from services.store.disk.tier import DiskTier
from shared.config import FaultsConfig
from shared.faults import Faults
from shared.scope import of_root
from tests.disk_kit import (
    LENGTH,
    SLOT,
    aligned,
    block,
    chain,
    fetch,
    name,
    offset_of,
    open_tier,
    payload_of,
    read,
    recover,
    segment_of,
)
from tests.durable_io import DurableIO


def disk_usage(directory: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in directory.rglob("*") if file.is_file())


def test_saved_blocks_come_back_and_lie_beside_each_other(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    entries = tier.save(chain("a", 20))
    assert [entry.slot for entry in entries] == list(range(20))
    assert read(tier, entries) == [payload_of(entry.identity) for entry in entries]
    assert tier.lookup_run([e.identity for e in entries] + [name("none")]) == entries
    assert tier.statistics().counters["read_bytes"] == 20 * SLOT
    tier.close()


def test_a_chain_goes_on_behind_its_parent_across_saves(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    blocks = chain("a", 8)
    tier.save(blocks[:4])
    tier.save(blocks[4:])
    slots = [entry.slot for entry in tier.lookup_run([b.identity for b in blocks])]
    assert slots == list(range(8))
    tier.close()


def test_neighbours_cost_one_call_each_way(tmp_path: Path) -> None:
    io = DurableIO()
    tier = open_tier(tmp_path, io)
    tier.save(chain("warm", 1))
    io.steps.clear()
    entries = tier.save(chain("a", 32))
    assert io.steps.count("pwritev") == 1
    reads = []
    plain = io.preadv
    io.preadv = lambda fd, parts, offset: reads.append(offset) or plain(fd, parts, offset)  # type: ignore[method-assign]
    assert all(read(tier, entries))
    assert len(reads) == 1
    tier.close()


@pytest.mark.parametrize("length", [1024, 4096, 5000, 70000])
def test_payloads_of_any_length_in_unaligned_memory(tmp_path: Path, length: int) -> None:
    tier = open_tier(tmp_path, segment_bytes=1 << 20)
    given = [
        b._replace(payload=memoryview(bytearray(b"x" + b.payload.tobytes()))[1:]) for b in chain("a", 3, length=length)
    ]
    entries = tier.save(given)
    buffers = [memoryview(bytearray(length + 1))[1:] for _ in entries]
    assert tier.load(entries, buffers) == [True] * 3
    assert [bytes(b) for b in buffers] == [payload_of(e.identity, length) for e in entries]
    tier.close()


def test_short_writes_are_finished(tmp_path: Path) -> None:
    io = DurableIO()
    io.short_writes = True
    tier = open_tier(tmp_path, io)
    entries = tier.save(chain("a", 5))
    assert read(tier, entries) == [payload_of(e.identity) for e in entries]
    tier.close()


def test_p11_everything_is_there_after_a_kill(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    entries = tier.save(chain("a", 40))
    tier.delete([entries[3].identity])
    tier.close(clean=False)
    tier = open_tier(tmp_path)
    assert tier.lookup(entries[3].identity) is None
    kept = [e for e in entries if e is not entries[3]]
    assert [fetch(tier, e.identity) for e in kept] == [payload_of(e.identity) for e in kept]
    told = recover(tier)
    assert sorted(told["identity"].tolist()) == sorted(e.identity for e in kept)
    assert tier.statistics().state == "ready"
    tier.check_integrity()
    tier.close()


@pytest.mark.parametrize("where", ["first", "middle", "last", "footer"])
def test_p03_a_flipped_byte_is_a_miss_and_costs_no_neighbour(tmp_path: Path, where: str) -> None:
    tier = open_tier(tmp_path)
    entries = tier.save(chain("a", 5))
    at = offset_of(entries[2]) + {"first": 0, "middle": LENGTH // 2, "last": LENGTH - 1, "footer": LENGTH + 40}[where]
    with segment_of(tmp_path).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes((byte ^ 1,)))
    got = read(tier, entries)
    assert got == [None if n == 2 else payload_of(e.identity) for n, e in enumerate(entries)]
    assert tier.statistics().counters["load_misses"] == 1
    assert tier.lookup(entries[2].identity) is None
    recover(tier)
    tier.check_integrity()
    tier.close()


def test_p03_two_blocks_swapped_on_disk_are_two_misses(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    entries = tier.save(chain("a", 4))
    path = segment_of(tmp_path)
    data = bytearray(path.read_bytes())
    one, two = offset_of(entries[1]), offset_of(entries[2])
    data[one : one + SLOT], data[two : two + SLOT] = data[two : two + SLOT], data[one : one + SLOT]
    path.write_bytes(data)
    assert [got is not None for got in read(tier, entries)] == [True, False, False, True]
    tier.close()


@pytest.mark.parametrize("size", ["0", "1", "half", "-1", "+1"])
def test_p04_a_cut_or_longer_segment_gives_misses_never_wrong_bytes(tmp_path: Path, size: str) -> None:
    tier = open_tier(tmp_path)
    entries = tier.save(chain("a", 64))  # fills the segment
    tier.close()
    path = segment_of(tmp_path)
    whole = path.stat().st_size
    new = {"0": 0, "1": 1, "half": whole // 2, "-1": whole - 1, "+1": whole + 1}[size]
    os.truncate(path, new)
    tier = open_tier(tmp_path)
    recover(tier)
    got = [fetch(tier, e.identity) for e in entries]
    assert all(g in (None, payload_of(e.identity)) for g, e in zip(got, entries, strict=True))
    # A cut inside a footer's padding loses zeros, which come back as zeros: the blocks before it are whole.
    expected = {"0": 0, "1": 0, "half": 32, "-1": 64, "+1": 64}[size]
    assert sum(g is not None for g in got) == expected
    tier.check_integrity()
    again = tier.save(chain("b", 4))
    assert read(tier, again) == [payload_of(e.identity) for e in again]
    tier.close()


def test_a_segment_cut_under_a_running_tier_gives_misses(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    entries = tier.save(chain("a", 8))
    os.truncate(segment_of(tmp_path), offset_of(entries[5]) + 100)
    assert [got is not None for got in read(tier, entries)] == [True] * 5 + [False] * 3
    tier.close()


def test_p01_a_segment_removed_under_a_running_tier_is_found_out_at_the_next_save(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.save(chain("a", 2))
    segment_of(tmp_path).unlink()
    with pytest.raises(DiskFault, match="removed"):
        tier.save(chain("b", 2))
    entries = tier.save(chain("b", 2))  # goes to a new file
    tier.close()
    tier = open_tier(tmp_path)
    recover(tier)
    assert read(tier, entries) == [payload_of(e.identity) for e in entries]
    tier.check_integrity()
    tier.close()


def test_p08_the_tier_never_takes_more_than_its_capacity_and_a_block(tmp_path: Path) -> None:
    capacity = 2 << 20
    tier = open_tier(tmp_path, capacity=capacity)
    alive: list[bytes] = []
    for round_number in range(60):
        blocks = chain(f"p{round_number}", 16)
        while len(blocks) > tier.room(LENGTH):
            oldest, alive = alive[:8], alive[8:]
            assert tier.delete(oldest) == len(oldest) > 0
        alive += [entry.identity for entry in tier.save(blocks)]
        assert disk_usage(tmp_path) <= capacity + SLOT
    recover(tier)
    assert tier.statistics().blocks == len(alive)
    tier.check_integrity()  # index rows == valid footers
    tier.close()


def test_p08_a_full_tier_saves_what_fits_and_says_so(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, max_blocks=5)
    entries = tier.save(chain("a", 8))
    assert len(entries) == 5
    with pytest.raises(DiskFull, match="capacity"):
        tier.save(chain("b", 1))
    tier.delete([entries[4].identity])
    assert len(tier.save(chain("b", 1))) == 1
    tier.close()


def test_the_free_space_floor_is_kept(tmp_path: Path) -> None:
    io = DurableIO()
    io.free = (50 * SLOT, 1000 * SLOT)
    tier = open_tier(tmp_path, io, floor=0.045)
    assert tier.room(LENGTH) == 5
    io.free = (45 * SLOT, 1000 * SLOT)
    with pytest.raises(DiskFull):
        tier.save(chain("a", 1))
    tier.close()


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, DiskFull), (errno.EIO, DiskFault), (errno.EROFS, DiskFault)])
def test_p05_a_failed_write_leaves_nothing_and_saving_resumes(tmp_path: Path, code: int, kind: type[Exception]) -> None:
    io = DurableIO()
    tier = open_tier(tmp_path, io)
    kept = tier.save(chain("kept", 3))
    io.fail = {"pwritev": OSError(code, os.strerror(code))}
    with pytest.raises(kind):
        tier.save(chain("a", 4))
    assert tier.lookup(chain("a", 1)[0].identity) is None
    assert tier.statistics().blocks == 3
    io.fail = {}
    assert len(tier.save(chain("a", 4))) == 4
    assert [fetch(tier, e.identity) for e in kept] == [payload_of(e.identity) for e in kept]
    recover(tier)
    tier.check_integrity()
    tier.close()


def test_a_failed_flush_gives_the_slots_back(tmp_path: Path) -> None:
    io = DurableIO()
    tier = open_tier(tmp_path, io)
    tier.save(chain("kept", 1))
    io.fail = {"fdatasync": OSError(errno.EIO, "Input/output error")}
    with pytest.raises(DiskFault, match="flushing"):
        tier.save(chain("a", 4))
    io.fail = {}
    assert tier.statistics().blocks == 1
    tier.close()


def test_p05_blocks_can_be_deleted_from_a_disk_so_full_that_the_index_cannot_grow(tmp_path: Path) -> None:
    io = DurableIO()
    tier = open_tier(tmp_path, io)
    entries = tier.save(chain("a", 4))
    real = tier._index.apply
    calls = []

    def full_once(*args: object, **options: object) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise DiskFull("index")
        return real(*args, **options)  # type: ignore[arg-type]

    tier._index.apply = full_once  # type: ignore[method-assign, assignment]
    assert tier.delete([entries[0].identity]) == 1
    assert tier.statistics().blocks == 3
    tier.close()


def test_p14_an_index_that_starts_tiny_grows_with_its_blocks(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, map_bytes=64 << 10, capacity=64 << 20, segment_bytes=3000 * SLOT)
    small = aligned(LENGTH)
    for n in range(0, 3000, 500):
        blocks = [block(name(f"{n + m}"))._replace(payload=small, checksum=0) for m in range(500)]
        assert len(tier.save(blocks)) == 500
        assert tier.lookup(name("0")) is not None
    assert tier.statistics().blocks == 3000
    assert len(recover(tier)) == 3000
    tier.close()
    tier = open_tier(tmp_path, map_bytes=64 << 10, capacity=64 << 20)
    assert tier.lookup(name("2999")) is not None
    tier.close()


def test_p14_readers_go_on_while_the_index_grows(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, map_bytes=64 << 10)
    tier.save([block(name("first"))])
    stop = threading.Event()
    misses = []

    def look() -> None:
        while not stop.is_set():
            if tier.lookup(name("first")) is None:
                misses.append(1)

    readers = [threading.Thread(target=look) for _ in range(1)]
    for reader in readers:
        reader.start()
    for n in range(20):
        tier.save(chain(f"c{n}", 60))
    stop.set()
    for reader in readers:
        reader.join()
    assert not misses
    assert tier.statistics().state == "recovering"  # no damage was seen
    tier.close()


def test_p16_a_second_open_in_one_process_is_a_clear_error(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    with pytest.raises(IndexBusy, match="taken by process"):
        open_tier(tmp_path)
    tier.save(chain("a", 1))
    tier.close()
    open_tier(tmp_path).close()


def test_p16_use_after_fork_is_a_clear_error(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.save(chain("a", 1))
    tier._index._pid -= 1  # as a forked child sees it
    with pytest.raises(IndexBusy, match="fork"):
        tier._index.get(name("a/0"))
    tier._index._pid += 1
    tier.close()


@pytest.mark.parametrize("hook", ["store_before_data", "store_after_data", "store_commit_index"])
def test_p18_failing_before_the_index_leaves_nothing(tmp_path: Path, hook: str) -> None:
    tier = open_tier(tmp_path, faults=Faults(FaultsConfig(hooks={hook: "fail:1"})))
    with pytest.raises(DiskFault):
        tier.save(chain("a", 3))
    assert tier.statistics().blocks == 0
    assert len(tier.save(chain("a", 3))) == 3
    recover(tier)
    tier.check_integrity()
    tier.close()


def test_p18_failing_after_the_index_or_in_a_delete_keeps_the_count(tmp_path: Path) -> None:
    hooks = {"store_after_index": "fail:1", "store_in_delete": "fail:1"}
    tier = open_tier(tmp_path, faults=Faults(FaultsConfig(hooks=hooks)))
    blocks = chain("a", 3)
    with pytest.raises(DiskFault):
        tier.save(blocks)
    assert len(tier.save(blocks)) == 3  # again: replaces, leaks nothing
    assert tier.statistics().blocks == 3
    with pytest.raises(DiskFault):
        tier.delete([blocks[0].identity])
    assert fetch(tier, blocks[0].identity) is None
    tier.close(clean=False)
    tier = open_tier(tmp_path)
    recover(tier)
    assert tier.statistics().blocks == 2
    assert tier.statistics().counters["swept_orphans"] == 1
    tier.check_integrity()
    tier.close()


def test_p20_a_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    with pytest.raises(DiskUnusable, match="store"):
        open_tier(tmp_path / "store")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "segments").write_text("")
    with pytest.raises(DiskUnusable, match="segments"):
        open_tier(tmp_path / "other")
    (tmp_path / "other" / "segments").unlink()
    open_tier(tmp_path / "other").close()


def test_a_segment_of_a_newer_format_is_refused_and_kept(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.save(chain("a", 1))
    tier.close()
    path = segment_of(tmp_path)
    with path.open("r+b") as file:
        file.write(pack_superblock(Superblock(2, 0, LENGTH, 64)))
    before = path.read_bytes()
    with pytest.raises(DiskUnusable, match="format 2"):
        open_tier(tmp_path)
    assert path.read_bytes() == before


def test_a_damaged_superblock_costs_nothing(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    entries = tier.save(chain("a", 3))
    tier.close()
    with segment_of(tmp_path).open("r+b") as file:
        file.write(os.urandom(64))
    tier = open_tier(tmp_path)
    assert read(tier, entries) == [payload_of(e.identity) for e in entries]
    tier.close()


def test_w14_a_clear_drops_one_root_or_all_and_nothing_comes_back(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    ours, others = chain("a", 5), chain("b", 7, root=b"s" * 32)
    tier.save(ours)
    tier.save(others)
    assert tier.clear(of_root(b"s" * 32)) == (7, 7 * LENGTH)
    assert tier.lookup_run([b.identity for b in others]) == []
    assert len(tier.lookup_run([b.identity for b in ours])) == 5
    assert tier.clear() == (5, 5 * LENGTH)
    tier.close(clean=False)
    (tmp_path / "index" / "data.mdb").unlink()  # even a rebuild from footers finds nothing
    tier = open_tier(tmp_path)
    assert len(recover(tier)) == 0
    assert tier.statistics().blocks == 0
    tier.close()


def test_recencies_reach_the_index_with_a_sync(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    blocks = chain("a", 3)
    tier.save(blocks)
    tier.touch({blocks[1].identity: 77, name("unknown"): 5})
    tier.sync()
    tier.close(clean=False)
    tier = open_tier(tmp_path)
    told = recover(tier)
    assert sorted(told["recency"].tolist()) == [0, 0, 77]
    tier.close()


def test_small_records_survive_a_damaged_index(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put_meta({"epoch": b"7"})
    tier.put_meta({"generation": b"9"})
    tier.close(clean=False)
    (tmp_path / "index" / "data.mdb").write_bytes(b"x" * 8192)
    tier = open_tier(tmp_path)
    assert (tier.get_meta("epoch"), tier.get_meta("generation"), tier.get_meta("none")) == (b"7", b"9", None)
    tier.close()


def test_two_threads_saving_and_loading_share_one_tier(tmp_path: Path) -> None:
    tier: DiskTier = open_tier(tmp_path)
    wrong: list[str] = []

    def work(label: str) -> None:
        for n in range(15):
            entries = tier.save(chain(f"{label}{n}", 6))
            if read(tier, entries) != [payload_of(e.identity) for e in entries]:
                wrong.append(label)
            tier.delete([e.identity for e in entries[3:]])

    workers = [threading.Thread(target=work, args=(label,)) for label in "xyz"]
    for worker in workers:
        worker.start()
    while tier.recover_step(8) is not None:
        pass
    for worker in workers:
        worker.join()
    assert not wrong
    assert tier.statistics().blocks == 3 * 15 * 3
    tier.check_integrity()
    tier.close()


def test_where_no_holes_can_be_punched_slots_are_used_again_and_nothing_comes_back(tmp_path: Path) -> None:
    capacity = 64 * SLOT
    io = DurableIO()
    io.fail = {"punch": OSError(errno.EOPNOTSUPP, "not supported")}
    tier = open_tier(tmp_path, io, capacity=capacity)
    recover(tier)
    for n in range(20):
        blocks = chain(f"c{n}", 20)
        entries = tier.save(blocks)
        assert len(entries) == 20
        assert read(tier, entries) == [payload_of(e.identity) for e in entries]
        tier.delete([e.identity for e in entries])
        assert disk_usage(tmp_path) <= capacity
    last = tier.save(chain("last", 3))
    tier.check_integrity()
    tier.close(clean=False)
    (tmp_path / "index" / "data.mdb").unlink()
    tier = open_tier(tmp_path, io, capacity=capacity)
    assert sorted(recover(tier)["identity"].tolist()) == sorted(e.identity for e in last)
    tier.check_integrity()
    tier.close()


def test_a_file_system_without_direct_io_is_used_with_buffers(tmp_path: Path) -> None:
    class NoDirect(DurableIO):
        def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct IO here")
            return super().open(path, flags, mode)

    tier = open_tier(tmp_path, NoDirect())
    entries = tier.save(chain("a", 6))
    assert read(tier, entries) == [payload_of(e.identity) for e in entries]
    tier.close()
    tier = open_tier(tmp_path, NoDirect())
    assert len(recover(tier)) == 6
    tier.close()


def test_one_bad_sector_costs_one_block(tmp_path: Path) -> None:
    io = DurableIO()
    tier = open_tier(tmp_path, io)
    entries = tier.save(chain("a", 8))
    plain = io.preadv

    def bad_sector(fd: int, parts: list[memoryview], offset: int) -> int:
        start = offset_of(entries[3])
        if offset <= start < offset + sum(map(len, parts)):
            raise OSError(errno.EIO, "Input/output error")
        return plain(fd, parts, offset)

    io.preadv = bad_sector  # type: ignore[method-assign, assignment]
    assert [got is not None for got in read(tier, entries)] == [True] * 3 + [False] + [True] * 4
    tier.close()


def test_two_sizes_of_blocks_share_the_capacity(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, capacity=1 << 20)
    small = tier.save(chain("small", 50))
    large = tier.save(chain("large", 200, length=16384))
    assert len(small) == 50
    assert 0 < len(large) < 200
    assert tier.room(16384) == 0
    tier.delete([e.identity for e in small])
    assert len(tier.save(chain("more", 10, length=16384))) == 10
    assert disk_usage(tmp_path) <= 1 << 20
    recover(tier)
    tier.check_integrity()
    tier.close()
