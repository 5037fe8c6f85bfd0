"""A disk that fails in every way under a running store: misses, one loud line, a reason; then it goes on by itself."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio

from services.store import disk_lane, opening
from services.store.actor import Store
from services.store.catalog.integrity import check_integrity
from services.store.disk.footer import FORMAT, Superblock, pack_superblock
from services.store.disk.tier import DiskTier
from shared.config import FaultsConfig
from shared.paths import Places
from shared.testing import running
from tests.disk_kit import used_bytes
from tests.failing_io import CrowdedIO, FailingIO, disk_usage
from tests.service.store_kit import MIB, SLOT, Engine, config, engine, names, root_of, store

ROOT = root_of("model")
DISK_SLOT = 2 * 4096 + 4096
"""Payload in whole pages, and its footer."""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that rests and syncs often: many tries in a short test."""
    monkeypatch.setattr(disk_lane, "REST_S", 0.01)
    monkeypatch.setattr(disk_lane, "SYNC_S", 0.01)
    monkeypatch.setattr(disk_lane, "FORGOTTEN_AT_ONCE", 2)


@contextmanager
def disk_of(io: FailingIO, **options: Any) -> Iterator[None]:
    """Stores that start meanwhile have this disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "DiskTier", partial(DiskTier, io=io, **options))
        yield


def warnings_in(logs: list[Any]) -> list[str]:
    """Warnings about the disk tier, as reasons."""
    return [line["reason"] for line in logs if line["log_level"] == "warning" and line["event"] == "disk_tier_trouble"]


def segments(places: Places) -> list[Path]:
    return sorted((places.store / "segments").iterdir())


async def check(actor: Store, one: Engine) -> None:
    """Index rows and valid footers are the same blocks, and the catalogue agrees with itself."""
    await one.until(lambda facts: facts["pinned"] == 0)
    assert actor.lane.disk is not None
    assert actor.opened.catalog is not None
    actor.lane.disk.check_integrity()
    check_integrity(actor.opened.catalog)


async def on_disk(one: Engine, chain: list[bytes]) -> None:
    await one.save(ROOT, chain)
    await one.all_on_disk()


async def kept_on_disk(places: Places, chain: list[bytes], **options: Any) -> None:
    """A stopped store whose disk holds `chain`, and whose arena is gone."""
    with disk_of(FailingIO(), **options):
        async with store(places, config(disk_bytes=16 * MIB)) as one:
            await on_disk(one, chain)
    places.arena().unlink()


async def till_troubled(one: Engine, times: int = 3) -> dict[str, Any]:
    """The disk's facts once it has failed a few times in a row."""
    disk: dict[str, Any] = (
        await one.until(lambda facts: sum(facts["tiers"]["disk"][name] for name in ("full", "failures")) >= times)
    )["tiers"]["disk"]
    return disk


# --- writes that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "code", "state"),
    [
        ("pwritev", errno.ENOSPC, "full"),
        ("pwritev", errno.EIO, "failing"),
        ("pwritev", errno.EROFS, "failing"),
        ("create", errno.EACCES, "failing"),
        ("create", errno.ENOSPC, "full"),
        ("fdatasync", errno.EIO, "failing"),
        ("index transaction", errno.EIO, "failing"),
        ("index sync", errno.EIO, "failing"),
    ],
)
async def test_p05_a_disk_that_refuses_costs_nothing_but_its_hits_and_is_used_again_when_it_recovers(
    places: Places, call: str, code: int, state: str
) -> None:
    chain, io = names(ROOT, 12), FailingIO()
    with disk_of(io), structlog.testing.capture_logs() as logs:
        async with running(Store, places, config()) as actor, engine(places) as one:
            io.fails = {call: code}
            await one.save(ROOT, chain)
            disk = await till_troubled(one)
            assert await one.load(chain) == (12, 0)
            assert disk["state"] == state
            assert os.strerror(code) in disk["reason"]
            assert os.strerror(code) in (await one.facts())["note"]
            assert [os.strerror(code) in reason for reason in warnings_in(logs)] == [True]
            assert not segments(places) or call not in ("create",)
            io.fails = {}
            await one.all_on_disk()
            facts = await one.until(lambda facts: facts["tiers"]["disk"]["state"] == "ready")
            assert facts["tiers"]["disk"]["used"] == facts["tiers"]["disk"]["held"] == 12
            await check(actor, one)
        assert not [path for path in segments(places) if not path.stat().st_size]
        places.arena().unlink()
        async with store(places, incarnation=2) as one:
            assert await one.load(chain) == (0, 12)
            assert len(warnings_in(logs)) == 1


async def test_p05_a_disk_filled_by_others_keeps_what_it_has_and_saves_again_when_there_is_room(
    places: Places,
) -> None:
    old, new = names(ROOT, 20), names(ROOT, 20, prompt=1)
    io = CrowdedIO(places.store, 8 * MIB)
    with disk_of(io), structlog.testing.capture_logs() as logs:
        async with running(Store, places, config()) as actor, engine(places) as one:
            await on_disk(one, old)
            io.others = 8 * MIB - io.used()
            await one.save(ROOT, new)
            disk = await till_troubled(one)
            assert disk["state"] == "full"
            assert disk["held"] == 20  # giving up all of it would not have brought the space back
            assert await one.load(new) == (20, 0)
            assert len(warnings_in(logs)) == 1
            io.others = 0
            await one.all_on_disk()
            await check(actor, one)
        places.arena().unlink()
        async with store(places, incarnation=2) as one:
            assert [await one.load(chain) for chain in (old, new)] == [(0, 20), (0, 20)]


@pytest.fixture
def small_disk(places: Places) -> Iterator[Path]:
    """The store's directory is a file system of 8 MB of its own."""
    if os.getuid() != 0:
        pytest.skip("only root may mount a tmpfs")
    places.store.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(places.store)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs can't be mounted here: {mounted.stderr.strip()}")
    yield places.store
    subprocess.run(["umount", "-l", str(places.store)], check=True)


def fill_up(path: Path) -> None:
    """Until the file system takes no more."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass


async def test_p05_a_real_file_system_of_8_mb_that_is_full_and_is_emptied_again(
    places: Places, small_disk: Path
) -> None:
    old, ballast = names(ROOT, 20), small_disk / "ballast"
    prompts = [names(ROOT, 10, prompt=i) for i in range(1, 5)]
    async with running(Store, places, config()) as actor, engine(places) as one:
        await on_disk(one, old)
        fill_up(ballast)
        for chain in prompts:
            await one.save(ROOT, chain)
            assert await one.load(chain) == (10, 0)
        disk = await till_troubled(one)
        assert disk["state"] == "full"
        assert "disk tier full" in (await one.facts())["note"]
        ballast.unlink()
        await one.all_on_disk()
        await one.until(lambda facts: facts["tiers"]["disk"]["state"] == "ready")
        await check(actor, one)
        held = (await one.facts())["tiers"]["disk"]["held"]
    assert not [path for path in segments(places) if not path.stat().st_size]
    places.arena().unlink()
    async with store(places, incarnation=2) as one:
        assert sum([sum(await one.load(chain)) for chain in [old, *prompts]]) == held >= 40


async def test_p08_what_the_tier_takes_of_the_disk_stays_within_its_cap_at_every_step(places: Places) -> None:
    cap = 2 * MIB
    io, taken = FailingIO(), []
    io.after = lambda: taken.append(disk_usage(places.store))
    with disk_of(io):
        async with running(Store, places, config(disk_bytes=cap)) as actor, engine(places) as one:
            for prompt in range(3 * cap // (20 * DISK_SLOT)):
                await one.save(ROOT, names(ROOT, 20, prompt=prompt))
                await one.until(lambda facts: facts["tiers"]["disk"]["queued"] == 0)
            facts = await one.facts()
            assert facts["tiers"]["disk"]["evictions"] > 100
            assert cap // 2 < max(taken) <= cap + DISK_SLOT
            await check(actor, one)
        places.arena().unlink()
        async with running(Store, places, config(disk_bytes=cap // 2), incarnation=2) as actor, engine(places) as one:
            await one.until(lambda facts: facts["tiers"]["disk"]["evictions"] > 0)
            assert actor.lane.disk is not None
            while actor.lane.disk.excess():
                await one.facts()
            assert disk_usage(places.store) <= cap // 2 + DISK_SLOT  # lowered caps hold, with nothing to write
            await check(actor, one)


async def test_p14_an_index_that_starts_at_its_smallest_grows_and_no_request_fails(places: Places) -> None:
    prompts = [names(ROOT, 100, prompt=number) for number in range(30)]
    with disk_of(FailingIO(), map_bytes=64 << 10):
        async with running(Store, places, config(host_bytes=2 * MIB)) as actor, engine(places) as one:
            for chain in prompts:
                await on_disk(one, chain)
                assert await one.load(chain) == (100, 0)
            assert (await one.facts())["tiers"]["disk"]["held"] == 3000
            assert sum(await one.load(prompts[0])) == 100
            await check(actor, one)


# --- slow -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "index transaction", "index sync", "create", "unlink"])
async def test_f08_loads_from_disk_and_answers_never_wait_behind_a_write(places: Places, call: str) -> None:
    chain, others, foreign = names(ROOT, 8), [names(ROOT, 6, prompt=i) for i in range(1, 9)], root_of("other")
    eight = {"segment_bytes": 8 * DISK_SLOT + 4096}
    await kept_on_disk(places, chain, **eight)
    io, settings = FailingIO(), config(disk_bytes=16 * MIB)
    with disk_of(io, **eight):
        async with running(Store, places, settings, incarnation=2) as actor, engine(places) as one:
            if call == "unlink":
                await one.save(foreign, names(foreign, 3))  # in a segment of their own, which a clear empties
                await one.all_on_disk()
            try:
                async with trio.open_nursery() as nursery:
                    io.holds = {call}
                    if call == "unlink":
                        nursery.start_soon(one.clear, foreign)
                    for written in others if call != "unlink" else []:
                        await one.save(ROOT, written)
                    assert await trio.to_thread.run_sync(io.held.wait, 20)
                    for _ in range(3):
                        await one.facts()
                    assert await one.load(chain) == (0, 8)
                    io.go_on.set()
            finally:
                io.go_on.set()
            await one.all_on_disk()
            await check(actor, one)


# --- damage -----------------------------------------------------------------------------------------------------------


async def test_p01_a_segment_removed_under_a_running_store_is_one_warning_and_its_blocks_are_written_again(
    places: Places,
) -> None:
    lost, held = names(ROOT, 6), names(ROOT, 6, prompt=1)
    with disk_of(FailingIO()), structlog.testing.capture_logs() as logs:
        settings = config(faults=FaultsConfig(max_host_blocks=8))
        async with running(Store, places, settings) as actor, engine(places) as one:
            await on_disk(one, lost)
            await on_disk(one, held)  # its six push all but two of the others out of the host tier
            segments(places)[0].unlink()
            facts = await one.until(lambda facts: facts["tiers"]["disk"]["counters"].get("lost_blocks"))
            assert facts["tiers"]["disk"]["counters"]["lost_blocks"] == 12
            assert "removed under us" in facts["note"]
            assert sum(await one.load(held)) == 6
            assert sum(await one.load(lost)) < 6
            await one.all_on_disk()
            await on_disk(one, lost)
            assert sum(await one.load(lost)) == 6
            assert len(warnings_in(logs)) == 1
            await check(actor, one)
        places.arena().unlink()
        async with store(places, settings, incarnation=2) as one:
            assert await one.load(lost) == (0, 6)
            assert await one.load(held) == (0, 6)


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes((byte ^ 0x10,)))


def _swap(path: Path, one: int, two: int) -> None:
    with path.open("r+b") as file:
        held = []
        for at in (one, two):
            file.seek(at)
            held.append(file.read(DISK_SLOT))
        for at, other in zip((two, one), held, strict=True):
            file.seek(at)
            file.write(other)


@pytest.mark.parametrize("how", ["payload", "footer", "swapped", "read error"])
async def test_p03_damaged_blocks_are_misses_with_a_counter_and_one_warning_and_are_dropped(
    places: Places, how: str
) -> None:
    chain, io = names(ROOT, 8), FailingIO()
    await kept_on_disk(places, chain)
    (path,) = segments(places)
    if how == "swapped":
        _swap(path, 4096 + 5 * DISK_SLOT, 4096 + 6 * DISK_SLOT)
    elif how != "read error":
        _flip(path, 4096 + 5 * DISK_SLOT + {"payload": SLOT // 2, "footer": 2 * 4096 + 50}[how])
    with disk_of(io), structlog.testing.capture_logs() as logs:
        async with running(Store, places, config(), incarnation=2) as actor, engine(places) as one:
            io.fails = {"preadv": errno.EIO} if how == "read error" else {}
            assert await one.load(chain) == (0, {"swapped": 6, "read error": 0}.get(how, 7))
            io.fails = {}
            counters = (await one.facts())["tiers"]["disk"]["counters"]
            name = {"payload": "checksum_mismatches", "read error": "read_errors"}.get(how, "footer_mismatches")
            assert counters[name] > 0
            assert counters["load_misses"] == {"swapped": 2, "read error": 8}.get(how, 1)
            facts = await one.until(lambda facts: facts["tiers"]["disk"]["counters"].get("deleted_blocks", 0) > 0)
            assert facts["tiers"]["disk"]["used"] == facts["tiers"]["disk"]["held"]
            assert "could not be read back" in facts["note"]
            await one.until(lambda _: len(warnings_in(logs)) == 1)
            assert await one.load(chain) == (0 if how == "read error" else 5, 0)
            await on_disk(one, chain)  # computed again, saved again
            await check(actor, one)
        places.arena().unlink()
        async with store(places, incarnation=3) as one:
            assert await one.load(chain) == (0, 8)


@pytest.mark.parametrize("running_then", [False, True])
@pytest.mark.parametrize("size", ["0", "1", "half", "-1", "+1"])
async def test_p04_a_segment_of_another_length_is_misses_and_never_wrong_bytes(
    places: Places, size: str, running_then: bool
) -> None:
    chain = names(ROOT, 8)
    slots = 8 * DISK_SLOT + 4096
    settings = config(disk_bytes=16 * MIB)
    with disk_of(FailingIO(), segment_bytes=slots):
        async with store(places, settings) as one:
            await on_disk(one, chain)
        places.arena().unlink()
        (path,) = segments(places)
        assert path.stat().st_size == slots
        cut = {"0": 0, "1": 1, "half": slots // 2, "-1": slots - 1, "+1": slots + 1}[size]
        # A cut inside the padding of a footer takes zeros away; a file opened later has them again.
        expected = {"0": 0, "1": 0, "half": 3 if running_then else 4, "-1": 7 if running_then else 8, "+1": 8}[size]
        if not running_then:
            os.truncate(path, cut)
        async with running(Store, places, settings, incarnation=2) as actor, engine(places) as one:
            if running_then:
                os.truncate(path, cut)
            assert sum(await one.load(chain)) == expected
            await one.until(lambda facts: facts["tiers"]["disk"]["used"] == facts["tiers"]["disk"]["held"])
            await on_disk(one, chain)
            assert sum(await one.load(chain)) == 8
            await check(actor, one)


# --- places -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["store", "segments", "index", "store is a file"])
async def test_p20_whatever_is_removed_under_a_running_store_it_goes_on_and_saves_again(
    places: Places, what: str
) -> None:
    chain, more = names(ROOT, 6), names(ROOT, 6, prompt=1)
    with disk_of(FailingIO()), structlog.testing.capture_logs() as logs:
        async with running(Store, places, config()) as actor, engine(places) as one:
            await on_disk(one, chain)
            path = places.store / what if what in ("segments", "index") else places.store
            path.rename(path.with_name("elsewhere"))
            if what == "store is a file":
                places.store.write_bytes(b"in the way")
                await one.until(lambda facts: "File exists" in facts["note"])
                assert await one.load(chain) == (6, 0)
                places.store.unlink()
            await one.save(ROOT, more)
            await one.until(lambda _: warnings_in(logs))  # a file that was moved can be written for a while yet
            await one.until(
                lambda facts: (
                    facts["tiers"]["disk"]["state"] == "ready"
                    and facts["tiers"]["disk"]["held"] == facts["tiers"]["disk"]["used"] == 12
                )
            )
            assert await one.load(chain) == (6, 0)
            assert 1 <= len(warnings_in(logs)) <= 2  # why it went, and why it can't come back yet
            await check(actor, one)
        places.arena().unlink()
        async with store(places, incarnation=2) as one:
            await one.until(lambda facts: facts["tiers"]["disk"]["held"] == 12)  # an index may be rebuilt meanwhile
            assert [await one.load(each) for each in (chain, more)] == [(0, 6), (0, 6)]


@pytest.mark.parametrize("how", ["a segment of a newer format", "a segment of an older format", "EACCES"])
async def test_p20_a_disk_that_is_not_ours_to_use_is_left_as_it_is_and_used_when_it_is_ours_again(
    places: Places, how: str
) -> None:
    chain, more, io = names(ROOT, 6), names(ROOT, 6, prompt=1), FailingIO()
    await kept_on_disk(places, chain)
    (path,) = segments(places)
    first = path.read_bytes()[:4096]
    if how == "EACCES":
        io.fails, io.only = {"open": errno.EACCES}, ".seg"
    else:
        other = FORMAT + 1 if "newer" in how else FORMAT - 1
        slots = (path.stat().st_size - 4096) // DISK_SLOT
        with path.open("r+b") as file:
            file.write(pack_superblock(Superblock(other, 0, DISK_SLOT - 4096, slots)))
    with disk_of(io), structlog.testing.capture_logs() as logs:
        async with running(Store, places, config(), incarnation=2) as actor, engine(places) as one:
            await one.save(ROOT, more)
            assert await one.load(more) == (6, 0)
            assert await one.load(chain) == (0, 0)
            facts = await one.facts()
            assert facts["tiers"]["disk"]["state"] == "unusable"
            assert ("Permission denied" if how == "EACCES" else f"format {other}") in facts["note"]
            for _ in range(3):  # it is tried again and again
                before = io.calls["open"]
                await one.until(lambda _, before=before: io.calls["open"] > before)
            assert len(warnings_in(logs)) == 1
            with path.open("r+b") as file:
                file.write(first)
            io.fails = {}
            await one.all_on_disk()
            assert await one.load(chain) == (0, 6)
            await check(actor, one)


async def test_w14_what_is_cleared_while_the_disk_is_away_does_not_come_back(places: Places) -> None:
    chain, io = names(ROOT, 6), FailingIO()
    await kept_on_disk(places, chain)
    io.fails, io.only = {"open": errno.EACCES}, ".seg"
    with disk_of(io):
        async with store(places, incarnation=2) as one:
            with pytest.raises(Exception, match=r"could not be cleared.*Permission denied"):
                await one.clear()
            io.fails = {}
            await one.until(lambda facts: facts["tiers"]["disk"]["state"] == "ready")
            assert (await one.clear()).blocks == {"host": 0, "disk": 6}
            assert await one.load(chain) == (0, 0)
            assert not segments(places)  # and no empty file is left behind


# --- the index --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["truncated", "random", "half", "a flipped meta page", "another format", "gone"])
async def test_a_damaged_index_is_rebuilt_while_the_store_serves_and_says_how_far_it_is(
    places: Places, how: str
) -> None:
    chain, more = names(ROOT, 20), names(ROOT, 5, prompt=1)
    await kept_on_disk(places, chain)
    data = places.store / "index" / "data.mdb"
    size = used_bytes(data)
    if how in ("truncated", "half"):
        os.truncate(data, 100 if how == "truncated" else size // 2)
    elif how == "random":
        data.write_bytes(os.urandom(size))
    elif how == "a flipped meta page":
        _flip(data, 17)
        _flip(data, 4096 + 17)
    elif how == "another format":
        (places.store / "index" / "opening").write_text("7")  # as of a start that died while it opened it
    else:
        shutil.rmtree(data.parent)
    io = FailingIO()
    io.holds = {"preadv"}
    with disk_of(io), structlog.testing.capture_logs() as logs:
        io.go_on.set()  # superblocks
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk_lane, "REBUILD_BLOCKS", 4)
            async with running(Store, places, config(), incarnation=2) as actor, engine(places) as one:
                assert actor.lane.disk is not None
                io.go_on.clear()
                facts = await one.until(lambda facts: facts["tiers"]["disk"]["state"] == "rebuilding")
                assert 0 < facts["tiers"]["disk"]["unclaimed"] <= 20
                assert facts["note"].startswith("disk tier rebuilding")
                await one.save(ROOT, more)
                assert await one.load(more) == (5, 0)
                io.go_on.set()
                facts = await one.until(lambda facts: facts["tiers"]["disk"]["state"] == "ready")
                assert facts["tiers"]["disk"]["counters"]["rebuilt_entries"] == 20
                assert await one.load(chain) == (0, 20)
                await one.all_on_disk()
                assert len(warnings_in(logs)) == (how != "gone")
                await check(actor, one)
