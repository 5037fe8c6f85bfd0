"""One flipped bit anywhere in what survives a store and a scheduler: no wrong block, no wrong token, and it shows.

The index alone, whose library may die of it, is flipped in a process of its own: `test_disk_index.py`. A header's
every bit: `test_arena.py`. Copies in the arena under a worker's eyes: `test_transfer.py`.
"""

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.scheduler.journal import Journal
from services.scheduler.journal_segment import HEADER_BYTES, segment_numbers, segment_path
from services.store.arena.records import EXTENT_BYTES, PAGE, RECORD
from tests.durable_io import FAST, DurableIO
from tests.journal_kit import accept, ended, filled, flat, history
from tests.property.test_journal_damage import follows_without_gaps
from tests.store_pair import Life, chain, identities, payload_of, root_of

A, B = root_of("a"), root_of("b")
BOTH, HOST, OTHER = chain("both", 3, A), chain("host", 2, A), chain("other", 2, B)
EVERY = [*identities(BOTH), *identities(HOST), *identities(OTHER)]


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes((byte ^ 1 << bit,)))


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A store after a kill: three blocks and two of another root on both tiers, two on the host only."""
    with tempfile.TemporaryDirectory(prefix="perdure-test-", dir=FAST) as place:
        life = Life(Path(place) / "home", DurableIO())
        life.save(BOTH, A)
        life.save(OTHER, B)
        life.flush()
        life.save(HOST, A)
        life.end()
        life.io.let_go()
        yield Path(place) / "home"


def after_flip(home: Path, path: Path, at: int, bit: int) -> tuple[set[bytes], bool]:
    """(blocks that can be read, whether anything says that something was wrong); wrong bytes fail."""
    pristine = home.with_name("pristine")
    if not pristine.exists():
        shutil.copytree(home, pristine)
    shutil.rmtree(home)
    shutil.copytree(pristine, home)
    flip(path, at, bit)
    life = Life(home, DurableIO())
    life.catalog.open_engine(("e0", 1), [])
    life.settle()
    read = set()
    for identity in EVERY:
        got = life.load([identity]) or life.load(
            [identity]
        )  # a bad host copy is withdrawn by the first, disk has its own
        assert got in ([], [payload_of(identity)]), "wrong bytes"
        read |= {identity} if got else set()
    assert life.disk is not None
    counted = life.catalog.statistics().counters
    told = life.opened.notes or counted.quarantined or counted.disk_failures or life.lane.counters.damaged
    told = told or life.disk.statistics().counters
    life.end()
    life.io.let_go()
    return read, bool(told)


def arena_of(home: Path) -> Path:
    return next(home.glob("perdure-*-arena"))


def test_a_flipped_bit_in_the_arena_costs_what_it_hit_and_says_so(home: Path) -> None:
    """Superblock, extent table, each byte of a header that counts, payloads."""
    dice = random.Random(5)
    tables = PAGE + PAGE  # one page of superblock, one of extents
    payloads = tables + -(-60 * RECORD.itemsize // PAGE) * PAGE
    places = [*range(0, 72, 5), 128, 130, 136, *range(PAGE, PAGE + EXTENT_BYTES, 3), *range(tables, tables + 160, 4)]
    places += [tables + 5 * RECORD.itemsize + dice.randrange(160) for _ in range(12)]
    places += [payloads + dice.randrange(7 * PAGE) for _ in range(12)]
    for at in places:
        read, told = after_flip(home, arena_of(home), at, dice.randrange(8))
        missing = set(EVERY) - read
        assert not missing or told, f"byte {at}: {len(missing)} blocks are gone, and nothing says so"
        assert not missing & set(identities(BOTH + OTHER)), "a block was on disk too"
        if tables <= at:
            assert len(missing) <= 1, f"byte {at}"


def test_a_flipped_bit_in_a_segment_costs_no_block_that_the_host_has(home: Path) -> None:
    dice = random.Random(6)
    for path in sorted(home.rglob("*.seg")):
        for at in [*range(0, 28, 4), *(PAGE + dice.randrange(path.stat().st_size - PAGE) for _ in range(24))]:
            read, _ = after_flip(home, path, at, dice.randrange(8))
            assert read == set(EVERY), f"{path.name} byte {at}"


def test_a_flipped_bit_in_a_segment_is_a_miss_of_one_block(home: Path) -> None:
    """Without an arena: what the disk gives is right, or a counted miss."""
    dice = random.Random(7)
    pristine = home.with_name("pristine")
    if not pristine.exists():
        shutil.copytree(home, pristine)
    bare = home.with_name("with arena")
    shutil.copytree(pristine, bare)
    arena_of(pristine).unlink()
    try:
        on_disk = set(identities(BOTH + OTHER))
        segments = sorted(path.relative_to(pristine) for path in pristine.rglob("*.seg"))
        for name in segments:
            size = (pristine / name).stat().st_size
            footers = [PAGE + slot * 2 * PAGE + PAGE + dice.randrange(140) for slot in range(5)]
            payloads = [PAGE + slot * 2 * PAGE + dice.randrange(PAGE) for slot in range(5)]
            for at in [*range(0, 28, 4), *(at for at in footers + payloads if at < size)]:
                read, told = after_flip(home, home / name, at, dice.randrange(8))
                missing = on_disk - read
                assert len(missing) <= 1, f"{name} byte {at}"
                assert not missing or told
    finally:
        shutil.rmtree(pristine)
        bare.rename(pristine)


def test_a_flipped_bit_in_the_journal_is_a_prefix_or_a_loss_that_is_told(tmp_path: Path) -> None:
    """A bit of every third byte of every file; of one file's header and its first frame's head every bit."""
    batches = [*history(3), [ended(1, 5)], [accept(8)]]
    filled(tmp_path / "journal", batches, segment_bytes=500)
    written = flat(batches)
    dice = random.Random(8)
    numbers = segment_numbers(tmp_path / "journal")
    assert len(numbers) >= 3
    for number in numbers:
        size = segment_path(tmp_path / "journal", number).stat().st_size
        bits = [8 * at + dice.randrange(8) for at in range(number % 3, size, 3)]
        bits += range(8 * (HEADER_BYTES + 8)) if number == numbers[1] else []
        for place in bits:
            directory = tmp_path / "copy"
            shutil.copytree(tmp_path / "journal", directory)
            flip(segment_path(directory, number), place // 8, place % 8)
            journal = Journal(directory)
            recovered = journal.recover()
            journal.close()
            follows_without_gaps(recovered.records, batches)
            told = recovered.losses or recovered.torn_bytes
            assert told or recovered.records == written, f"file {number} bit {place}: {len(recovered.records)} records"
            shutil.rmtree(directory)
