"""The journal: what was appended is read again, whatever the disk, the process or the bytes do."""

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from services.scheduler.journal import Journal, JournalFault, JournalFormat, JournalFull
from services.scheduler.journal_segment import HEADER_BYTES, pack_header, segment_path
from tests.durable_io import Died, DurableIO
from tests.journal_kit import accept, admit, ended, filled, flat, history, logprob_step, step


def segments(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_records_come_back_in_order_as_they_were(tmp_path: Path) -> None:
    batches = [*history(3), [accept(9), logprob_step(9, 0)], [ended(9, 1, error=("internal", "it broke"))]]
    filled(tmp_path / "journal", batches)
    recovered = Journal(tmp_path / "journal").recover()
    assert recovered.records == flat(batches)
    assert (recovered.torn_bytes, recovered.losses) == (0, [])


def test_one_step_is_one_write_and_no_sync(tmp_path: Path) -> None:
    io = DurableIO()
    journal = Journal(tmp_path / "journal", io=io)
    journal.recover()
    io.steps.clear()
    journal.append([step((1, 0, 1), (2, 0, 1)), ended(3, 0)])
    assert io.steps == ["write"]
    journal.sync()
    assert io.steps[1] == "fdatasync"
    journal.close()


def test_files_are_private(tmp_path: Path) -> None:
    filled(tmp_path / "journal", history(1))
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o700
    assert stat.S_IMODE(segment_path(tmp_path / "journal", 1).stat().st_mode) == 0o600


def test_appending_goes_on_after_a_restart(tmp_path: Path) -> None:
    batches = history(4)
    for batch in batches:
        filled(tmp_path, [batch])
    assert Journal(tmp_path).recover().records == flat(batches)
    assert segments(tmp_path) == ["00000001.log"]


def test_short_writes_are_finished(tmp_path: Path) -> None:
    io = DurableIO()
    io.short_writes = True
    filled(tmp_path, history(3), io=io)
    assert Journal(tmp_path).recover().records == flat(history(3))


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, JournalFull), (errno.EIO, JournalFault)])
def test_a_failed_append_leaves_nothing_and_can_be_made_again(tmp_path: Path, code: int, kind: type[Exception]) -> None:
    class HalfFull(DurableIO):
        """Takes half of each write, then fails, until there is room."""

        def write(self, fd: int, data: bytes) -> int:
            if "write" in self.fail and len(data) > 8:
                return os.write(fd, data[: len(data) // 2])
            return super().write(fd, data)

    io = HalfFull()
    journal = Journal(tmp_path, io=io)
    journal.recover()
    journal.append([accept(1)])
    io.fail = {"write": OSError(code, os.strerror(code))}
    for _ in range(3):
        with pytest.raises(kind):
            journal.append([step((1, 0, 1))])
    assert Journal(tmp_path).recover().records == [accept(1)]
    io.fail = {}
    journal.append([step((1, 0, 1))])
    journal.append([ended(1, 1)])
    journal.close()
    assert Journal(tmp_path).recover().records == [accept(1), step((1, 0, 1)), ended(1, 1)]


def test_a_failed_append_that_cannot_be_cut_back_begins_another_file(tmp_path: Path) -> None:
    class Stuck(DurableIO):
        def write(self, fd: int, data: bytes) -> int:
            if "write" in self.fail and len(data) > 40:
                return os.write(fd, data[:30])
            return super().write(fd, data)

    io = Stuck()
    journal = Journal(tmp_path, io=io)
    journal.recover()
    journal.append([accept(1)])
    io.fail = {"write": OSError(errno.EIO, "io"), "truncate": OSError(errno.EIO, "io")}
    with pytest.raises(JournalFault):
        journal.append([accept(2)])
    io.fail = {}
    assert journal.refusal() is not None
    journal.append([accept(3)])
    assert journal.refusal() is None
    journal.close()
    recovered = Journal(tmp_path).recover()
    assert recovered.records == [accept(1), accept(3)]
    assert segments(tmp_path) == ["00000001.log", "00000002.log"]


def test_new_requests_are_refused_before_the_disk_is_full(tmp_path: Path) -> None:
    io = DurableIO()
    journal = Journal(tmp_path, io=io)
    journal.recover()
    assert journal.refusal() is None
    io.free = (1 << 20, 1 << 40)
    assert "1048576 bytes left" in str(journal.refusal())
    journal.append([step((1, 0, 1))])  # what was accepted goes on
    io.free = None
    assert journal.refusal() is None
    journal.close()


@pytest.mark.parametrize("extra", [b"\0" * 4096, b"\0", b"\xff" * 7, b"\x40\x00\x00\x00abcdefg", os.urandom(300)])
def test_a_torn_tail_is_cut_and_counted(tmp_path: Path, extra: bytes) -> None:
    filled(tmp_path, history(2))
    with segment_path(tmp_path, 1).open("ab") as file:
        file.write(extra)
    journal = Journal(tmp_path)
    recovered = journal.recover()
    assert recovered.records == flat(history(2))
    assert recovered.torn_bytes == len(extra) or "damaged record" in recovered.losses[0]
    journal.append([accept(50)])
    journal.close()
    assert Journal(tmp_path).recover().records == [*flat(history(2)), accept(50)]


def test_a_damaged_record_in_the_middle_costs_the_rest_of_its_file_loudly(tmp_path: Path) -> None:
    filled(tmp_path, [[accept(1)], [step((1, 0, 3))], [step((1, 3, 1))], [step((1, 4, 1))]])
    path = segment_path(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[-60] ^= 4  # in the last but one batch
    path.write_bytes(data)
    journal = Journal(tmp_path)
    recovered = journal.recover()
    assert recovered.records in ([accept(1), step((1, 0, 3))], [accept(1)])
    assert len(recovered.losses) == 1
    assert "00000001.log: a damaged record at byte" in recovered.losses[0]
    assert path.read_bytes() == data  # left for people to look at
    journal.append([accept(2)])
    journal.close()
    assert segments(tmp_path) == ["00000001.log", "00000002.log"]
    assert Journal(tmp_path).recover().records == [*recovered.records, accept(2)]


def test_tokens_behind_a_gap_are_computed_again_and_join(tmp_path: Path) -> None:
    filled(tmp_path, [[accept(1)], [step((1, 0, 2))]])
    first = segment_path(tmp_path, 1)
    filled(tmp_path / "b", [[accept(2)], [step((1, 3, 1), (2, 0, 1))], [ended(1, 4)]])
    segment_path(tmp_path / "b", 1).rename(segment_path(tmp_path, 2))  # token 2 of request 1 is in neither
    journal = Journal(tmp_path)
    recovered = journal.recover()
    assert recovered.records == [accept(1), step((1, 0, 2)), accept(2), step((2, 0, 1))]
    assert recovered.cut_short == {1}
    assert any("lost tokens" in line for line in recovered.losses)
    journal.append([step((1, 2, 2))])
    journal.append([ended(1, 4)])
    journal.close()
    assert first.exists()
    assert Journal(tmp_path).recover().records[-2:] == [step((1, 2, 2)), ended(1, 4)]


def test_another_format_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    filled(tmp_path, history(1))
    segment_path(tmp_path, 2).write_bytes(pack_header(2, 0, version=9))
    before = {name: (tmp_path / name).read_bytes() for name in segments(tmp_path)}
    with pytest.raises(JournalFormat, match="format 9"):
        Journal(tmp_path).recover()
    assert before == {name: (tmp_path / name).read_bytes() for name in segments(tmp_path)}


def test_files_go_when_all_their_requests_are_forgotten_and_only_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=1)  # each append begins a file
    journal.recover()
    journal.append([accept(1)])
    journal.append([accept(2)])
    journal.append([step((1, 0, 1), (2, 0, 1))])
    journal.append([ended(2, 1)])
    journal.forget(2)
    journal.sync()
    assert len(segments(tmp_path)) == 4  # the first, empty one went; request 1 holds all from its own on
    journal.append([ended(1, 1)])
    journal.forget(1)
    journal.sync()
    assert len(segments(tmp_path)) == 1
    assert journal.statistics()["live"] == 0
    journal.close()


def test_what_is_left_of_forgotten_requests_neither_lives_nor_holds_files(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=1)
    journal.recover()
    journal.append([accept(1)])
    journal.append([accept(2), step((1, 0, 1))])
    journal.append([ended(1, 1), step((2, 0, 1))])
    journal.forget(1)
    journal.close()
    journal = Journal(tmp_path)
    assert journal.recover().records == [accept(2), step((2, 0, 1))]
    assert journal.statistics()["live"] == 1
    journal.forget(2)
    journal.append([accept(3)])
    journal.sync()
    assert journal.statistics()["segments"] == 1
    journal.close()


def test_sync_runs_beside_appends(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=2000)
    journal.recover()
    stop = threading.Event()
    errors: list[BaseException] = []

    def syncing() -> None:
        while not stop.is_set():
            try:
                journal.sync()
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=syncing)
    thread.start()
    batches = [[accept(key), step((key, 0, 1))] for key in range(300)]
    for batch in batches:
        journal.append(batch)
    stop.set()
    thread.join()
    assert not errors
    journal.close()
    assert Journal(tmp_path).recover().records == flat(batches)
    assert len(segments(tmp_path)) > 10


def test_dying_at_every_step_loses_nothing_that_was_appended(tmp_path: Path) -> None:
    batches = history(4)

    def run(directory: Path, io: DurableIO, appended: list[int]) -> None:
        journal = Journal(directory, io=io, segment_bytes=400)
        journal.recover()
        for number, batch in enumerate(batches):
            journal.append(batch)
            appended.append(number)
            if number % 3 == 0:
                journal.sync()

    counting = DurableIO()
    run(tmp_path / "count", counting, [])
    assert len(counting.steps) > 2 * len(batches)
    for at in range(1, len(counting.steps) + 1):
        for torn in (False, True):
            directory = tmp_path / f"{at}-{torn}"
            appended: list[int] = []
            with pytest.raises(Died):
                run(directory, DurableIO(die_at=at, torn=torn), appended)
            recovered = Journal(directory).recover()
            kept = flat(batches[: len(appended)])
            assert recovered.records[: len(kept)] == kept
            assert recovered.records in (kept, flat(batches[: len(appended) + 1]))
            assert not recovered.losses


def test_a_header_cut_by_a_kill_is_no_loss(tmp_path: Path) -> None:
    filled(tmp_path, [[accept(1), admit(1)]])
    segment_path(tmp_path, 2).write_bytes(pack_header(2, 0)[: HEADER_BYTES // 2])
    journal = Journal(tmp_path)
    assert journal.recover().records == [accept(1), admit(1)]
    journal.append([accept(2)])
    journal.close()
    assert Journal(tmp_path).recover().records == [accept(1), admit(1), accept(2)]


def test_kill_9_in_mid_traffic_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from services.scheduler.journal import Journal
from tests.journal_kit import accept, step
journal = Journal(Path({str(tmp_path)!r}), segment_bytes=20_000)
journal.recover()
key = 0
while True:
    journal.append([accept(key), step((key, 0, 3))])
    print(key, flush=True)
    key += 1
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) == 500:
                break
        child.kill()
        heard = [int(line) for line in child.stdout if line.endswith("\n")]
    last = max([500, *heard])
    recovered = Journal(tmp_path).recover()
    assert not recovered.losses
    written = len(recovered.records) // 2
    assert written >= last + 1
    assert recovered.records == flat([[accept(key), step((key, 0, 3))] for key in range(written)])
