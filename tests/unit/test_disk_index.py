"""The index: what makes it be moved aside, and that it then comes back from the footers while the tier serves."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import pytest

from services.store.disk import row_table
from services.store.disk.errors import IndexDamaged
from services.store.disk.index import DiskIndex
from services.store.disk.index_place import IndexPlace
from services.store.disk.index_record import ENTRY, ROW_BYTES, Entry, checked_rows, pack_value, sealed
from services.store.disk.lmdb_file import damage
from services.store.disk.tier import DiskTier
from shared.fileio import FileIO
from tests.disk_kit import NO_PARENT, ROOT, chain, fetch, name, open_tier, payload_of, recover, used_bytes

BLOCKS = chain("a", 30)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    tier = open_tier(tmp_path)
    tier.save(BLOCKS)
    tier.close()
    return tmp_path


def opened_anew(directory: Path) -> tuple[DiskTier, str]:
    """The tier, and why its index was begun anew; it must come back complete."""
    tier = open_tier(directory)
    reason = tier.reason
    assert tier.statistics().state == ("rebuilding" if reason else "recovering")
    assert len(recover(tier)) == 30
    assert [fetch(tier, b.identity) for b in BLOCKS] == [payload_of(b.identity) for b in BLOCKS]
    tier.check_integrity()
    assert tier.statistics().state == "ready"
    return tier, reason


def data_of(directory: Path) -> Path:
    return directory / "index" / "data.mdb"


@pytest.mark.parametrize("size", [0, 1, 4096, 8191, 8192, 12288, -4096])
def test_a_truncated_index_is_never_mapped(filled: Path, size: int) -> None:
    path = data_of(filled)
    content = path.read_bytes()[: used_bytes(path)]
    path.write_bytes(content[:size])
    assert damage(path) is not None
    tier, reason = opened_anew(filled)
    assert "damaged" in reason
    assert (filled / "index.damaged" / "data.mdb").exists()
    tier.close()


def test_a_file_that_lost_nothing_but_its_hole_is_trusted_and_has_it_again(filled: Path) -> None:
    size = data_of(filled).stat().st_size
    os.truncate(data_of(filled), used_bytes(data_of(filled)))
    tier, reason = opened_anew(filled)
    assert reason == ""
    tier.close()
    assert data_of(filled).stat().st_size == size


def test_a_file_of_garbage_is_moved_aside(filled: Path) -> None:
    data_of(filled).write_bytes(np.random.default_rng(1).bytes(65536))
    opened_anew(filled)[0].close()


def test_dying_while_opening_moves_the_index_aside(filled: Path) -> None:
    place = IndexPlace(filled / "index", FileIO())
    place.write_note("opening", "1")
    tier, reason = opened_anew(filled)
    assert "died while it opened" in reason
    tier.close()
    tier, reason = opened_anew(filled)
    assert reason == ""
    tier.close()


def test_dying_three_times_while_reading_it_moves_the_index_aside(filled: Path) -> None:
    for _ in range(3):
        tier = open_tier(filled)
        assert tier.reason == ""
        tier.recover_step(4)
        tier.close(clean=False)
    tier, reason = opened_anew(filled)
    assert "3 starts died" in reason
    tier.close()


def test_the_index_is_not_trusted_when_the_machine_stopped_under_it(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.store.disk.index_place.boot_id", lambda: "one boot")
    opened_anew(filled)[0].close(clean=False)
    tier, reason = opened_anew(filled)  # killed, and started again in the same boot
    assert reason == ""
    tier.close(clean=False)
    monkeypatch.setattr("services.store.disk.index_place.boot_id", lambda: "another boot")
    tier, reason = opened_anew(filled)
    assert "machine stopped" in reason
    tier.close()
    monkeypatch.setattr("services.store.disk.index_place.boot_id", lambda: "a third boot")
    tier, reason = opened_anew(filled)  # closed in order before
    assert reason == ""
    tier.close()


def test_an_index_whose_table_is_of_the_first_format_is_rebuilt(filled: Path) -> None:
    shutil.rmtree(filled / "index")
    (filled / "index").mkdir(mode=0o700)
    env = lmdb.open(str(filled / "index"), max_dbs=4)
    with env.begin(write=True) as txn:
        txn.put(b"format", sealed(b"format", b"1"), db=env.open_db(b"meta", txn))
        txn.put(BLOCKS[0].identity, b"of another shape", db=env.open_db(b"blocks", txn))
    env.close()
    IndexPlace(filled / "index", FileIO()).clean()
    tier, reason = opened_anew(filled)
    assert "format b'1'" in reason
    tier.close()


def test_an_index_of_another_format_is_rebuilt(filled: Path) -> None:
    index = DiskIndex(filled / "index", io=FileIO())
    index.apply(meta={b"format": b"0"})
    index.close()
    tier, reason = opened_anew(filled)
    assert "format b'0'" in reason
    tier.close()


def test_a_row_with_a_flipped_bit_is_a_miss_and_is_swept(filled: Path) -> None:
    env = lmdb.open(str(filled / "index"), max_dbs=4)
    table = env.open_db(b"blocks", **row_table.KIND)
    with env.begin(write=True) as txn, txn.cursor(table) as cursor:
        stored = bytearray(row_table.find(cursor, BLOCKS[5].identity) or b"")
        stored[70] ^= 1
        row_table.put(cursor, BLOCKS[5].identity, bytes(stored))
    env.close()
    tier = open_tier(filled)
    assert tier.lookup(BLOCKS[5].identity) is None
    assert len(recover(tier)) == 29
    counters = tier.statistics().counters
    assert (counters["damaged_entries"], counters["swept_orphans"]) == (1, 1)
    tier.check_integrity()
    tier.close()


def test_an_error_at_run_time_means_misses_and_heal_brings_all_back(filled: Path) -> None:
    tier = open_tier(filled)
    recover(tier)
    tier._index._env.close()  # any use of it is an lmdb.Error now
    assert tier.lookup(BLOCKS[0].identity) is None
    assert tier.statistics().state == "damaged"
    assert (filled / "index" / "opening").exists()
    tier.heal()
    assert tier.statistics().state == "rebuilding"
    more = tier.save(chain("more", 3))
    assert len(recover(tier)) == 33
    assert fetch(tier, BLOCKS[29].identity) == payload_of(BLOCKS[29].identity)
    assert fetch(tier, more[2].identity) == payload_of(more[2].identity)
    tier.check_integrity()
    tier.close()
    tier = open_tier(filled)
    assert tier.reason == ""
    assert len(recover(tier)) == 33
    tier.close()


def test_saves_go_on_while_the_index_is_rebuilt_and_the_newer_copy_wins(filled: Path) -> None:
    data_of(filled).unlink()
    tier = open_tier(filled)
    assert len(tier.recover_step(1)) == 0  # the index, empty
    again = tier.save(BLOCKS[:10])  # not known yet: saved a second time
    recover(tier)
    assert [tier.lookup(e.identity) for e in again] == again
    assert tier.statistics().blocks == 30
    tier.check_integrity()
    tier.close()


@pytest.mark.parametrize("how", ["the same bit", "zeros", "bits"])
@pytest.mark.parametrize("count", [1, 2, 4, 64])
def test_rows_that_are_damaged_together_are_all_found(how: str, count: int) -> None:
    """Also where what happened to one happened to its neighbours: a sector of zeros, a bit that sticks."""
    dice = np.random.default_rng(count)
    names = [dice.bytes(32) for _ in range(200)]
    rows = bytearray().join(name + pack_value(Entry(name, *[dice.bytes(32)] * 2, 1, 2, 3, 4, 5)) for name in names)
    for number in range(64, 64 + count):
        begin = number * ROW_BYTES
        if how == "zeros":
            rows[begin : begin + ROW_BYTES] = bytes(ROW_BYTES)
        else:
            rows[begin + (70 if how == "the same bit" else int(dice.integers(ROW_BYTES)))] ^= 1
    entries, damaged = checked_rows(bytes(rows))
    assert len(damaged) == count
    assert [entry["identity"].tobytes() for entry in entries] == names[:64] + names[64 + count :]


def test_single_flipped_bits_anywhere_in_the_index_give_no_wrong_bytes(filled: Path) -> None:
    """In a process of their own: LMDB may die of one, and then the next start must get on."""
    bits = [int(bit) for bit in np.random.default_rng(7).integers(8 * used_bytes(data_of(filled)), size=60)]
    program = "import sys; from tests.unit.test_disk_index import visit_flipped; visit_flipped(*sys.argv[1:])"
    deaths: dict[int, int] = {}
    at = 0
    while at < len(bits):
        todo = ",".join(map(str, bits[at:]))
        done = subprocess.run(
            [sys.executable, "-c", program, str(filled), todo], check=False, timeout=120, capture_output=True, text=True
        )
        at += done.stdout.count("done")
        if done.returncode:
            assert done.returncode < 0, done.stderr  # killed by a signal, never by wrong bytes or an error of ours
            deaths[bits[at]] = deaths.get(bits[at], 0) + 1
            assert deaths[bits[at]] <= 3, f"bit {bits[at]}: the store can't start any more"


def visit_flipped(directory: str, bits: str) -> None:
    """Flips each bit in a copy, and uses the copy as a store would; goes on in a copy that a death has left."""
    for bit in map(int, bits.split(",")):
        copy = Path(directory).with_name(f"bit {bit}")
        if not copy.exists():
            shutil.copytree(directory, copy)
            with data_of(copy).open("r+b") as file:
                file.seek(bit // 8)
                byte = file.read(1)[0]
                file.seek(bit // 8)
                file.write(bytes((byte ^ 1 << bit % 8,)))
        visit(copy)
        shutil.rmtree(copy)
        print("done", flush=True)


def visit(directory: Path) -> None:
    """Fails on wrong bytes, and when the tier does not come back whole: an error may show at any use, once."""
    tier = open_tier(directory)
    for _ in range(4):
        try:
            recover(tier)
            for block in BLOCKS:
                if fetch(tier, block.identity) not in (None, payload_of(block.identity)):
                    raise SystemExit("wrong bytes")
            tier.save(BLOCKS)
            tier.check_integrity()
        except IndexDamaged:
            tier.heal()
        else:
            break
    if [fetch(tier, block.identity) for block in BLOCKS] != [payload_of(block.identity) for block in BLOCKS]:
        raise SystemExit("blocks are missing after a save")
    tier.close()


def fill_index(directory: Path, rows: int) -> None:
    index = DiskIndex(directory, io=FileIO())
    for start in range(0, rows, 5000):
        numbers = range(start, min(start + 5000, rows))
        index.apply([Entry(name(str(n)), NO_PARENT, ROOT, n, 4096, n, n, n) for n in numbers])
    index.close()


def test_p25_opening_reads_no_entry_and_a_scan_reads_each_once(tmp_path: Path) -> None:
    for rows in (2_000, 20_000):
        fill_index(tmp_path / str(rows), rows)
        index = DiskIndex(tmp_path / str(rows), io=FileIO())
        told, batches, last = 0, 0, None
        while True:
            batch = index.scan(last, 4096)
            assert batch.entries.dtype == ENTRY
            told += len(batch.entries)
            batches += 1
            last = batch.last
            if last is None:
                break
            assert len(batch.entries) >= 4096
        assert told == rows == index.count()
        assert batches <= -(-rows // 4096)
        index.close()
