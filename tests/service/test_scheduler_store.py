"""The scheduler and its store: opened once an incarnation, answers in order, nothing waits on a store that hangs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from shared.config import Config, SchedulerConfig
from shared.messages.base import pack_u32, pack_u64, split_identities, unpack_u32
from shared.messages.engine import Transferred
from shared.messages.store import (
    COMMIT_DONE,
    RESERVE_GRANTED,
    TIER_DISK,
    TIER_HOST,
    Abandon,
    Clear,
    ClearCache,
    Cleared,
    Commit,
    Committed,
    EngineOpened,
    Found,
    Lookup,
    OpenEngine,
    Release,
    Reserve,
    Reserved,
    Staged,
)
from shared.paths import Places
from shared.peers import RequestFailed
from shared.scope import EVERYTHING
from shared.testing import TestMailbox, mailbox_of, running
from tests.service.scheduler_kit import CONFIG, FACTS, B, PlayedWorker, a_submit, expected, staged, submit

PROMPT = list(range(100, 100 + 3 * B + 1))
StoreBox = mailbox_of("store", frozenset({"scheduler"}))
PATIENT = Config(scheduler=SchedulerConfig(step_tokens=64, lookup_s=5.0, load_s=5.0, restore="load"))


class PlayedStore:
    """Answers by hand: each method takes the next message, which must be of its kind."""

    def __init__(self, box: TestMailbox, places: Places, epoch: int = 1) -> None:
        self.box, self.places, self.epoch = box, places, epoch
        self.opened: list[OpenEngine] = []
        self.told: list[Any] = []

    async def open(self, kept: bytes = b"") -> OpenEngine:
        peer, head, message = await self.box.receive(OpenEngine)
        self.box.answer(peer, head, EngineOpened(arena="/arena", arena_key="k1", epoch=self.epoch, kept=kept))
        self.opened.append(message)
        return message

    async def lookup(self, tiers: bytes, *, lease: int = 7, staged: Staged | None = None) -> Lookup:
        peer, head, message = await self.box.receive(Lookup)
        n = len(tiers)
        slots = range(n)
        self.box.answer(
            peer,
            head,
            Found(
                lease=lease if n else 0,
                tiers=tiers,
                slots=pack_u32(slots),
                offsets=pack_u64(slot * 256 for slot in slots),
                generations=pack_u64([1] * n),
                checksums=pack_u64(slot + 50 for slot in slots),
                epoch=self.epoch,
            ),
        )
        if staged is not None:
            peer.send(staged)
        return message

    async def reserve(self, status: int = RESERVE_GRANTED) -> Reserve:
        peer, head, message = await self.box.receive(Reserve)
        n = len(split_identities(message.identities))
        self.box.answer(
            peer,
            head,
            Reserved(
                status=bytes([status] * n),
                slots=pack_u32(range(n)),
                offsets=pack_u64(slot * 256 for slot in range(n)),
                generations=pack_u64([9] * n),
                incarnation=self.box.incarnation,
            ),
        )
        return message

    async def commit(self) -> Commit:
        peer, head, message = await self.box.receive(Commit)
        self.box.answer(peer, head, Committed(status=bytes([COMMIT_DONE] * (len(message.slots) // 4))))
        return message


@asynccontextmanager
async def a_store(places: Places, incarnation: int = 1) -> AsyncIterator[PlayedStore]:
    async with running(StoreBox, places, incarnation=incarnation) as box:
        yield PlayedStore(box, places)


def transferred(worker: PlayedWorker, checksums: list[int] | None = None, ok: bytes | None = None) -> None:
    """Answers the newest transfer."""
    transfer = worker.transfers[-1]
    n = len(transfer.copies)
    sums = checksums if checksums is not None else [copy.checksum for copy in transfer.copies]
    worker.peer.send(
        Transferred(
            epoch=transfer.epoch, seq=transfer.seq, checksums=pack_u64(sums), ok=ok or bytes([1] * n), seconds=0.0
        )
    )


async def a_transfer(worker: PlayedWorker) -> None:
    _, _, message = await worker.node.receive_request()
    worker.transfers.append(message)


async def test_a_store_is_opened_once_there_has_been_a_worker_and_again_for_each_incarnation(places: Places) -> None:
    async with staged(places) as stage:
        async with a_store(places) as store:
            await stage.until(lambda: stage.scheduler.store._link.peer)
            assert not stage.scheduler.store.opened
            await stage.worker()
            assert (await store.open()).slot_bytes == FACTS.block_bytes
            await stage.until(lambda: stage.scheduler.store.opened)
        await stage.until(lambda: not stage.scheduler.store.opened)
        await stage.until(lambda: not stage.scheduler.core.statistics().store)
        async with a_store(places, 2) as store:
            await store.open()
            await stage.until(lambda: stage.scheduler.core.statistics().store)


async def test_a_worker_with_other_blocks_that_comes_while_the_store_opens_gets_slots_of_its_size(
    places: Places,
) -> None:
    larger = msgspec.structs.replace(FACTS, block_bytes=2 * FACTS.block_bytes)
    async with a_store(places) as store, staged(places) as stage:
        await stage.worker()
        peer, head, message = await store.box.receive(OpenEngine)
        assert message.slot_bytes == FACTS.block_bytes
        await stage.worker(2, larger)
        await stage.until(lambda: stage.scheduler.worker.facts == larger)
        await stage.until(lambda: stage.scheduler.core.open_engine().slot_bytes == larger.block_bytes)
        store.box.answer(peer, head, EngineOpened(arena="/arena", arena_key="k1", epoch=1, kept=b""))
        assert (await store.open()).slot_bytes == larger.block_bytes
        await stage.until(lambda: stage.scheduler.store.opened)


async def test_a_full_block_is_reserved_copied_committed_with_the_worker_s_checksum(places: Places) -> None:
    async with a_store(places) as store, staged(places) as stage:
        worker, tokenizer = await stage.worker(), await stage.tokenizer()
        await store.open()
        await stage.until(lambda: stage.scheduler.store.opened)
        await submit(tokenizer, a_submit("a" * 32, PROMPT, max_tokens=1))
        await store.lookup(b"")
        await worker.step()
        reserve = await store.reserve()
        assert len(split_identities(reserve.identities)) == 3
        assert split_identities(reserve.parents)[0] == reserve.root
        assert split_identities(reserve.parents)[1:] == split_identities(reserve.identities)[:-1]
        await a_transfer(worker)
        assert worker.transfers[-1].save
        assert stage.scheduler.core.statistics().kv.locked == 3  # pinned while the copy is out
        transferred(worker, checksums=[11, 12, 13])
        commit = await store.commit()
        assert commit.checksums == pack_u64([11, 12, 13])
        assert commit.generations == pack_u64([9, 9, 9])
        await stage.until(lambda: stage.scheduler.core.statistics().counters["save_committed"] == 3)
        assert stage.scheduler.core.statistics().kv.locked == 0


async def test_staged_right_behind_its_found_is_not_lost_and_the_request_starts_behind_the_prefix(
    places: Places,
) -> None:
    async with a_store(places) as store, staged(places, PATIENT) as stage:
        worker, tokenizer, detokenizer = await stage.worker(), await stage.tokenizer(), await stage.detokenizer()
        await store.open()
        await stage.until(lambda: stage.scheduler.store.opened)
        await submit(tokenizer, a_submit("a" * 32, PROMPT, max_tokens=2))
        staged_block = Staged(
            lease=7,
            first=1,
            slots=pack_u32([1]),
            offsets=pack_u64([256]),
            generations=pack_u64([1]),
            checksums=pack_u64([51]),
        )
        lookup = await store.lookup(bytes([TIER_HOST, TIER_DISK]), staged=staged_block)
        assert len(split_identities(lookup.identities)) == 3
        copies = []
        while len(copies) < 2:
            await a_transfer(worker)
            assert not worker.transfers[-1].save
            copies += worker.transfers[-1].copies
            transferred(worker)
        assert [copy.checksum for copy in copies] == [50, 51]
        plan = await worker.step()
        assert plan.rows[0].start == 2 * B
        _, _, release = await store.box.receive(Release)
        assert release == Release(lease=7)
        async with stage.working(worker):
            await detokenizer.finished("a" * 32)
        assert detokenizer.stories["a" * 32].tokens == expected(PROMPT, 2)
        assert detokenizer.stories["a" * 32].finish.usage.cached_by_tier == {"device": 0, "host": B, "disk": B}


@pytest.mark.parametrize("answer", ["bad checksum", "outcome too short"])
async def test_a_copy_that_does_not_hold_is_a_miss_and_named_to_the_store(places: Places, answer: str) -> None:
    async with a_store(places) as store, staged(places, PATIENT) as stage:
        worker, tokenizer, detokenizer = await stage.worker(), await stage.tokenizer(), await stage.detokenizer()
        await store.open()
        await stage.until(lambda: stage.scheduler.store.opened)
        await submit(tokenizer, a_submit("a" * 32, PROMPT, max_tokens=1))
        await store.lookup(bytes([TIER_HOST, TIER_HOST]))
        await a_transfer(worker)
        if answer == "bad checksum":
            transferred(worker, checksums=[50, 999])
        else:
            transferred(worker, checksums=[50], ok=b"\1")
        plan = await worker.step()
        good = 1 if answer == "bad checksum" else 0
        assert plan.rows[0].start == good * B
        _, _, release = await store.box.receive(Release)
        assert list(unpack_u32(release.bad)) == list(range(good, 2))
        await detokenizer.finished("a" * 32)
        assert detokenizer.stories["a" * 32].tokens == expected(PROMPT, 1)


async def test_a_lookup_that_is_never_answered_holds_its_request_no_longer_than_its_deadline(places: Places) -> None:
    async with a_store(places) as store, staged(places, CONFIG) as stage:
        worker, tokenizer, detokenizer = await stage.worker(), await stage.tokenizer(), await stage.detokenizer()
        await store.open()
        await stage.until(lambda: stage.scheduler.store.opened)
        await submit(tokenizer, a_submit("a" * 32, PROMPT, max_tokens=1))
        peer, head, lookup = await store.box.receive(Lookup)
        await worker.step()
        await detokenizer.finished("a" * 32)
        assert stage.scheduler.core.statistics().counters["lookup_timeouts"] == 1
        n = len(split_identities(lookup.identities))
        found = Found(
            lease=3,
            tiers=bytes([TIER_HOST] * n),
            slots=pack_u32(range(n)),
            offsets=pack_u64(range(n)),
            generations=pack_u64([1] * n),
            checksums=pack_u64(range(n)),
            epoch=1,
        )
        store.box.answer(peer, head, found)  # late, and it leased something
        while not isinstance(message := (await store.box.receive())[2], Release):
            assert isinstance(message, Reserve)
        assert message.lease == 3


async def test_late_grants_go_back(places: Places) -> None:
    async with a_store(places) as store, staged(places) as stage:
        worker, tokenizer = await stage.worker(), await stage.tokenizer()
        await store.open()
        await stage.until(lambda: stage.scheduler.store.opened)
        await submit(tokenizer, a_submit("a" * 32, PROMPT, max_tokens=1))
        await store.lookup(b"")
        await worker.step()
        peer, head, reserve = await store.box.receive(Reserve)
        stage.scheduler.post(lambda now: stage.scheduler.core.tick(now + 3600))  # the engine's patience is over
        await stage.until(lambda: stage.scheduler.core.statistics().counters["save_unanswered"] == 3)
        n = len(split_identities(reserve.identities))
        granted = Reserved(
            status=bytes([RESERVE_GRANTED] * n),
            slots=pack_u32(range(n)),
            offsets=pack_u64(range(n)),
            generations=pack_u64([9] * n),
            incarnation=1,
        )
        store.box.answer(peer, head, granted)
        _, _, abandon = await store.box.receive(Abandon)
        assert abandon.slots == granted.slots


@pytest.mark.parametrize(
    "fields", [{"slots": b"x"}, {"offsets": b""}, {"tiers": bytes([TIER_HOST] * 99)}, {"checksums": b"1234567"}]
)
async def test_an_answer_whose_fields_do_not_fit_is_no_answer(places: Places, fields: dict[str, bytes]) -> None:
    async with a_store(places) as store, staged(places, PATIENT) as stage:
        worker, tokenizer, detokenizer = await stage.worker(), await stage.tokenizer(), await stage.detokenizer()
        await store.open()
        await stage.until(lambda: stage.scheduler.store.opened)
        await submit(tokenizer, a_submit("a" * 32, PROMPT, max_tokens=1))
        peer, head, _ = await store.box.receive(Lookup)
        good: dict[str, Any] = {
            "tiers": bytes([TIER_HOST]),
            "slots": pack_u32([1]),
            "offsets": pack_u64([1]),
            "generations": pack_u64([1]),
            "checksums": pack_u64([1]),
        }
        store.box.answer(peer, head, Found(lease=4, epoch=1, **(good | fields)))
        await worker.step()
        await detokenizer.finished("a" * 32)
        assert stage.scheduler.drops["malformed"] == 1


async def test_a_store_that_dies_takes_its_leases_along_and_requests_go_on(places: Places) -> None:
    async with staged(places, PATIENT) as stage:
        worker, tokenizer, detokenizer = await stage.worker(), await stage.tokenizer(), await stage.detokenizer()
        async with a_store(places) as store:
            await store.open()
            await stage.until(lambda: stage.scheduler.store.opened)
            await submit(tokenizer, a_submit("a" * 32, PROMPT, max_tokens=2))
            await store.box.receive(Lookup)
        async with stage.working(worker):
            await detokenizer.finished("a" * 32)
        assert detokenizer.stories["a" * 32].tokens == expected(PROMPT, 2)


async def test_grants_whose_bytes_are_complete_are_offered_to_the_next_incarnation(places: Places) -> None:
    async with staged(places) as stage:
        worker, tokenizer = await stage.worker(), await stage.tokenizer()
        async with a_store(places) as store:
            await store.open()
            await stage.until(lambda: stage.scheduler.store.opened)
            await submit(tokenizer, a_submit("a" * 32, PROMPT, max_tokens=1))
            await store.lookup(b"")
            await worker.step()
            await store.reserve()
            await a_transfer(worker)
        await stage.until(lambda: not stage.scheduler.store.opened)
        transferred(worker, checksums=[11, 12, 13])
        async with a_store(places, 2) as store:
            opening = await store.open(kept=b"\1\1\1")
            assert opening.held_slots == pack_u32([0, 1, 2])
            assert opening.held_generations == pack_u64([9, 9, 9])
            commit = await store.commit()
            assert commit.incarnation == 2
            assert commit.checksums == pack_u64([11, 12, 13])


async def test_clear_reaches_every_tier_and_names_each(places: Places) -> None:
    async with a_store(places) as store, staged(places) as stage:
        worker, tokenizer, detokenizer = await stage.worker(), await stage.tokenizer(), await stage.detokenizer()
        await store.open()
        await stage.until(lambda: stage.scheduler.store.opened)
        await submit(tokenizer, a_submit("a" * 32, PROMPT, max_tokens=1))
        await store.lookup(b"")
        await worker.step()
        await detokenizer.finished("a" * 32)
        await store.reserve(status=3)

        async def answer_clear() -> None:
            peer, head, _ = await store.box.receive(Clear)
            cleared = Cleared(blocks={"host": 1, "disk": 2}, bytes={"host": 256, "disk": 512}, epoch=2)
            store.box.answer(peer, head, cleared)

        stage.scheduler.nursery.start_soon(answer_clear)
        cleared = await stage.admin.ask(ClearCache(what="all"), Cleared, deadline_s=5)
        assert cleared.blocks == {"device": 3, "host": 1, "disk": 2}
        assert cleared.bytes["device"] == 3 * FACTS.block_bytes
        assert stage.scheduler.core.statistics().kv.cached == 0


async def test_a_clear_reaches_the_store_while_no_worker_has_loaded_its_model(places: Places) -> None:
    async with a_store(places) as store, staged(places) as stage:
        await store.box.wait_peer("scheduler")

        async def answer_clear() -> None:
            peer, head, asked = await store.box.receive(Clear)
            assert asked.scope == EVERYTHING
            cleared = Cleared(blocks={"host": 1, "disk": 2}, bytes={"host": 256, "disk": 512}, epoch=2)
            store.box.answer(peer, head, cleared)

        stage.scheduler.nursery.start_soon(answer_clear)
        cleared = await stage.admin.ask(ClearCache(what="all"), Cleared, deadline_s=5)
        assert cleared.blocks == {"device": 0, "host": 1, "disk": 2}
        with pytest.raises(RequestFailed, match="no worker has loaded a model"):
            await stage.admin.ask(ClearCache(what="model"), Cleared, deadline_s=5)


async def test_clear_without_a_store_is_no_success(places: Places) -> None:
    async with staged(places) as stage:
        await stage.worker()
        with pytest.raises(RequestFailed, match="the store is away"):
            await stage.admin.ask(ClearCache(what="all"), Cleared, deadline_s=5)
