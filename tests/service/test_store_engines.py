"""Engines that come, go and change their names: no slot stays out of use, no lease of an answer that went nowhere."""

import pytest

from services.store.actor import Store
from shared.messages.store import Found, Reserved
from shared.paths import Places
from shared.peers import DeadlinePassed, Peer, PeerSlow
from shared.testing import dialled, running
from tests.service.store_kit import Engine, config, names, root_of

ROOT = root_of("m")


async def test_grants_of_an_engine_name_that_never_returns_are_free_once_another_engine_opens(places: Places) -> None:
    async with running(Store, places, config()) as store, dialled("scheduler", "store", places, engine="old") as pair:
        old = Engine(*pair)
        await old.open()
        await old.reserve(ROOT, names(ROOT, 3))
        async with dialled("scheduler", "store", places, engine="other") as second:
            await Engine(*second).open()
            assert store.opened.catalog is not None
            assert store.opened.catalog.statistics().granted == 3  # it is connected: they stand
    async with running(Store, places, config(), incarnation=2) as store:
        assert store.opened.catalog is not None
        assert store.opened.catalog.statistics().granted == 3
        async with dialled("scheduler", "store", places, engine="other", incarnation=2) as pair:
            await Engine(*pair).open()
            assert store.opened.catalog.statistics().granted == 0
            assert store.opened.catalog.statistics().host_used == 0


async def test_grants_of_an_engine_that_lost_its_connection_stand_while_its_exit_is_not_proven(places: Places) -> None:
    async with running(Store, places, config()) as store:
        async with dialled("scheduler", "store", places, engine="old") as pair:
            old = Engine(*pair)
            await old.open()
            await old.reserve(ROOT, names(ROOT, 3))
        async with dialled("scheduler", "store", places, engine="other") as pair:
            await Engine(*pair).open()
            assert store.opened.catalog is not None
            assert store.opened.catalog.statistics().granted == 3


async def test_an_answer_that_can_not_be_sent_gives_nothing(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    identities = names(ROOT, 3)
    async with running(Store, places, config()) as store, dialled("scheduler", "store", places) as pair:
        engine = Engine(*pair)
        await engine.open()
        await engine.save(ROOT, identities)
        send = Peer.send

        def full(self: Peer, message: object, **options: int) -> None:
            if isinstance(message, Found | Reserved):
                raise PeerSlow("its queue is full")
            send(self, message, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(Peer, "send", full)
        engine.ask_s = 0.2
        with pytest.raises(DeadlinePassed):
            await engine.look_up(identities)
        with pytest.raises(DeadlinePassed):
            await engine.reserve(ROOT, names(ROOT, 3, prompt=1))
        assert store.opened.catalog is not None
        facts = store.opened.catalog.statistics()
        assert (facts.leases, facts.granted, facts.pinned) == (0, 0, 0)
