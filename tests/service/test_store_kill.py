"""The store as a process of its own, killed at its named steps and at rest (`protocols.md` 9, rows of the store)."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from services.store.actor import ARENA_CUT
from services.store.arena.headers import Headers
from services.store.arena.records import unpack_superblock
from services.store.catalog.catalog import Catalog
from services.store.catalog.integrity import check_integrity
from services.store.catalog.recovery import recover
from shared.messages.base import unpack_u32, unpack_u64
from shared.messages.store import COMMIT_DONE, RESERVE_GRANTED, RESERVE_HAVE
from shared.paths import Places
from shared.peers import DeadlinePassed, PeerGone
from shared.scope import Scope, of_root
from shared.testing import dialled, ended
from tests.service.store_kit import Engine, names, root_of, store_process

ROOT = root_of("model")


@asynccontextmanager
async def process(
    places: Places, incarnation: int, environ: dict[str, str] | None = None, held: list[tuple[int, int]] | None = None
) -> AsyncIterator[Engine]:
    """A store process that we may kill, and engine e0 opened there; it is gone at the end of the block."""
    with store_process(places, incarnation, environ) as running:
        async with dialled("scheduler", "store", places, incarnation=incarnation) as (node, peer):
            one = Engine(node, peer)
            await one.open(held or [])
            yield one
        running.kill()
        await ended(running)


def hook(**steps: str) -> dict[str, str]:
    return {f"PERDURE_FAULTS__HOOKS__{step.upper()}": action for step, action in steps.items()}


def check_arena(places: Places) -> None:
    """What the dead store left in its arena is whole."""
    buffer = bytearray(places.arena().read_bytes())
    geometry, _ = unpack_superblock(bytes(buffer[:4096]))
    catalog = Catalog(Headers(buffer, geometry), starts=1 << 20)
    recover(catalog)
    check_integrity(catalog)


async def test_kill_9_loses_no_committed_block_and_keeps_grants_out_of_use(places: Places) -> None:
    chain, late = names(ROOT, 10), names(ROOT, 4, prompt=1)
    async with process(places, 1) as one:
        await one.save(ROOT, chain)
        reserved = await one.reserve(ROOT, late)
        os.kill(one.peer.pid, 9)
        await one.peer.wait_gone()
    check_arena(places)
    pairs = list(zip(unpack_u32(reserved.slots), unpack_u64(reserved.generations), strict=True))
    async with process(places, 2, held=pairs[:2]) as one:
        assert one.opened.kept == b"\1\1"
        assert await one.load(chain) == (10, 0)
        assert (await one.facts())["tiers"]["host"]["granted"] == 2
        offsets = unpack_u64(reserved.offsets)
        sums = [one.write(offsets[i], late[i]) for i in range(2)]
        kept = type(reserved)(
            status=reserved.status[:2],
            slots=reserved.slots[:8],
            offsets=reserved.offsets[:16],
            generations=reserved.generations[:16],
            incarnation=2,
        )
        assert (await one.commit(kept, sums)).status == bytes([COMMIT_DONE]) * 2
        assert await one.load(late) == (2, 0)
        assert (await one.save(ROOT, late)).status == bytes([RESERVE_HAVE] * 2 + [RESERVE_GRANTED] * 2)


async def test_a_store_whose_arena_is_cut_says_so_and_the_next_one_serves_from_disk(places: Places) -> None:
    chain = names(ROOT, 4)
    with store_process(places, 1) as running:
        async with dialled("scheduler", "store", places, incarnation=1) as (node, peer):
            one = Engine(node, peer)
            await one.open([])
            await one.save(ROOT, chain)
            await one.all_on_disk()
            os.truncate(places.arena(), 4096)
            with trio.fail_after(20):
                await ended(running)
    assert running.returncode == ARENA_CUT  # in words, not of SIGBUS
    async with process(places, 2) as one:
        assert await one.load(chain) == (0, 4)
        assert await one.load(chain) == (4, 0)
        assert "discarded" in " ".join((await one.facts())["notes"])


async def test_p27_ten_hard_kills_leave_one_arena(places: Places) -> None:
    chain = names(ROOT, 4)
    async with process(places, 1) as one:
        await one.save(ROOT, chain)
        key = one.opened.arena_key
    for incarnation in range(2, 12):
        async with process(places, incarnation) as one:
            assert one.opened.arena_key == key
            assert await one.load(chain) == (4, 0)
    mine = [name for name in os.listdir("/dev/shm") if places.home_hash in name]
    assert mine == [places.arena().name]


async def test_p12_hits_do_not_depend_on_the_hash_seed_of_the_process(places: Places) -> None:
    chain = names(ROOT, 3)
    for incarnation, seed in enumerate(("random", "0", "123"), 1):
        async with process(places, incarnation, {"PYTHONHASHSEED": seed}) as one:
            if incarnation == 1:
                await one.save(ROOT, chain)
                await one.all_on_disk()
            assert await one.load(chain) == ((3, 0) if incarnation != 3 else (0, 3))
        if incarnation == 2:
            places.arena().unlink()


@pytest.mark.parametrize("step", ["store_before_data", "store_after_data", "store_commit_index", "store_after_index"])
async def test_p18_killed_while_it_writes_a_dirty_block_is_written_again(places: Places, step: str) -> None:
    chain = names(ROOT, 8)
    async with process(places, 1, hook(**{step: "exit"})) as one:
        await one.save(ROOT, chain)
        with trio.fail_after(20):
            await one.peer.wait_gone()
    check_arena(places)
    async with process(places, 2) as one:
        assert await one.load(chain) == (8, 0)
        facts = await one.all_on_disk()
        assert facts["tiers"]["disk"]["used"] == facts["tiers"]["disk"]["held"] == 8
    places.arena().unlink()
    async with process(places, 3) as one:
        assert await one.load(chain) == (0, 8)


async def test_killed_after_granting_the_slots_are_reclaimed(places: Places) -> None:
    chain = names(ROOT, 5)
    async with process(places, 1, hook(store_after_granted="exit")) as one:
        with pytest.raises(PeerGone):
            await one.reserve(ROOT, chain)
    async with process(places, 2) as one:
        facts = await one.facts()
        assert facts["tiers"]["host"]["used"] == 0
        assert (await one.save(ROOT, chain)).status == bytes([RESERVE_GRANTED]) * 5


async def test_killed_when_a_commit_arrives_the_engine_commits_to_the_next_store(places: Places) -> None:
    chain = names(ROOT, 5)
    async with process(places, 1, hook(store_after_commit_arrives="exit")) as one:
        reserved = await one.reserve(ROOT, chain)
        sums = [one.write(offset, name) for offset, name in zip(unpack_u64(reserved.offsets), chain, strict=True)]
        with pytest.raises(PeerGone):
            await one.commit(reserved, sums)
    pairs = list(zip(unpack_u32(reserved.slots), unpack_u64(reserved.generations), strict=True))
    async with process(places, 2, held=pairs) as one:
        assert one.opened.kept == b"\1" * 5
        assert await one.load(chain) == (0, 0)
        again = type(reserved)(
            status=reserved.status,
            slots=reserved.slots,
            offsets=reserved.offsets,
            generations=reserved.generations,
            incarnation=2,
        )
        assert (await one.commit(again, sums)).status == bytes([COMMIT_DONE]) * 5
        assert await one.load(chain) == (5, 0)


async def test_killed_in_a_load_the_slots_it_read_into_are_free_again(places: Places) -> None:
    chain = names(ROOT, 6)
    async with process(places, 1) as one:
        await one.save(ROOT, chain)
        await one.all_on_disk()
    places.arena().unlink()
    async with process(places, 2, hook(store_in_load="exit")) as one:
        await one.look_up(chain)
        with trio.fail_after(20):
            await one.peer.wait_gone()
    check_arena(places)
    async with process(places, 3) as one:
        assert (await one.facts())["tiers"]["host"]["used"] == 0
        assert await one.load(chain) == (0, 6)


@pytest.mark.parametrize(
    ("step", "a_line"),
    [
        ("store_clear_noted", False),
        ("store_clear_host", True),
        ("store_in_delete", False),
        ("store_clear_disk", True),
    ],
)
async def test_w14_a_clear_that_the_store_dies_in_is_finished_by_the_next(
    places: Places, step: str, a_line: bool
) -> None:
    chain, others, kept_root = names(ROOT, 6), names(ROOT, 4, prompt=1), root_of("other")
    scope = Scope(b"\xff" * 32, ROOT, chain[0]) if a_line else of_root(ROOT)
    stays = 4 if a_line else 0
    async with process(places, 1, hook(**{step: "exit"})) as one:
        for root, line in ((ROOT, chain), (ROOT, others), (kept_root, names(kept_root, 3))):
            await one.save(root, line)
        await one.all_on_disk()
        with pytest.raises((PeerGone, DeadlinePassed)):
            await one.clear(scope)
    check_arena(places)
    async with process(places, 2) as one:
        await one.until(lambda facts: facts["tiers"]["disk"]["used"] == facts["tiers"]["disk"]["held"] == 3 + stays)
        assert await one.load(chain) == (0, 0)
        assert sum(await one.load(others)) == stays
        assert sum(await one.load(names(kept_root, 3))) == 3


async def test_p30_sigterm_in_the_middle_of_writing_behind_flushes_and_ends(places: Places) -> None:
    chain = names(ROOT, 50)
    with store_process(places, 1, hook(store_before_data="delay:0.1")) as running:
        async with dialled("scheduler", "store", places) as (node, peer):
            one = Engine(node, peer)
            await one.open()
            for end in range(10, 51, 10):
                await one.save(ROOT, chain[:end])
            running.terminate()
            with trio.fail_after(10):
                assert await ended(running) == 0
    places.arena().unlink()
    async with process(places, 2) as one:
        assert await one.load(chain) == (0, 50)
