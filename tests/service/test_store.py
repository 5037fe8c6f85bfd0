import os
import random
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import structlog.testing
import trio

from services.store import arena_watch
from services.store.actor import Store
from services.store.catalog.integrity import check_integrity
from services.store.disk.errors import IndexDamaged
from shared.config import FaultsConfig
from shared.messages.base import pack_u32, unpack_u32, unpack_u64
from shared.messages.store import (
    COMMIT_DONE,
    COMMIT_STALE,
    RESERVE_FULL,
    RESERVE_GRANTED,
    RESERVE_HAVE,
    RESERVE_NO_PARENT,
    RESERVE_STALE,
    TIER_DISK,
    Abandon,
    Clear,
    Cleared,
    Commit,
    Committed,
    Lookup,
    Release,
    Reserve,
    Reserved,
)
from shared.paths import Places
from shared.peers import RequestFailed
from shared.scope import Scope
from shared.testing import dialled, running
from tests.service.store_kit import MIB, SLOT, Engine, config, engine, names, payload, root_of, store

ROOT = root_of("model")


class Hold(threading.Event):
    """Set it to let the disk go on; `begun` is set by the first call that waits."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()


@contextmanager
def held_up(actor: Store, method: str) -> Iterator[Hold]:
    """The disk tier's `save` or `load` does not begin until it is let go: a slow disk, without a clock."""
    tier, hold = actor.lane.disk, Hold()
    assert tier is not None
    real = getattr(tier, method)

    def slow(*args: Any) -> Any:
        hold.begun.set()
        hold.wait()
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier, method, slow)
        try:
            yield hold
        finally:
            hold.set()


async def only_on_disk(places: Places, chain: list[bytes]) -> None:
    """A stopped store whose disk holds `chain`, and whose arena is gone."""
    async with store(places) as one:
        await one.save(ROOT, chain)
        await one.all_on_disk()
    places.arena().unlink()


async def test_saves_and_serves_a_chain_with_its_very_bytes(places: Places) -> None:
    chain = names(ROOT, 12)
    async with store(places) as one:
        reserved = await one.save(ROOT, chain)
        assert reserved.status == bytes([RESERVE_GRANTED]) * 12
        assert await one.load(chain) == (12, 0)
        assert (await one.reserve(ROOT, chain)).status == bytes([RESERVE_HAVE]) * 12
        longer = names(ROOT, 20)
        assert longer[:12] == chain
        assert await one.load(longer) == (12, 0)
        assert await one.load(names(ROOT, 3, prompt=1)) == (0, 0)
        facts = await one.facts()
        assert facts["leases"] == 0
        assert facts["tiers"]["host"]["hits"] == 24


async def test_w21_nothing_is_visible_before_its_commit(places: Places) -> None:
    chain = names(ROOT, 3)
    async with store(places) as one, engine(places, "e1") as other:
        reserved = await one.reserve(ROOT, chain)
        assert await other.load(chain) == (0, 0)
        assert (await other.reserve(ROOT, chain)).status == bytes([RESERVE_HAVE]) * 3
        sums = [one.write(offset, name) for offset, name in zip(unpack_u64(reserved.offsets), chain, strict=True)]
        assert await other.load(chain) == (0, 0)
        await one.commit(reserved, sums)
        assert await other.load(chain) == (3, 0)


async def test_w10_w12_w13_roots_never_mix_on_any_tier(places: Places) -> None:
    salted, plain, dtype = root_of("model", b"a"), ROOT, root_of("model-bf16")
    roots = (salted, plain, dtype)

    async def only_salted_hits(one: Engine, expected: tuple[int, int]) -> None:
        assert await one.load(names(plain, 4)) == (0, 0)
        assert await one.load(names(dtype, 4)) == (0, 0)
        assert await one.load(names(salted, 4)) == expected

    assert len({name for each in roots for name in names(each, 4)}) == 12
    async with store(places) as one:
        await one.save(salted, names(salted, 4))
        await only_salted_hits(one, (4, 0))
        await one.all_on_disk()
    places.arena().unlink()
    async with store(places, incarnation=2) as one:
        await only_salted_hits(one, (0, 4))
        foreign = Reserve(identities=b"x" * 32, parents=names(salted, 4)[-1], root=plain, epoch=one.opened.epoch)
        assert (await one.ask(foreign, Reserved)).status == bytes([RESERVE_NO_PARENT])


async def test_p11_blocks_come_from_the_host_after_a_restart_and_from_disk_without_the_arena(places: Places) -> None:
    prompts = [names(ROOT, 6, prompt=i) for i in range(5)]
    async with store(places) as one:
        for chain in prompts:
            await one.save(ROOT, chain)
        key = one.opened.arena_key
    async with store(places, incarnation=2) as one:
        assert one.opened.arena_key == key
        for chain in prompts:
            assert await one.load(chain) == (6, 0)
    places.arena().unlink()
    async with store(places, incarnation=3) as one:
        assert one.opened.arena_key != key
        for chain in prompts:
            assert await one.load(chain) == (0, 6)
        for chain in prompts:
            assert await one.load(chain) == (6, 0)
        facts = await one.facts()
        assert facts["tiers"]["disk"]["staged"] == 30


async def test_threads_that_do_io_yield_and_the_loop_does_not(places: Places) -> None:
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    nice = min(own + 3, 19)
    async with store(places, config(host_bytes=256 << 10, nice=nice)) as one:
        for number in range(4):
            await one.save(ROOT, names(ROOT, 16, prompt=number))
            await one.all_on_disk()
        await one.load(names(ROOT, 16))
        facts = await one.facts()
        assert facts["tiers"]["disk"]["staged"] > 0
        assert facts["threads_by_nice"][str(nice)] >= 2  # one that writes, one that reads
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


async def test_p13_disk_serves_what_the_host_had_to_evict(places: Places) -> None:
    prompts = [names(ROOT, 8, prompt=i) for i in range(12)]
    async with store(places, config(host_bytes=256 << 10)) as one:
        for chain in prompts:
            await one.save(ROOT, chain)
            await one.all_on_disk()
        facts = await one.facts()
        assert facts["tiers"]["host"]["evictions"] >= 12 * 8 - facts["tiers"]["host"]["capacity"] > 0
        assert facts["tiers"]["host"]["losses"] == 0
        for chain in prompts:
            assert sum(await one.load(chain)) == 8
        facts = await one.facts()
        assert facts["tiers"]["disk"]["staged_bytes"] >= SLOT * (12 * 8 - facts["tiers"]["host"]["capacity"])


async def test_p10_the_host_tier_never_exceeds_its_size_and_a_larger_prompt_is_saved_as_far_as_it_goes(
    places: Places,
) -> None:
    cap, blocks = 4 * MIB, 10 * MIB // SLOT
    chain = names(ROOT, blocks)
    async with store(places, config(host_bytes=cap, disk_bytes=0)) as one:
        status = (await one.save(ROOT, chain)).status
        room = status.count(RESERVE_GRANTED)
        assert cap // 4 < room * SLOT < cap
        assert status == bytes([RESERVE_GRANTED]) * room + bytes([RESERVE_FULL]) + bytes([RESERVE_NO_PARENT]) * (
            blocks - room - 1
        )
        assert os.stat(one.opened.arena).st_size <= cap
        host = (await one.facts())["tiers"]["host"]
        assert host["used"] == host["capacity"] == room
        assert await one.load(chain) == (room, 0)
        again = names(ROOT, blocks, prompt=1)  # what is there gives way, leaf first, and the cap holds
        await one.save(ROOT, again)
        host = (await one.facts())["tiers"]["host"]
        assert host["used"] <= room
        assert os.stat(one.opened.arena).st_size <= cap
        assert sum(await one.load(again)) > 0


async def test_p06_two_engines_that_save_the_same_blocks_at_once_both_have_them_and_every_block_is_valid(
    places: Places,
) -> None:
    settings = config(host_bytes=2 * MIB, disk_bytes=0)
    async with running(Store, places, settings), engine(places, "e0") as one, engine(places, "e1") as two:
        for round_ in range(100):
            chain = names(ROOT, 50, prompt=round_)
            answers: list[Reserved] = []

            async def saves(by: Engine, chain: list[bytes] = chain, answers: list[Reserved] = answers) -> None:
                answers.append(await by.save(ROOT, chain))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(saves, one)
                nursery.start_soon(saves, two)
            for mine, other in zip(answers[0].status, answers[1].status, strict=True):
                assert {mine, other} == {RESERVE_GRANTED, RESERVE_HAVE}
            assert await one.load(chain) == await two.load(chain) == (50, 0)  # byte by byte
        facts = await one.facts()
        assert facts["leases"] == facts["tiers"]["host"]["granted"] == facts["tiers"]["host"]["quarantined"] == 0
        assert facts["tiers"]["host"]["memory"].keys() == {"huge_pages", "huge_bytes", "locked", "locked_bytes"}


async def test_a_host_tier_of_nothing_still_stages_through_a_small_arena(places: Places) -> None:
    chain = names(ROOT, 30)
    settings = config(host_bytes=0, faults=FaultsConfig(max_host_blocks=40))
    async with store(places, settings) as one:
        await one.save(ROOT, chain)
        await one.all_on_disk()
    places.arena().unlink()
    async with store(places, settings, incarnation=2) as one:
        assert await one.load(chain) == (0, 30)


async def test_without_any_tier_the_store_answers_misses(places: Places) -> None:
    async with store(places, config(host_bytes=0, disk_bytes=0)) as one:
        assert one.opened.arena == ""
        assert await one.load(names(ROOT, 3)) == (0, 0)
        assert (await one.reserve(ROOT, names(ROOT, 3))).status == bytes([RESERVE_FULL]) * 3
        assert (await one.clear()).blocks == {"host": 0, "disk": 0}
        assert (await one.facts())["note"] == "no KV is stored: both tiers are off"


async def test_a_prefix_larger_than_the_host_tier_is_served_whole_through_what_room_there_is(places: Places) -> None:
    chain = names(ROOT, 150)
    async with store(places, config(host_bytes=256 << 10)) as one:
        for end in range(10, 151, 10):
            await one.save(ROOT, chain[:end])
            await one.all_on_disk()
        facts = await one.facts()
        assert facts["tiers"]["disk"]["held"] == 150 > 4 * facts["tiers"]["host"]["capacity"]
        for _ in range(2):
            assert sum(await one.load(chain)) == 150
        facts = await one.facts()
        assert facts["no_room"] == 2
        assert facts["leases"] == facts["pinned"] == facts["tiers"]["host"]["staging"] == 0
        assert facts["tiers"]["host"]["losses"] == 0


async def test_two_such_prefixes_are_served_at_the_same_time(places: Places) -> None:
    chains = [names(ROOT, 100, prompt=prompt) for prompt in (1, 2)]
    async with running(Store, places, config(host_bytes=256 << 10)), engine(places) as one, engine(places, "e1") as two:
        for chain in chains:
            for end in range(10, 101, 10):
                await one.save(ROOT, chain[:end])
                await one.all_on_disk()
        results = []

        async def load(who: Engine, chain: list[bytes]) -> None:
            results.append(sum(await who.load(chain)))

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(load, one, chains[0])
                nursery.start_soon(load, two, chains[1])
        assert results == [100, 100]


async def test_f05_two_leases_that_want_the_same_blocks_share_one_read(places: Places) -> None:
    chain = names(ROOT, 10)
    await only_on_disk(places, chain)
    async with (
        running(Store, places, config(), incarnation=2) as actor,
        engine(places) as one,
        engine(places, "e1") as other,
    ):
        results = []

        async def load(who: Engine) -> None:
            results.append(await who.load(chain))

        with held_up(actor, "load") as let_go:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(load, one)
                nursery.start_soon(load, other)
                await one.until(lambda facts: facts["leases"] == 2)
                let_go.set()
        assert results == [(0, 10), (0, 10)]
        assert (await one.facts())["tiers"]["disk"]["staged"] == 10


async def test_w23_a_lease_released_during_its_read_gives_its_slots_back_only_after_the_read(places: Places) -> None:
    chain, others = names(ROOT, 4), names(ROOT, 40, prompt=1)
    await only_on_disk(places, chain)
    settings = config(faults=FaultsConfig(max_host_blocks=8))
    async with running(Store, places, settings, incarnation=2) as actor, engine(places) as one:
        with held_up(actor, "load") as let_go:
            found = await one.look_up(chain)
            assert found.tiers == bytes([TIER_DISK]) * 4
            await trio.to_thread.run_sync(let_go.begun.wait)
            one.peer.send(Release(lease=found.lease))
            reserved = await one.reserve(ROOT, others)
            assert reserved.status.count(RESERVE_GRANTED) == 4
            offsets = unpack_u64(reserved.offsets)
            sums = [one.write(offsets[i], others[i]) for i in range(4)]
            await one.commit(reserved, sums)
            let_go.set()
            await one.until(lambda facts: facts["tiers"]["host"]["staging"] == 0)
        assert await one.load(others) == (4, 0)
        assert sum(await one.load(chain)) == 4


async def test_a06_reads_that_nobody_waits_for_any_more_leave_nothing_behind(places: Places) -> None:
    chain = names(ROOT, 8)
    async with store(places) as one:
        await one.save(ROOT, chain)
        await one.all_on_disk()
    places.arena().unlink()
    settings = config(faults=FaultsConfig(hooks={"store_in_load": "delay:0.01"}, max_host_blocks=12))
    async with store(places, settings, incarnation=2) as one:
        for attempt in range(100):
            found = await one.look_up(chain[: 1 + attempt % 8])
            one.peer.send(Release(lease=found.lease))
        facts = await one.until(lambda facts: facts["tiers"]["host"]["staging"] == 0)
        assert facts["leases"] == facts["pinned"] == 0
        assert sum(await one.load(chain)) == 8


async def test_f08_a_slow_disk_never_keeps_the_store_from_answering(places: Places) -> None:
    chain = names(ROOT, 8)
    async with running(Store, places, config()) as actor, engine(places) as one:
        with held_up(actor, "save") as let_go:
            await one.save(ROOT, chain)
            for _ in range(20):
                assert await one.load(chain) == (8, 0)
            assert (await one.facts())["tiers"]["host"]["dirty"] == 8
            let_go.set()
            await one.all_on_disk()


async def test_s04_a_disk_that_fails_to_deliver_ends_the_run_and_nothing_hangs(places: Places) -> None:
    chain = names(ROOT, 6)
    async with store(places) as one:
        await one.save(ROOT, chain)
        await one.all_on_disk()
    places.arena().unlink()
    settings = config(faults=FaultsConfig(hooks={"store_in_load": "fail:1"}))
    async with store(places, settings, incarnation=2) as one:
        assert await one.load(chain) == (0, 0)
        assert await one.load(chain) == (0, 6)
        facts = await one.facts()
        assert facts["leases"] == facts["tiers"]["host"]["staging"] == 0
        assert facts["tiers"]["disk"]["stage_failures"] == 6


async def test_a_block_whose_checksum_failed_is_quarantined_and_comes_back_from_disk(places: Places) -> None:
    chain = names(ROOT, 5)
    async with store(places) as one:
        reserved = await one.save(ROOT, chain)
        await one.all_on_disk()
        assert await one.load(chain, bad=(2,), bent=True) == (5, 0)
        assert await one.load(chain) == (4, 1)
        facts = await one.facts()
        assert facts["tiers"]["host"]["quarantined"] == 1
        assert reserved.incarnation == 1


async def test_a_bad_block_that_is_nowhere_else_is_a_miss_until_it_is_saved_again(places: Places) -> None:
    chain = names(ROOT, 5)
    async with store(places, config(disk_bytes=0)) as one:
        await one.save(ROOT, chain)
        assert await one.load(chain, bad=(2,), bent=True) == (5, 0)
        assert await one.load(chain) == (2, 0)
        assert (await one.save(ROOT, chain)).status == bytes(
            [RESERVE_HAVE, RESERVE_HAVE, RESERVE_GRANTED, RESERVE_HAVE, RESERVE_HAVE]
        )
        assert await one.load(chain) == (5, 0)


async def test_a_block_that_is_called_bad_and_is_right_stays(places: Places) -> None:
    """Of a worker that was killed twice while it copied, say; numbers beyond the lease name nothing."""
    chain = names(ROOT, 5)
    async with store(places, config(disk_bytes=0)) as one:
        await one.save(ROOT, chain)
        assert await one.load(chain, bad=(1, 2, 7)) == (5, 0)
        facts = await one.until(lambda facts: facts["leases"] == 0)
        assert facts["tiers"]["host"]["quarantined"] == 0
        assert await one.load(chain) == (5, 0)


async def test_bytes_that_go_bad_in_the_arena_never_reach_the_disk(places: Places) -> None:
    chain = names(ROOT, 3)
    async with store(places) as one:
        reserved = await one.reserve(ROOT, chain)
        offsets = unpack_u64(reserved.offsets)
        sums = [one.write(offset, name) for offset, name in zip(offsets, chain, strict=True)]
        one.memory[offsets[1]] = one.memory[offsets[1]] ^ 1
        await one.commit(reserved, sums)
        facts = await one.until(lambda facts: facts["tiers"]["disk"]["damaged"] == 1)
        assert await one.load(chain) == (1, 0)
        assert facts["tiers"]["host"]["quarantined"] == 1


async def test_stale_commits_and_abandons_are_refused_and_harmless(places: Places) -> None:
    chain = names(ROOT, 2)
    async with store(places, config(disk_bytes=0)) as one, engine(places, "e1") as other:
        reserved = await one.reserve(ROOT, chain)
        slots, generations = reserved.slots, reserved.generations

        async def commit(who: Engine, *, incarnation: int = 1, generations: bytes = generations) -> bytes:
            message = Commit(
                incarnation=incarnation, epoch=0, slots=slots, generations=generations, checksums=bytes(16)
            )
            committed: Committed = await who.ask(message, Committed)
            return committed.status

        stale = bytes([COMMIT_STALE]) * 2
        assert await commit(one, incarnation=7) == stale
        assert await commit(one, generations=bytes(16)) == stale
        assert await commit(other) == stale
        other.peer.send(Abandon(incarnation=1, slots=slots, generations=generations))
        assert await other.load(chain) == (0, 0)
        assert await commit(one) == bytes([COMMIT_DONE]) * 2
        assert await commit(one) == stale
        one.peer.send(Abandon(incarnation=1, slots=slots, generations=generations))
        found = await one.look_up(chain)
        assert len(found.tiers) == 2
        wild = Commit(
            incarnation=1, epoch=0, slots=pack_u32([2**32 - 1, 12345678]), generations=generations, checksums=bytes(16)
        )
        assert (await one.ask(wild, Committed)).status == stale


async def test_grants_of_a_dead_scheduler_wait_for_the_next_and_its_leases_end(places: Places) -> None:
    chain = names(ROOT, 4)
    async with running(Store, places, config()):
        async with engine(places) as one:
            await one.save(ROOT, names(ROOT, 2, prompt=1))
            await one.look_up(names(ROOT, 2, prompt=1))
            reserved = await one.reserve(ROOT, chain)
            assert (await one.facts())["leases"] == 1
        pairs = list(zip(unpack_u32(reserved.slots), unpack_u64(reserved.generations), strict=True))
        async with engine(places, incarnation=2, held=pairs[:3]) as two:
            assert two.opened.kept == b"\1\1\1"
            facts = await two.facts()
            assert facts["leases"] == 0
            assert facts["tiers"]["host"]["granted"] == 3
            sums = [two.write(unpack_u64(reserved.offsets)[i], chain[i]) for i in range(3)]
            message = Commit(
                incarnation=1,
                epoch=0,
                slots=reserved.slots[:12],
                generations=reserved.generations[:24],
                checksums=b"".join(each.to_bytes(8, "little") for each in sums),
            )
            assert (await two.ask(message, Committed)).status == bytes([COMMIT_DONE]) * 3
            assert await two.load(chain) == (3, 0)


async def test_a07_a_scheduler_that_opens_again_has_no_leases_left(places: Places) -> None:
    chain = names(ROOT, 4)
    async with store(places) as one:
        await one.save(ROOT, chain)
        await one.all_on_disk()
        for _ in range(3):
            await one.look_up(chain)
        assert (await one.facts())["leases"] == 3
        await one.open()
        facts = await one.facts()
        assert facts["leases"] == facts["pinned"] == 0
        assert await one.load(chain) == (4, 0)


async def test_w14_clear_reaches_every_tier_before_it_is_answered_and_refuses_what_is_under_way(places: Places) -> None:
    kept_root = root_of("other")
    chain, late, kept = names(ROOT, 5), names(ROOT, 2, prompt=1), names(kept_root, 3)
    async with store(places) as one:
        await one.save(ROOT, chain)
        await one.save(kept_root, kept)
        await one.all_on_disk()
        reserved = await one.reserve(ROOT, late)
        sums = [one.write(offset, name) for offset, name in zip(unpack_u64(reserved.offsets), late, strict=True)]
        leased = await one.look_up(chain)
        cleared = await one.clear(ROOT)
        assert cleared.blocks == {"host": 5, "disk": 5}
        assert cleared.bytes == {"host": 5 * SLOT, "disk": 5 * SLOT}
        assert cleared.epoch == one.opened.epoch + 1
        assert (await one.commit(reserved, sums)).status == bytes([COMMIT_STALE]) * 2
        assert (await one.reserve(ROOT, chain)).status == bytes([RESERVE_STALE]) * 5
        assert (await one.reserve(kept_root, kept)).status == bytes([RESERVE_HAVE]) * 3
        assert await one.load(chain) == (0, 0)
        assert await one.load(kept) == (3, 0)
        for i, offset in enumerate(unpack_u64(leased.offsets)):
            assert one.memory[offset : offset + SLOT] == payload(chain[i]), "a lease outlives the clear"
        one.peer.send(Release(lease=leased.lease))
        one.opened = await one.open()
        assert (await one.save(ROOT, chain)).status == bytes([RESERVE_GRANTED]) * 5
        assert await one.load(chain) == (5, 0)
        await one.clear()
    for attempt in range(2):
        async with store(places, incarnation=2 + attempt) as one:
            assert one.opened.epoch == 2
            assert await one.load(chain) == (0, 0)
            assert await one.load(kept) == (0, 0)
        places.arena().unlink()


async def test_w14_a_clear_of_a_line_leaves_its_neighbours_on_both_tiers(places: Places) -> None:
    long, short, neighbour = names(ROOT, 6), names(ROOT, 3), names(ROOT, 4, prompt=1)
    assert short == long[:3]
    scope = Scope(b"\xff" * 32, ROOT, long[0])
    async with store(places) as one:
        for line in (long, neighbour):
            await one.save(ROOT, line)
        await one.all_on_disk()
        cleared = await one.clear(scope)
        assert cleared.blocks == {"host": 6, "disk": 6}
        assert cleared.bytes == {"host": 6 * SLOT, "disk": 6 * SLOT}
        assert await one.load(long) == (0, 0)
        assert await one.load(neighbour) == (4, 0)
        assert (await one.reserve(ROOT, long)).status == bytes([RESERVE_STALE]) * 6
    places.arena().unlink()
    async with store(places, incarnation=2) as one:
        await one.save(ROOT, names(ROOT, 2, prompt=2))
        assert (await one.clear(scope)).blocks == {"host": 0, "disk": 0}
        assert await one.load(long) == (0, 0)
        assert await one.load(neighbour) == (0, 4)  # known to the disk alone: it says that this is a line of its own
        assert await one.load(names(ROOT, 2, prompt=2)) == (2, 0)


async def test_w14_a_clear_of_a_line_takes_along_what_may_continue_it(places: Places) -> None:
    """A block that went bad leaves orphans: they would be found again once it is back."""
    chain = names(ROOT, 6)
    async with store(places, config(disk_bytes=0)) as one:
        await one.save(ROOT, chain)
        await one.load(chain, bad=(2,), bent=True)
        assert await one.load(chain) == (2, 0)
        assert (await one.clear(Scope(b"\xff" * 32, ROOT, chain[0]))).blocks["host"] == 5
        one.opened = await one.open()
        await one.save(ROOT, chain[:3])
        assert await one.load(chain) == (3, 0)


async def test_w14_a_disk_that_is_away_is_not_called_cleared(places: Places) -> None:
    chain = names(ROOT, 3)
    async with store(places) as one:
        await one.save(ROOT, chain)
        await one.all_on_disk()
    places.store.rename(places.home / "aside")
    places.store.write_bytes(b"in the way")
    async with store(places, incarnation=2) as one:
        with pytest.raises(RequestFailed, match="may hold such blocks"):
            await one.clear()
        places.store.unlink()
        (places.home / "aside").rename(places.store)
        await one.until(lambda facts: facts["tiers"]["disk"]["state"] == "ready")
        await one.clear()
        assert await one.load(chain) == (0, 0)
    async with store(places, config(disk_bytes=0), incarnation=3) as one:
        with pytest.raises(RequestFailed, match="its files in"):
            await one.clear()


async def test_w14_an_admin_may_not_clear_behind_the_back_of_a_scheduler(places: Places) -> None:
    async with running(Store, places, config()), dialled("admin", "store", places, engine="admin") as (_, admin):
        async with engine(places) as one:
            await one.save(ROOT, names(ROOT, 2))
            with pytest.raises(RequestFailed, match="device tier must be cleared first"):
                await admin.ask(Clear(), Cleared, deadline_s=5)
            one.node.say_goodbye()
        with trio.fail_after(5):
            while True:
                try:
                    cleared = await admin.ask(Clear(), Cleared, deadline_s=5)
                    break
                except RequestFailed:
                    await trio.lowlevel.checkpoint()
        assert cleared.blocks["host"] == 2
        for scope in (Scope(b"x", b"y"), Scope(b"", b"", b"z" * 32), Scope(b"\xff" * 32, ROOT, b"short")):
            with pytest.raises(RequestFailed, match="bad_request"):
                await admin.ask(Clear(scope=scope), Cleared, deadline_s=5)


@pytest.mark.parametrize("how", ["a file", "a file in its place", "disk_bytes 0"])
def test_p20_an_unusable_disk_means_host_only_with_a_reason(places: Places, how: str) -> None:
    disk_bytes = 64 * MIB
    if how == "a file":
        places.store.write_bytes(b"in the way")
    elif how == "a file in its place":
        places.store.mkdir()
        (places.store / "segments").write_bytes(b"in the way")
    else:
        disk_bytes = 0

    async def story() -> None:
        chain = names(ROOT, 3)
        async with store(places, config(disk_bytes=disk_bytes)) as one:
            await one.save(ROOT, chain)
            assert await one.load(chain) == (3, 0)
            disk = (await one.facts())["tiers"]["disk"]
            assert disk["state"] == ("unusable" if disk_bytes else "off")
            assert disk["reason"]
            assert ((await one.facts())["note"] == "") == (not disk_bytes)

    trio.run(story)


async def test_p20_saving_resumes_by_itself_when_the_cause_is_gone(places: Places) -> None:
    places.store.write_bytes(b"in the way")
    chain = names(ROOT, 3)
    async with store(places) as one:
        await one.save(ROOT, chain)
        places.store.unlink()
        facts = await one.all_on_disk()
        assert facts["tiers"]["disk"]["state"] == "ready"
    places.arena().unlink()
    async with store(places, incarnation=2) as one:
        assert await one.load(chain) == (0, 3)


async def test_p30_a_planned_stop_brings_the_write_behind_queue_to_disk(places: Places) -> None:
    chain = names(ROOT, 50)
    settings = config(faults=FaultsConfig(hooks={"store_before_data": "delay:0.05"}))
    async with store(places, settings) as one:
        await one.save(ROOT, chain)
    places.arena().unlink()
    async with store(places, incarnation=2) as one:
        assert await one.load(chain) == (0, 50)


async def test_p08_the_disk_tier_keeps_to_its_cap_and_evicts_the_oldest_leaves(places: Places) -> None:
    prompts = [names(ROOT, 5, prompt=i) for i in range(12)]
    settings = config(faults=FaultsConfig(max_disk_blocks=20))
    async with store(places, settings) as one:
        for chain in prompts:
            await one.save(ROOT, chain)
            await one.until(lambda facts: facts["tiers"]["disk"]["queued"] == 0)
            assert (await one.facts())["tiers"]["disk"]["used"] <= 20
    places.arena().unlink()
    async with store(places, settings, incarnation=2) as one:
        loaded = [sum(await one.load(chain)) for chain in prompts]
        assert sum(loaded) == (await one.facts())["tiers"]["disk"]["held"] > 10
        assert loaded[-1] == 5
        assert loaded[0] == 0


async def test_malformed_requests_are_refused_and_the_store_goes_on(places: Places) -> None:
    async with running(Store, places, config()), engine(places) as one:
        bad = [
            (Lookup(identities=b"x" * 33), "multiple"),
            (Reserve(identities=b"x" * 64, parents=b"x" * 32, root=ROOT, epoch=0), "do not fit"),
            (Reserve(identities=b"x" * 32, parents=b"x" * 32, root=b"short", epoch=0), "do not fit"),
            (Commit(incarnation=1, epoch=0, slots=b"abc", generations=b"", checksums=b""), "do not fit"),
            (Commit(incarnation=1, epoch=0, slots=b"abcd", generations=bytes(8), checksums=b""), "checksums"),
        ]
        for message, reason in bad:
            with pytest.raises(RequestFailed, match=reason):
                await one.ask(message, Reserved)
        one.peer.send(Release(lease=77))
        one.peer.send(Release(lease=0, bad=b"abc"))
        one.peer.send(Abandon(incarnation=1, slots=b"abc", generations=b""))
        assert await one.load(names(ROOT, 1)) == (0, 0)


async def test_two_engines_with_other_slot_sizes_share_the_arena(places: Places) -> None:
    large_root = root_of("large")
    settings = config(host_bytes=4 * MIB)
    async with running(Store, places, settings), engine(places) as small, engine(places, "e1", size=100_000) as large:
        for prompt in range(40):
            await small.save(ROOT, names(ROOT, 10, prompt=prompt))
            await small.all_on_disk()
        assert (await large.save(large_root, names(large_root, 5))).status == bytes([RESERVE_GRANTED]) * 5
        assert await large.load(names(large_root, 5)) == (5, 0)
        assert await small.load(names(ROOT, 10, prompt=39)) == (10, 0)
        facts = await small.facts()
        assert set(facts["tiers"]["host"]["extents_by_slot_bytes"]) == {"8192", "102400"}


@pytest.mark.parametrize("what", ["half", "random", "link", "directory"])
async def test_p29_whatever_lies_at_the_arena_s_name_the_store_starts_and_says_so(places: Places, what: str) -> None:
    chain, arena = names(ROOT, 4), places.arena()
    async with store(places) as one:
        await one.save(ROOT, chain)
        await one.all_on_disk()
    if what == "half":
        os.truncate(arena, os.stat(arena).st_size // 2)
    elif what == "random":
        arena.write_bytes(random.Random(1).randbytes(MIB))
    else:
        arena.unlink()
        if what == "link":
            arena.symlink_to("/dev/null")
        else:
            arena.mkdir()
    try:
        async with store(places, incarnation=2) as one:
            assert await one.load(chain) == (0, 4)
            assert await one.load(chain) == (4, 0)
            facts = await one.facts()
            assert any(str(arena) in note for note in facts["notes"])
            beside = what in ("link", "directory")
            assert facts["tiers"]["host"]["path"] == str(places.store / "arena" if beside else arena)
    finally:
        if what == "directory":
            arena.rmdir()
    arena.unlink(missing_ok=True)
    async with store(places, incarnation=3) as one:
        assert one.opened.arena == str(arena)
        assert not (places.store / "arena").exists()


async def test_o07_each_hit_belongs_to_one_tier_in_blocks_and_bytes(places: Places) -> None:
    chain = names(ROOT, 6)
    async with store(places) as one:
        await one.save(ROOT, chain)
        await one.all_on_disk()
    places.arena().unlink()
    async with store(places, incarnation=2) as one:
        await one.load(chain[:2])
        await one.load([*chain, names(ROOT, 1, prompt=5)[0]])
        facts = await one.facts()
        host, disk = facts["tiers"]["host"], facts["tiers"]["disk"]
        assert (host["hits"], disk["hits"], facts["misses"]) == (2, 6, 1)
        assert (host["hit_bytes"], disk["hit_bytes"]) == (2 * SLOT, 6 * SLOT)
        assert host["hits"] + disk["hits"] + facts["misses"] == facts["looked_up"]


@pytest.mark.parametrize("what", ["removed", "replaced"])
async def test_an_arena_that_was_removed_is_left_for_a_new_one_once_all_is_on_disk(
    places: Places, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(arena_watch, "YOUNG_S", 0.0)
    chain = names(ROOT, 6)
    with structlog.testing.capture_logs() as logs:
        async with running(Store, places, config()) as actor, engine(places) as one:
            assert stat.S_IMODE(os.stat(one.opened.arena).st_mode) == 0o600
            places.arena().unlink()
            if what == "replaced":
                places.arena().write_bytes(b"somebody else's")
            await one.save(ROOT, chain)
            assert await one.load(chain) == (6, 0)  # whoever has it mapped is served on
            with trio.fail_after(20):
                await actor.stopping.wait()
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["arena_trouble"]
    async with store(places, incarnation=2) as one:
        assert one.opened.arena == str(places.arena())
        assert await one.load(chain) == (0, 6)
        assert (await one.facts())["tiers"]["host"]["state"] == "ready"


async def test_without_a_disk_tier_a_removed_arena_serves_until_an_engine_cannot_find_it(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_watch, "YOUNG_S", 0.0)
    monkeypatch.setattr(arena_watch, "PATIENCE_S", 0.0)
    monkeypatch.setattr(arena_watch, "LOOK_S", 0.01)
    chain = names(ROOT, 2)
    async with running(Store, places, config(disk_bytes=0)) as actor, engine(places) as one:
        await one.save(ROOT, chain)
        places.arena().unlink()
        facts = await one.until(lambda facts: facts["tiers"]["host"]["state"] != "ready")
        assert "removed" in facts["tiers"]["host"]["reason"]
        for _ in range(20):
            assert await one.load(chain) == (2, 0)
        assert not actor.stopping.is_set()
        assert await one.load(chain, bad=(0, 1)) == (2, 0)  # what a worker says that has not mapped it
        with trio.fail_after(20):
            await actor.stopping.wait()
        assert actor.opened.catalog is not None
        assert actor.opened.catalog.statistics().counters.quarantined == 0
    async with store(places, config(disk_bytes=0), incarnation=2) as one:
        await one.save(ROOT, chain)
        assert await one.load(chain) == (2, 0)


async def test_a_lost_index_is_rebuilt_from_the_footers_while_serving(places: Places) -> None:
    chain = names(ROOT, 30)
    async with store(places) as one:
        await one.save(ROOT, chain)
        await one.all_on_disk()
    places.arena().unlink()
    shutil.rmtree(places.store / "index")
    async with store(places, incarnation=2) as one:
        await one.until(lambda facts: facts["tiers"]["disk"]["state"] == "ready" and facts["blocks"] == 30)
        assert await one.load(chain) == (0, 30)


async def test_an_index_found_damaged_in_service_is_rebuilt_and_nothing_is_lost(places: Places) -> None:
    chains = [names(ROOT, 10, prompt=i) for i in range(6)]
    settings = config(faults=FaultsConfig(max_host_blocks=20))
    async with running(Store, places, settings) as actor, engine(places) as one:
        for chain in chains:
            await one.save(ROOT, chain)
            await one.all_on_disk()
        leased = await one.look_up(chains[0])
        assert actor.lane.disk is not None
        actor.lane.disk._troubles.note_error(IndexDamaged("a flipped bit"))
        await one.until(lambda facts: facts["tiers"]["disk"]["rebuilds"] == 1)
        await one.save(ROOT, names(ROOT, 5, prompt=9))
        one.peer.send(Release(lease=leased.lease))
        facts = await one.until(lambda facts: facts["tiers"]["disk"]["state"] == "ready")
        assert facts["tiers"]["disk"]["held"] == 60
        facts = await one.all_on_disk()
        assert facts["tiers"]["disk"]["held"] == facts["tiers"]["disk"]["used"] == 65
        for chain in chains:
            assert sum(await one.load(chain)) == 10
        assert actor.opened.catalog is not None
        await one.until(lambda facts: facts["pinned"] == 0)
        check_integrity(actor.opened.catalog)
