"""The disk tier dies at every single step of its IO, whole or half done, by a kill or with the power; then it is
opened again, and what it says must be true.
"""

import contextlib
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import services.store.disk.index_place
from ops.doctor.index import read_index
from services.store.disk.index import DiskIndex, Entry
from services.store.disk.tier import DiskTier
from shared.fileio import FileIO
from shared.scope import of_root
from tests.disk_kit import LENGTH, NO_PARENT, ROOT, chain, fetch, name, open_tier, payload_of, recover
from tests.durable_io import Died, DurableIO

OTHER = b"s" * 32
OLD = chain("old", 6)
DOOMED = chain("doomed", 4)
CLEARED = chain("cleared", 3, root=OTHER)
NEW = chain("new", 7)


def save(tier: DiskTier) -> None:
    tier.save(NEW)


def delete(tier: DiskTier) -> None:
    tier.delete([block.identity for block in DOOMED])


def clear(tier: DiskTier) -> None:
    tier.clear(of_root(OTHER))


def clear_all(tier: DiskTier) -> None:
    tier.clear()


def touch(tier: DiskTier) -> None:
    tier.touch({block.identity: 9 for block in OLD})
    tier.sync()


def note(tier: DiskTier) -> None:
    tier.put_meta({"epoch": b"2"})


def close(tier: DiskTier) -> None:
    tier.close()


def finish_recovery(tier: DiskTier) -> None:
    recover(tier)


ACTIONS = [save, delete, clear, clear_all, touch, note, close, finish_recovery]


def prepared(directory: Path, io: DurableIO) -> DiskTier:
    tier = open_tier(directory, io)
    tier.save(OLD)
    tier.save(DOOMED)
    tier.save(CLEARED)
    tier.put_meta({"epoch": b"1"})
    return tier


def steps_of(directory: Path, action: Callable[[DiskTier], None]) -> tuple[int, int]:
    """Numbers of the first step of the action, and of the last."""
    io = DurableIO()
    tier = prepared(directory, io)
    before = len(io.steps)
    action(tier)
    after = len(io.steps)
    tier.close(clean=False)
    return before + 1, after


def check(directory: Path, action: Callable[[DiskTier], None], *, power_lost: bool) -> None:
    """What must hold after any death in `action`."""
    tier = open_tier(directory)
    assert power_lost or tier.reason == "", "a kill is no reason to begin the index anew"
    told = set(recover(tier)["identity"].tolist())
    tier.check_integrity()  # each index row has its footer, each used slot its row: nothing dangles, no orphans
    found = {}
    for block in OLD + DOOMED + CLEARED + NEW:
        got = fetch(tier, block.identity)
        assert got in (None, payload_of(block.identity))
        found[block.identity] = got is not None
    readable = {identity for identity, there in found.items() if there}
    assert readable <= told if power_lost else readable == told  # a footer may have reached the device, its bytes not
    if action is not clear_all:
        assert all(found[block.identity] for block in OLD)
        if action is not delete:
            assert all(found[block.identity] for block in DOOMED)
        if action is not clear:
            assert all(found[block.identity] for block in CLEARED)
    assert tier.get_meta("epoch") in ((b"1", b"2") if action is note else (b"1",))
    tier.save(NEW)
    assert [fetch(tier, block.identity) for block in NEW] == [payload_of(block.identity) for block in NEW]
    tier.check_integrity()
    tier.close()


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("end", ["killed", "killed in mid-step", "power lost"])
def test_p18_dying_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: Callable[[DiskTier], None], end: str
) -> None:
    first, last = steps_of(tmp_path / "count", action)
    assert last >= first, "an action without steps proves nothing"
    for step in range(first, last + 1):
        directory = tmp_path / str(step)
        io = DurableIO(die_at=step, torn=end != "killed")
        tier = prepared(directory, io)
        with pytest.raises(Died):
            action(tier)
        io.dead = False  # the kernel closes the files of a dead process
        tier.close(clean=False)
        tier._index.close(clean=False)  # of one that died in its own close
        with monkeypatch.context() as patch:
            if end == "power lost":
                io.lose_power(random.Random(step))
                patch.setattr(services.store.disk.index_place, "boot_id", lambda: "the next boot")
            check(directory, action, power_lost=end == "power lost")


@pytest.mark.parametrize("torn", [False, True])
def test_dying_at_every_step_of_the_first_open(tmp_path: Path, torn: bool) -> None:
    io = DurableIO()
    open_tier(tmp_path / "count", io).close(clean=False)
    for step in range(1, len(io.steps) + 1):
        with pytest.raises(Died):
            open_tier(tmp_path / str(step), DurableIO(die_at=step, torn=torn))
        tier = open_tier(tmp_path / str(step))
        tier.save(NEW)
        recover(tier)
        tier.check_integrity()
        tier.close()


def die_in_rebuild(directory: Path, io: DurableIO) -> None:
    tier = open_tier(directory, io)
    try:
        recover(tier)
    finally:
        io.dead = False
        tier.close(clean=False)


@pytest.mark.parametrize("torn", [False, True])
def test_dying_at_every_step_of_a_rebuild(tmp_path: Path, torn: bool) -> None:
    def damaged(directory: Path) -> None:
        prepared(directory, DurableIO()).close()
        (directory / "index" / "data.mdb").write_bytes(b"no index" * 2000)

    damaged(tmp_path / "count")
    io = DurableIO()
    tier = open_tier(tmp_path / "count", io)
    assert len(recover(tier)) == 13
    tier.close(clean=False)
    for step in range(1, len(io.steps) + 1):
        directory = tmp_path / str(step)
        damaged(directory)
        dying = DurableIO(die_at=step, torn=torn)
        with pytest.raises(Died):
            die_in_rebuild(directory, dying)
        tier = open_tier(directory)
        recover(tier)
        assert [fetch(tier, b.identity) is not None for b in OLD + DOOMED + CLEARED] == [True] * 13
        tier.check_integrity()
        tier.close()


ROWS = [Entry(name(f"row {n}"), NO_PARENT, ROOT, n, LENGTH, n, n, n) for n in range(600)]


def fill_the_index(index: DiskIndex) -> None:
    """Past its first map, and then some."""
    for start in range(0, len(ROWS), 150):
        index.apply(ROWS[start : start + 150])


def free_its_last_pages(index: DiskIndex) -> None:
    """Pages that are written over and given back in one transaction: LMDB writes none of them."""
    index.apply(deletes=[row.identity for row in ROWS])


@pytest.mark.parametrize("before", [[], [fill_the_index]])
@pytest.mark.parametrize("action", [fill_the_index, free_its_last_pages])
def test_dying_at_every_step_of_an_index_leaves_one_that_is_trusted(
    tmp_path: Path, before: list[Callable[[DiskIndex], None]], action: Callable[[DiskIndex], None]
) -> None:
    """By the doctor, and by the next start; also in the moment right after each commit."""

    def die(directory: Path, io: DurableIO) -> int:
        index = DiskIndex(directory, io=io, map_bytes=64 << 10)
        for do in before:
            do(index)
        first = len(io.steps) + 1
        try:
            action(index)
        finally:
            io.dead = False
            index.close(clean=False)
        return first

    counting = DurableIO()
    first = die(tmp_path / "count", counting)
    assert "index transaction" in counting.steps[first - 1 :]
    for step in range(first, len(counting.steps) + 2):
        directory = tmp_path / str(step)
        with contextlib.suppress(Died):
            die(directory, DurableIO(die_at=step))
        seen = read_index(directory)
        assert (seen.trouble, seen.damaged, seen.unfinished) == ("", 0, False)
        index = DiskIndex(directory, io=FileIO())
        assert index.reason is None
        assert index.count() == len(seen.entries)
        index.close()


def test_a_cleared_root_stays_cleared_when_the_rebuild_was_cut_short(tmp_path: Path) -> None:
    prepared(tmp_path, DurableIO()).close()
    (tmp_path / "index" / "data.mdb").write_bytes(b"")
    tier = open_tier(tmp_path)
    assert tier.statistics().state == "rebuilding"
    assert tier.clear(of_root(OTHER))[0] == 3
    tier.close(clean=False)
    tier = open_tier(tmp_path)
    told = set(recover(tier)["root"].tolist())
    assert told == {ROOT}
    assert tier.lookup(name("cleared/0")) is None
    tier.close()


HOOKS = ["store_before_data", "store_after_data", "store_commit_index", "store_after_index", "store_in_delete"]


@pytest.mark.parametrize("hook", HOOKS)
def test_p18_a_process_killed_at_a_hook_leaves_nothing_dangling(tmp_path: Path, hook: str) -> None:
    prepared(tmp_path, DurableIO()).close()
    program = f"""
from pathlib import Path
from shared.config import FaultsConfig
from shared.faults import Faults
from tests.disk_kit import open_tier
from tests.unit.test_disk_crash_points import DOOMED, NEW
tier = open_tier(Path({str(tmp_path)!r}), faults=Faults(FaultsConfig(hooks={{{hook!r}: "exit"}})))
tier.save(NEW)
tier.delete([block.identity for block in DOOMED])
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert done.returncode == -9
    check(tmp_path, delete if hook == "store_in_delete" else save, power_lost=False)


def test_p18_kill_9_in_mid_traffic_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from tests.disk_kit import chain, open_tier
tier = open_tier(Path({str(tmp_path)!r}), capacity=64 << 20)
number = 0
while True:
    tier.save(chain(str(number), 5))
    if number % 3 == 2:
        tier.delete([block.identity for block in chain(str(number - 2), 5)])
    print(number, flush=True)
    number += 1
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) == 60:
                break
        child.kill()
        last = max([60, *(int(line) for line in child.stdout if line.endswith("\n"))])
    tier = open_tier(tmp_path, capacity=64 << 20)
    recover(tier)
    tier.check_integrity()
    for number in range(last + 1):
        expected = number % 3 != 0 or number + 2 > last
        if expected and number % 3 == 0:
            continue  # the delete of it may have been under way
        for block in chain(str(number), 5):
            assert fetch(tier, block.identity) == (payload_of(block.identity) if expected else None)
    tier.close()
