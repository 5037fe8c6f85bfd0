"""Services that check their books: once when they have become idle, and when the doctor asks."""

import msgspec
import pytest
import trio

from services.scheduler import actor as actor_of_scheduler
from services.scheduler.actor import Scheduler
from services.store import self_check
from services.store.actor import Store
from services.store.arena.headers import Headers
from services.store.arena.records import PAGE, Geometry
from services.store.catalog.catalog import Catalog
from services.store.catalog.integrity import check_conservation
from shared.messages.admin import CheckIntegrity, Integrity
from shared.messages.engine import Journaled
from shared.paths import Places
from shared.testing import dialled, running
from tests.service.scheduler_kit import CONFIG, FACTS, a_submit
from tests.service.store_kit import SLOT, config, engine, names, root_of

ROOT = root_of("model")
GEOMETRY = Geometry(extents=1, extent_bytes=32 * PAGE, wanted=0)


async def told(places: Places, service: str = "store") -> Integrity:
    async with dialled("admin", service, places, engine="admin") as (_, peer):
        answer: Integrity = await peer.ask(CheckIntegrity(), Integrity, deadline_s=20)
        return answer


async def idle_checks(places: Places, more_than: int) -> int:
    with trio.fail_after(20):
        while (answer := await told(places)).idle_checks <= more_than:
            assert not answer.complaint
            await trio.lowlevel.checkpoint()
    return answer.idle_checks


async def test_the_store_checks_its_catalogue_once_whenever_it_has_become_idle(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "IDLE_S", 0.02)
    async with running(Store, places, config()) as actor, engine(places) as one:
        first = await idle_checks(places, 0)
        assert await actor.books.asked() == Integrity(idle_checks=first)
        await one.save(ROOT, names(ROOT, 5))
        await one.all_on_disk()
        await idle_checks(places, first)
        assert await one.load(names(ROOT, 5)) == (5, 0)


async def test_the_store_tells_the_doctor_what_does_not_add_up(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "IDLE_S", 3600.0)  # or the store itself might find it first, and end
    async with running(Store, places, config()) as actor, engine(places) as one:
        await one.save(ROOT, names(ROOT, 5))
        await one.all_on_disk()
        assert (await told(places)).complaint == ""
        assert actor.opened.catalog is not None
        entries = actor.opened.catalog.blocks.entries
        entries.children[entries.map.get(names(ROOT, 5)[1])] += 1
        assert "children" in (await told(places)).complaint
        entries.children[entries.map.get(names(ROOT, 5)[1])] -= 1
        assert (await told(places)).complaint == ""


async def test_a_catalogue_that_contradicts_itself_ends_the_store(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "IDLE_S", 0.02)
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="children"), flatten_subgroups=True):
        async with running(Store, places, config()) as actor, engine(places) as one:
            await one.save(ROOT, names(ROOT, 2))
            assert actor.opened.catalog is not None
            entries = actor.opened.catalog.blocks.entries
            entries.children[entries.map.get(names(ROOT, 2)[0])] += 1
            await trio.sleep_forever()


async def test_of_a_store_of_many_blocks_the_sums_are_checked_and_nothing_else(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "CHECK_BLOCKS", 3)
    monkeypatch.setattr(self_check, "IDLE_S", 1000.0)  # only the question finds what is made wrong here
    async with running(Store, places, config()) as actor, engine(places) as one:
        await one.save(ROOT, names(ROOT, 5))
        told_ = await told(places)
        assert "5 blocks" in told_.skipped
        assert told_.complaint == ""
        assert actor.opened.catalog is not None
        slots = actor.opened.catalog.blocks.slots
        slots.used += 1
        told_ = await told(places)
        assert ("counted" in told_.complaint, told_.skipped) == (True, "")
        slots.used -= 1


def test_the_sums_notice_each_number_that_is_wrong() -> None:
    catalog = Catalog(Headers(bytearray(GEOMETRY.total), GEOMETRY), starts=1)
    chain = names(ROOT, 6)
    pairs = list(zip(chain, [ROOT, *chain[:-1]], strict=True))
    for grant in catalog.reserve(("e0", 1), root=ROOT, epoch=0, length=SLOT, blocks=pairs)[:4]:
        catalog.commit(("e0", 1), grant.slot, grant.generation, 1)
    check_conservation(catalog)
    slots, entries = catalog.blocks.slots, catalog.blocks.entries
    entry = entries.map.get(chain[0])
    for where, name, key in (
        (slots.in_extent, "held", 0),
        (slots._free_counts, "free", 0),
        (slots.state, "held", entries.host[entry]),
        (entries.host, "elsewhere", entry),
        (entries.flags, "live", entry),
    ):
        was = where[key]
        where[key] = was + 1 if name in ("held", "free", "elsewhere") and where is not slots.state else 0
        with pytest.raises(AssertionError, match=name):
            check_conservation(catalog)
        where[key] = was
    entries.map.remove(chain[5])
    with pytest.raises(AssertionError, match="names"):
        check_conservation(catalog)


async def test_a_store_without_an_arena_has_nothing_to_check(places: Places) -> None:
    async with running(Store, places, config(host_bytes=0, disk_bytes=0)):
        assert "no arena" in (await told(places)).skipped


async def test_the_store_counts_leases_of_engines_that_are_not_connected(places: Places) -> None:
    async with running(Store, places, config()) as actor, engine(places) as one:
        await one.save(ROOT, names(ROOT, 2))
        assert (await one.look_up(names(ROOT, 2))).lease
        assert (await told(places)).absent_leases == 0
        actor._owners.clear()
        assert (await told(places)).absent_leases == 1


async def test_the_scheduler_checks_its_pool_when_it_has_become_idle_and_tells_the_doctor(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_of_scheduler, "CHECK_IDLE_S", 0.02)
    async with running(Scheduler, places, CONFIG) as scheduler:
        assert await told(places, "scheduler") == Integrity()
        async with dialled("tokenizer", "scheduler", places) as (_, tokenizer):
            await tokenizer.ask(a_submit("a" * 32, [1, 2, 3], deadline_s=0.05), Journaled, deadline_s=20)
            with trio.fail_after(20):
                while not (await told(places, "scheduler")).idle_checks:
                    await trio.lowlevel.checkpoint()
        scheduler.core._waiting.add(next(iter(scheduler.core._requests.values())))  # it is over already
        assert "waiting" in (await told(places, "scheduler")).complaint


async def test_a_scheduler_of_a_large_pool_says_that_it_did_not_check(places: Places) -> None:
    async with running(Scheduler, places, CONFIG) as scheduler:
        facts = msgspec.structs.replace(FACTS, blocks=actor_of_scheduler.CHECK_BLOCKS + 1)
        scheduler.worker.facts = facts
        assert f"{facts.blocks:,} blocks" in (await told(places, "scheduler")).skipped
