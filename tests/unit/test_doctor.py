"""`perdure doctor`: a home that is well is called well, and each planted fault is found by its name and mended."""

import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest
from click.testing import CliRunner

from ops.cli.doctor import doctor
from ops.doctor import dead_arenas, index, patient
from ops.doctor.exam import repair
from ops.doctor.index_dump import dump
from ops.doctor.report import NAMES, Level
from services.store.arena.records import PAGE, RECORD, STARTS_AT, STATE_AT, Geometry, unpack_superblock
from services.store.disk.footer import FORMAT, Superblock, pack_superblock
from services.store.disk.meta_file import MetaFile
from tests import doctor_kit as kit
from tests.doctor_kit import BLOCKS, PADDED, Home, find, flip, slot_offset

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    base = tmp_path_factory.mktemp("doctor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(base / "run"))
        patch.setattr(dead_arenas, "SHARED", base / "shm")
        yield kit.make_home(base)


@pytest.fixture
def home(made: Home) -> Home:
    made.restore()
    return made


def geometry(home: Home) -> Geometry:
    with home.arena.open("rb") as file:
        return unpack_superblock(file.read(PAGE))[0]


def header_offset(home: Home, identity: bytes) -> int:
    at = find(home.arena, identity)
    assert (at - geometry(home).data_start) % RECORD.itemsize == 0
    return at


def payload_offset(home: Home, identity: bytes) -> int:
    return find(home.arena, identity * 3)


# --- the list: what is planted, under which name it is found, how bad it is, whether --repair mends it

N, W, F = Level.NOTE, Level.WARNING, Level.FAULT
PLANTS: dict[str, tuple[Callable[[Home], object], str, Level, bool]] = {}


def plant(name: str, level: Level, *, mended: bool = True) -> Callable[[Callable[[Home], object]], None]:
    def add(planted: Callable[[Home], object]) -> None:
        PLANTS[planted.__name__.strip("_")] = planted, name, level, mended

    return add


@plant("arena-header", W)
def _a_bit_of_an_arena_header(home: Home) -> None:
    flip(home.arena, header_offset(home, BLOCKS[3]) + 5)


@plant("arena-header", F)
def _bits_of_two_arena_headers(home: Home) -> None:
    flip(home.arena, header_offset(home, BLOCKS[3]) + 5)
    flip(home.arena, header_offset(home, BLOCKS[7]) + 100)


@plant("arena-payload", F)
def _a_bit_of_a_payload_in_the_arena(home: Home) -> None:
    flip(home.arena, payload_offset(home, BLOCKS[3]) + 1000)


@plant("arena-extent", F)
def _a_bit_of_the_extent_table(home: Home) -> None:
    flip(home.arena, PAGE + 9)


@plant("arena-damaged", F)
def _a_bit_of_the_arena_superblock(home: Home) -> None:
    flip(home.arena, 20)


@plant("arena-format", W)
def _an_arena_of_another_version(home: Home) -> None:
    flip(home.arena, 9)


@plant("arena-size", F)
def _an_arena_cut_short(home: Home) -> None:
    os.truncate(home.arena, 1 << 19)


@plant("arena-unfinished", N)
def _an_arena_without_a_superblock(home: Home) -> None:
    with home.arena.open("r+b") as file:
        file.write(bytes(PAGE))


@plant("arena-refused", F, mended=False)
def _a_folder_in_the_arenas_place(home: Home) -> None:
    home.arena.unlink()
    home.arena.mkdir()


@plant("arena-holes", W, mended=False)
def _an_arena_with_holes(home: Home) -> None:
    whole = home.arena.read_bytes()
    home.arena.write_bytes(whole[: len(whole) // 2])
    os.truncate(home.arena, len(whole))


@plant("arena-granted", N, mended=False)
def _a_grant_of_a_dead_engine(home: Home) -> None:
    from services.store.arena.headers import Headers
    from services.store.arena.records import GRANTED

    data = bytearray(home.arena.read_bytes())
    headers = Headers(data, geometry(home))
    free = next(s for s in range(headers.count(0)) if data[headers._record(s) + STATE_AT] == 0)
    facts = {"identity": b"g" * 32, "parent": BLOCKS[0], "root": kit.ROOT, "generation": 1 << 40}
    headers.write(free, GRANTED, **facts, engine=1, epoch=0, length=100)  # type: ignore[arg-type]
    home.arena.write_bytes(data)


@plant("arena-dead", W)
def _an_arena_whose_home_is_gone(home: Home) -> None:
    kit.stray_arena(home, home.pristine.parent / "was here")


@plant("arena-idle", N, mended=False)
def _an_arena_of_another_home_that_is_there(home: Home) -> None:
    other = home.pristine.parent / "home" / "another"
    other.mkdir(mode=0o700)
    kit.stray_arena(home, other)


@plant("segment-missing", F, mended=False)
def _a_segment_that_can_not_be_opened(home: Home) -> None:
    path = home.segment
    hidden = path.parent.parent / "elsewhere"
    path.rename(hidden)
    path.symlink_to(hidden)


@plant("arena-unknown", N, mended=False)
def _an_arena_that_does_not_say_whose_it_is(home: Home) -> None:
    kit.stray_arena(home, None)


@plant("slot-payload", F)
def _a_bit_of_a_payload_on_disk(home: Home) -> None:
    flip(home.segment, slot_offset(home, BLOCKS[3]) + 1000)


@plant("slot-footer", F)
def _a_bit_of_a_footer(home: Home) -> None:
    flip(home.segment, slot_offset(home, BLOCKS[3]) + PADDED + 20)


@plant("slot-orphan", N)
def _a_footer_that_the_index_does_not_name(home: Home) -> None:
    home.forget(BLOCKS[11])


@plant("index-dangling", W)
def _an_entry_of_a_hole(home: Home) -> None:
    home.enter(home.entry(BLOCKS[11])._replace(identity=b"d" * 32, slot=60))


@plant("index-double", F)
def _two_entries_of_one_slot(home: Home) -> None:
    home.enter(home.entry(BLOCKS[4])._replace(identity=b"d" * 32))


@plant("segment-missing", F)
def _a_segment_deleted(home: Home) -> None:
    home.segment.unlink()


@plant("segment-truncated", F)
def _a_segment_cut_short(home: Home) -> None:
    os.truncate(home.segment, slot_offset(home, BLOCKS[6]))


@plant("segment-superblock", F)
def _a_bit_of_a_segments_first_page(home: Home) -> None:
    flip(home.segment, 14)


@plant("segment-foreign", N, mended=False)
def _a_foreign_file_among_the_segments(home: Home) -> None:
    (home.segment.parent / "notes.txt").touch(mode=0o600)


@plant("disk-format", F, mended=False)
def _a_segment_of_a_newer_format(home: Home) -> None:
    with home.segment.open("r+b") as file:
        file.write(pack_superblock(Superblock(FORMAT + 1, 0, PADDED, 64)))


@plant("disk-meta", F)
def _a_bit_of_the_small_records(home: Home) -> None:
    flip(home.places.store / "meta", 6)


@plant("clear-pending", N, mended=False)
def _a_clear_that_was_begun(home: Home) -> None:
    MetaFile(home.places.store / "meta", kit.FileIO()).put({"clearing": b"x"})


@plant("generation-behind", F)
def _a_count_of_starts_that_was_lost(home: Home) -> None:
    (home.places.store / "meta").unlink()
    with home.arena.open("r+b") as file:
        file.seek(STARTS_AT)
        file.write(bytes(8))


@plant("index-record", F)
def _a_bit_of_an_index_record(home: Home) -> None:
    data = home.places.store / "index" / "data.mdb"
    flip(data, find(data, BLOCKS[3][1:]) + 100)


@plant("index-damaged", F)
def _an_index_cut_short(home: Home) -> None:
    os.truncate(home.places.store / "index" / "data.mdb", 3 * 4096)


@plant("index-damaged", F)
def _an_index_of_random_bytes(home: Home) -> None:
    data = home.places.store / "index" / "data.mdb"
    kept = data.read_bytes()[:8192]
    data.write_bytes(kept + os.urandom(data.stat().st_size - 8192))


@plant("segment-superblock", N)
def _a_segment_that_was_being_made(home: Home) -> None:
    path = home.segment.with_name(f"00007-{PADDED}.seg")
    path.touch(mode=0o600)
    os.truncate(path, PAGE + 4 * (PADDED + PAGE))


@plant("index-distrusted", N, mended=False)
def _an_index_that_was_being_made(home: Home) -> None:
    shutil.rmtree(home.places.store / "index")
    (home.places.store / "index").mkdir(mode=0o700)
    lmdb.open(str(home.places.store / "index"), max_dbs=4, mode=0o600).close()


@plant("index-format", N)
def _an_index_of_another_format(home: Home) -> None:
    index = kit.DiskIndex(home.places.store / "index", io=kit.FileIO())
    index.apply(meta={b"format": b"0"})
    index.close()


@plant("index-record", F)
def _a_bit_of_the_indexs_own_format(home: Home) -> None:
    data = home.places.store / "index" / "data.mdb"
    flip(data, data.read_bytes().rfind(b"format") + 6)


@plant("index-distrusted", N, mended=False)
def _a_start_that_died_while_it_opened_the_index(home: Home) -> None:
    (home.places.store / "index" / "opening").touch(mode=0o600)


@plant("journal-loss", F)
def _a_bit_of_a_journal_frame(home: Home) -> None:
    flip(home.journal_file, 60)


@plant("journal-loss", F)
def _a_journal_file_deleted(home: Home) -> None:
    sorted(home.places.journal.glob("*.log"))[1].unlink()


@plant("journal-torn", N)
def _an_unfinished_write_at_the_journals_end(home: Home) -> None:
    kit.append(sorted(home.places.journal.glob("*.log"))[-1], kit.unfinished_frame())


@plant("journal-format", F, mended=False)
def _a_journal_of_a_newer_format(home: Home) -> None:
    from services.scheduler.journal_segment import FORMAT as JOURNAL_FORMAT
    from services.scheduler.journal_segment import pack_header

    with home.journal_file.open("r+b") as file:
        file.write(pack_header(1, 0, JOURNAL_FORMAT + 1))


@plant("journal-aside", F)
def _a_repair_of_the_journal_that_was_cut_short(home: Home) -> None:
    home.places.journal.rename(home.places.journal.with_name("journal.mended"))


@plant("ledger-damaged", F)
def _bytes_of_the_ledger(home: Home) -> None:
    with home.places.ledger.open("r+b") as file:
        file.seek(100)
        file.write(os.urandom(9000))


@plant("ledger-behind", N)
def _a_row_of_the_ledger_deleted(home: Home) -> None:
    kit.sql(home.places.ledger, "delete from requests where rowid = (select min(rowid) from requests)")


@plant("ledger-differs", N)
def _a_row_of_the_ledger_changed(home: Home) -> None:
    kit.sql(home.places.ledger, "update requests set completion_tokens = 99 where rowid = 1")


@plant("ledger-mode", W, mended=False)
def _a_ledger_without_a_write_ahead_log(home: Home) -> None:
    kit.sql(home.places.ledger, "pragma journal_mode = delete")


@plant("clock-behind", W, mended=False)
def _a_journal_from_the_future(home: Home) -> None:
    shutil.rmtree(home.places.journal)
    journal = kit.Journal(home.places.journal)
    journal.recover()
    for batch in kit.moved(kit.history(2), 4e9):
        journal.append(batch)
    journal.close()


@plant("clock-jump", N, mended=False)
def _a_clock_that_went_back(home: Home) -> None:
    journal = kit.Journal(home.places.journal)
    journal.recover()
    for batch in kit.moved(kit.history(8)[12:], kit.time.time() - 9000):
        journal.append(batch)
    journal.close()


@plant("home-mode", F)
def _a_key_that_others_may_read(home: Home) -> None:
    home.places.identity_key.chmod(0o644)


@plant("home-mode", F)
def _a_journal_folder_that_others_may_enter(home: Home) -> None:
    home.places.journal.chmod(0o755)


@plant("identity-key", F, mended=False)
def _a_key_cut_short(home: Home) -> None:
    os.truncate(home.places.identity_key, 16)


@plant("identity-key", F, mended=False)
def _a_key_deleted_beside_a_cache(home: Home) -> None:
    home.places.identity_key.unlink()


@plant("leftovers", N)
def _files_that_were_never_renamed(home: Home) -> None:
    (home.places.store / "meta.part").touch(mode=0o600)


@plant("run-dir-dead", W)
def _a_run_dir_whose_home_is_gone(home: Home) -> None:
    other = home.places.run.parent / "perdure-0123456789"
    other.mkdir(mode=0o700)
    (other / "home").write_text(str(home.pristine.parent / "was here"))
    (other / "store.lock").write_text("1\n")


def test_a_healthy_home_has_nothing_to_say(home: Home) -> None:
    report = home.examine()
    assert {finding.name for finding in report.findings} == {
        "home", "machine", "clock", "arena", "disk", "journal", "ledger",
    }  # fmt: skip
    assert report.worst == Level.OK, report.plain()
    assert "blocks: 12, segments: 1;" in report.named("disk")[0].what
    assert "12 valid" in report.named("arena")[0].what


@pytest.mark.parametrize("planted", PLANTS)
def test_a_planted_fault_is_found_by_name_and_mended(home: Home, planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    do, name, level, mended = PLANTS[planted]
    if "index" not in planted:  # a sound one needs no process of its own, which takes longer than all else here
        monkeypatch.setattr(index, "dumped", dumped_here)
    do(home)
    before = snapshot_of(home)
    found = home.examine()
    assert snapshot_of(home) == before, "examining changed a file"
    assert name in {finding.name for finding in found.findings}, found.plain()
    assert max(finding.level for finding in found.named(name)) == level, found.plain()
    assert found.content == (found.worst < Level.FAULT)
    after = home.repair()
    if mended:
        assert any(line.startswith(f"{name}: ") for line in after.mended), after.mended
        assert after.content, after.plain()
        left = {finding.name for finding in after.at_least(level)} & {name}
        assert not left, after.plain()
    else:
        assert name in {finding.name for finding in after.findings}, after.plain()


def dumped_here(directory: Path) -> tuple[bytes, str]:
    out = io.BytesIO()
    dump(str(directory), out)
    return out.getvalue(), ""


def snapshot_of(home: Home) -> dict[str, tuple[int, list[tuple[int, bytes]]]]:
    """Mode and content of every file of the home; SQLite's and LMDB's lock files are for readers, too."""
    base = home.pristine.parent
    return {
        str(path): (path.lstat().st_mode, kit.data_of(path))
        for top in ("home", "shm", "run")
        for path in sorted((base / top).rglob("*"))
        if path.is_file() and not path.name.endswith(("-shm", "-wal", "lock.mdb"))
    }


BOTH, DISK = "both tiers", "the disk alone"


@pytest.mark.parametrize(
    ("planted", "tiers", "served"),
    [
        ("a_bit_of_an_arena_header", BOTH, (11, 1)),
        ("a_bit_of_a_payload_in_the_arena", BOTH, (11, 1)),
        ("an_arena_cut_short", BOTH, (0, 12)),
        ("a_bit_of_a_payload_on_disk", BOTH, (12, 0)),
        ("a_bit_of_a_payload_on_disk", DISK, (0, 3)),
        ("a_segment_deleted", BOTH, (12, 0)),
        ("two_entries_of_one_slot", DISK, (0, 12)),
        ("an_index_cut_short", DISK, (0, 12)),
        ("a_bit_of_an_index_record", DISK, (0, 12)),
        ("an_index_of_another_format", DISK, (0, 12)),
        ("a_bit_of_the_indexs_own_format", DISK, (0, 12)),
    ],
)
def test_a_mended_home_serves_every_block_that_still_held(
    home: Home, planted: str, tiers: str, served: tuple[int, int]
) -> None:
    """`served`: blocks from host and from disk, after the repair and, for DISK, without the arena."""
    PLANTS[planted][0](home)
    assert home.repair().content
    if tiers == DISK:
        home.arena.unlink()
    assert home.serve() == served


def test_a_block_that_is_bad_on_both_tiers_is_dropped_and_the_run_ends_before_it(home: Home) -> None:
    PLANTS["a_bit_of_a_payload_on_disk"][0](home)
    PLANTS["a_bit_of_a_payload_in_the_arena"][0](home)
    assert not home.examine().content
    assert home.examine(quick=True).content, "--quick reads no payloads"
    assert home.repair().content
    assert sum(home.serve()) == 3


def test_every_name_of_a_finding_is_used_and_explained() -> None:
    code = "".join(path.read_text() for path in (ROOT / "ops" / "doctor").glob("*.py") if path.name != "report.py")
    explained = set(re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs" / "doctor.md").read_text(), re.MULTILINE))
    assert explained == NAMES
    assert not [name for name in NAMES if f'"{name}"' not in code]


def test_the_command_says_what_is_wrong_the_way_out_and_that_it_can_be_mended(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_STORE__ARENA_DIR", str(home.config.store.arena_dir))
    monkeypatch.setenv("PERDURE_STORE__HOST_BYTES", "1 MiB")
    monkeypatch.setattr(index, "dumped", dumped_here)
    PLANTS["a_bit_of_a_payload_on_disk"][0](home)
    where = ["--home", str(home.places.home)]
    broken = CliRunner().invoke(doctor, where)
    assert broken.exit_code == 1, broken.output
    assert "fault     slot-payload: blocks on disk that fail their checksums: 1 (slots 3)" in broken.output
    assert "-> they are dropped" in broken.output
    assert "perdure doctor --repair" in broken.output
    mended = CliRunner().invoke(doctor, [*where, "--repair"])
    assert mended.exit_code == 0, mended.output
    assert "mended    slot-payload: dropped damaged blocks of the disk tier: 1" in mended.output
    assert "0 fault" in mended.output


def test_a_home_that_is_not_there_is_said_to_be_so_and_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for options in ([], ["--repair"]):
        told = CliRunner().invoke(doctor, ["--home", str(tmp_path / "no"), *options])
        assert told.exit_code == 0
        assert "there is no home" in told.output
    assert not list(tmp_path.iterdir())


def test_a_check_that_can_not_look_says_so_and_the_others_go_on(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, **options: bool) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(patient, "read_arena", refused)
    report = home.examine()
    assert "Permission denied" in report.named("unreadable")[0].what
    assert not report.content
    assert report.named("journal")


def test_a_segment_that_can_not_be_opened_now_loses_none_of_its_entries(home: Home) -> None:
    PLANTS["a_segment_that_can_not_be_opened"][0](home)
    report = home.repair()
    assert not report.content
    assert not report.mended
    link = next(path for path in (home.places.store / "segments").iterdir() if path.is_symlink())
    link.readlink().rename(link)
    assert home.examine().worst == Level.OK


def test_arenas_in_use_or_of_a_home_that_is_there_are_never_removed(home: Home) -> None:
    there = home.pristine.parent / "home" / "another"
    there.mkdir(mode=0o700)
    idle, unknown = kit.stray_arena(home, there), kit.stray_arena(home, None)
    gone = kit.stray_arena(home, home.pristine.parent / "was here")
    with gone.open("rb"):
        assert not home.examine().named("arena-dead"), "somebody has it open"
    report = repair(home.places, home.config, remove_dead_arenas=True)
    assert report.content
    assert idle.exists()
    assert home.arena.exists()
    assert not unknown.exists()
    assert not gone.exists()
