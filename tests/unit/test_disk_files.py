"""The disk tier's segment files: several writes at a time, files that are empty, lost, foreign, or can't be emptied."""

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.store.disk.errors import DiskFault, DiskFull, DiskGone, DiskUnusable
from services.store.disk.tier import DiskTier
from tests.disk_kit import LENGTH, SLOT, chain, fetch, open_tier, payload_of, read, recover
from tests.durable_io import DurableIO
from tests.failing_io import FailingIO

FOUR = {"capacity": 8 << 20, "segment_bytes": 4 * SLOT + 4096}
"""Segments of four slots."""


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "segments").iterdir())


def ready(tier: DiskTier) -> DiskTier:
    recover(tier)
    return tier


def test_several_writes_are_in_flight_and_one_that_fails_costs_its_own_blocks(tmp_path: Path) -> None:
    tier = ready(open_tier(tmp_path, io := FailingIO(), **FOUR))
    meeting = threading.Barrier(3)  # three segments, three runs: each waits for the others
    plain = io.pwritev

    def together(fd: int, parts: Sequence[Any], offset: int) -> int:
        if len(parts) > 1 and meeting.wait(10) == 0:  # a superblock is one part
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(fd, parts, offset)

    io.pwritev = together  # type: ignore[method-assign]
    blocks = chain("a", 12)
    saved = tier.save(blocks)
    assert len(saved) == 8
    assert read(tier, saved) == [payload_of(entry.identity) for entry in saved]
    assert tier.statistics().troubles["DiskFault: Input/output error"].times == 1
    tier.check_integrity()
    tier.close()


def test_empty_segments_are_removed_after_a_delete_and_a_clear_and_their_numbers_come_again(tmp_path: Path) -> None:
    tier = ready(open_tier(tmp_path, **FOUR))
    entries = tier.save(chain("a", 12))
    assert len(names_in(tmp_path)) == 3
    tier.delete([entry.identity for entry in entries[4:8]])
    tier.sync()
    assert names_in(tmp_path) == [f"00000-{LENGTH}.seg", f"00002-{LENGTH}.seg"]
    again = tier.save(chain("b", 4))
    assert {entry.slot >> 16 for entry in again} == {1}
    assert tier.clear() == (12, 12 * LENGTH)
    assert names_in(tmp_path) == []
    tier.check_integrity()
    tier.close()


def test_a_removed_segment_s_file_is_closed_only_when_its_readers_have_left(tmp_path: Path) -> None:
    tier = ready(open_tier(tmp_path, io := FailingIO()))
    entries = tier.save(chain("a", 2))
    got: list[list[bytes | None]] = []
    io.holds = {"preadv"}
    reader = threading.Thread(target=lambda: got.append(read(tier, entries)))
    reader.start()
    assert io.held.wait(10)
    (descriptor,) = [segment.fd for segment in tier._files._set.files.values()]
    tier.clear()
    assert names_in(tmp_path) == []
    os.fstat(descriptor)  # still open
    io.go_on.set()
    reader.join()
    assert got == [[None, None]]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
    tier.close()


def test_slots_that_could_not_be_emptied_are_emptied_later_and_never_handed_out_before(tmp_path: Path) -> None:
    tier = ready(open_tier(tmp_path, io := FailingIO(), max_blocks=4))
    entries = tier.save(chain("a", 4))
    io.fails = {"punch": errno.EIO, "pwritev": errno.EIO}
    assert tier.delete([entry.identity for entry in entries]) == 4
    assert tier.room(LENGTH) == 0
    io.fails = {}
    with pytest.raises(DiskFull):
        tier.save(chain("b", 1))
    tier.sync()
    assert tier.room(LENGTH) == 4
    assert len(tier.save(chain("b", 4))) == 4
    tier.check_integrity()
    tier.close()


def test_p01_a_segment_that_went_away_is_told_with_its_blocks(tmp_path: Path) -> None:
    tier = ready(open_tier(tmp_path, **FOUR))
    entries = tier.save(chain("a", 8))
    (tmp_path / "segments" / f"00000-{LENGTH}.seg").unlink()
    assert sorted(tier.sync()) == sorted(entry.identity for entry in entries[:4])
    assert tier.sync() == []
    assert [fetch(tier, entry.identity) is not None for entry in entries] == [False] * 4 + [True] * 4
    assert "removed under us" in tier.reason
    tier.check_integrity()
    tier.close()


def test_a_failed_create_leaves_no_file(tmp_path: Path) -> None:
    tier = ready(open_tier(tmp_path, io := FailingIO()))
    io.fails = {"pwritev": errno.ENOSPC}
    for _ in range(3):
        with pytest.raises(DiskFull, match="can't be created"):
            tier.save(chain("a", 2))
    assert names_in(tmp_path) == []
    tier.close()


@pytest.mark.parametrize("name", [f"00000-{2 * LENGTH}.seg", f"70000-{LENGTH}.seg", "notes.txt"])
def test_files_that_can_t_be_ours_are_counted_and_left_alone(tmp_path: Path, name: str) -> None:
    tier = open_tier(tmp_path)
    entries = tier.save(chain("a", 2))
    tier.close()
    (tmp_path / "segments" / name).write_bytes(bytes(1 << 16))
    tier = ready(open_tier(tmp_path))
    assert tier.statistics().counters["foreign_files"] == 1
    assert read(tier, entries) == [payload_of(entry.identity) for entry in entries]
    assert (tmp_path / "segments" / name).stat().st_size == 1 << 16
    tier.close()


def test_a_segment_that_may_not_be_opened_stops_the_tier_and_loses_nothing(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    entries = tier.save(chain("a", 2))
    tier.close()
    io = FailingIO()
    io.fails, io.only = {"open": errno.EMFILE}, ".seg"
    with pytest.raises(DiskUnusable, match="Too many open files"):
        open_tier(tmp_path, io)
    tier = ready(open_tier(tmp_path))
    assert read(tier, entries) == [payload_of(entry.identity) for entry in entries]
    tier.close()


def test_shortage_counts_what_must_go_and_knows_when_nothing_helps(tmp_path: Path) -> None:
    io = DurableIO()
    io.free = (1000 * SLOT, 1000 * SLOT)
    tier = ready(open_tier(tmp_path, io, floor=0.1))
    tier.save(chain("a", 10))
    assert tier.shortage(LENGTH, 5) == 0
    io.free = (103 * SLOT, 1000 * SLOT)  # three above the floor
    assert tier.shortage(LENGTH, 5) == 2
    io.free = (95 * SLOT, 1000 * SLOT)  # five below it
    assert tier.shortage(LENGTH, 5) == 10
    io.free = (90 * SLOT, 1000 * SLOT)  # as many as there are
    assert tier.shortage(LENGTH, 5) is None
    tier.close()


def test_a_directory_that_was_replaced_is_told_apart(tmp_path: Path) -> None:
    home = tmp_path / "store"
    tier = ready(open_tier(home))
    tier.save(chain("a", 2))
    home.rename(tmp_path / "elsewhere")
    assert "is gone" in str(tier.place.gone())
    home.mkdir()
    with pytest.raises(DiskGone, match="another directory"):
        tier.sync()
    tier.close(clean=False)
    assert tier.lookup_run([chain("a", 1)[0].identity]) == []
    assert not tier.can_tell


def test_a_save_whose_segment_goes_away_in_between_is_no_save(tmp_path: Path) -> None:
    tier = ready(open_tier(tmp_path, io := FailingIO()))
    tier.save(chain("warm", 1))
    io.after = lambda: (tmp_path / "segments" / f"00000-{LENGTH}.seg").unlink(missing_ok=True)
    with pytest.raises(DiskFault, match="removed under us"):
        tier.save(chain("a", 2))
    io.after = lambda: None
    assert tier.lookup(chain("a", 1)[0].identity) is None
    tier.sync()
    tier.check_integrity()
    tier.close()
