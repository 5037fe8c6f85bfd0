"""The detokenizer over real sockets, with the scheduler's and the client's side played by hand."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
import trio

from services.detokenizer.actor import Detokenizer
from services.detokenizer.requests import PROGRESS_WINDOW
from shared.config import Config, ModelConfig, SchedulerConfig
from shared.messages.base import pack_u32, unpack_u32
from shared.messages.engine import CancelRequest, Forget, Opening, Progress, StopAt, Synced
from shared.messages.front import Attach, Attached, Chunk, Credit, Finish, FinishReason, Rejected, Timing, Usage
from shared.messages.hello import Bye, Snapshot, Status
from shared.paths import Places
from shared.peers import DeadlinePassed, Peer
from shared.testing import TestMailbox, TestPeer, dialled, mailbox_of, running

ID = "ab" * 16
CONFIG = Config(model=ModelConfig(source="toy:1"), scheduler=SchedulerConfig(grace_s=0.3))
Scheduler = mailbox_of("scheduler", frozenset({"detokenizer", "tokenizer"}))


def finish(tokens: int, reason: FinishReason = "length") -> Finish:
    usage = Usage(prompt_tokens=3, completion_tokens=tokens, cached_tokens=0, cached_by_tier={})
    return Finish(reason=reason, usage=usage, timing=Timing(queued_s=0, ttft_s=0, total_s=0))


def opening(stop: tuple[str, ...] = (), principal: str = "local", *, detached: bool = True) -> Opening:
    return Opening(principal=principal, prompt_tokens=3, stop=stop, stop_ids=(256,), logprobs=False, detached=detached)


def progress(start: int, data: bytes, opens: Opening | None = None, end: Finish | None = None) -> Progress:
    return Progress(id=ID, start=start, ids=pack_u32(list(data)), opening=opens, finish=end)


@asynccontextmanager
async def scheduler_and_detokenizer(places: Places, park_s: float = 5.0) -> AsyncIterator[tuple[TestMailbox, Peer]]:
    """The detokenizer beside a scripted scheduler that has told all it knows (nothing)."""
    async with running(Scheduler, places, CONFIG) as scheduler, running(Detokenizer, places, CONFIG, park_s=park_s):
        yield scheduler, await synced(scheduler)


async def synced(scheduler: TestMailbox, *replay: Progress) -> Peer:
    """Waits for the detokenizer's connection and replays to it."""
    peer, _, credit = await scheduler.receive(Credit)
    assert credit.chunks == PROGRESS_WINDOW
    for message in replay:
        peer.send(message)
    peer.send(Synced())
    return peer


async def follow(node: TestPeer, detokenizer: Peer, start: int = 0, *, credit: int = 64) -> list[Chunk]:
    """Attaches and reads to the end, one credit back per chunk."""
    assert await detokenizer.ask(Attach(id=ID, start=start, credit=credit), Attached, deadline_s=5) == Attached(id=ID)
    chunks: list[Chunk] = []
    while not chunks or chunks[-1].finish is None:
        chunks.append(await node.receive(Chunk))
        detokenizer.send(Credit(id=ID, chunks=1))
    return chunks


def check_joined(chunks: list[Chunk], start: int, data: bytes, text: str) -> None:
    assert chunks[0].start == start
    for before, after in pairwise(chunks):
        assert before.end == after.start
    assert b"".join(bytes(unpack_u32(chunk.ids).tolist()) for chunk in chunks) == data
    assert "".join(chunk.text for chunk in chunks) == text


@pytest.mark.parametrize(("stop", "kept"), [("DEFGHIJ", "ABC "), ("C D", "AB"), ("J K", "ABC DEFGHI")])
async def test_t03_a_stop_string_over_token_borders_ends_the_text_before_it(
    places: Places, stop: str, kept: str
) -> None:
    data = b"ABC DEFGHIJ K"
    at = data.index(stop.encode()) + len(stop)
    async with scheduler_and_detokenizer(places) as (scheduler, peer):
        async with dialled("client", "detokenizer", places) as (node, detokenizer), trio.open_nursery() as nursery:
            chunks: list[Chunk] = []

            async def read() -> None:
                chunks.extend(await follow(node, detokenizer))

            nursery.start_soon(read)
            peer.send(progress(0, b"", opening((stop,))))
            for n in range(len(data)):
                peer.send(progress(n, data[n : n + 1]))
            _, _, told = await scheduler.receive(StopAt)
            assert told == StopAt(id=ID, at=at)
            peer.send(progress(len(data), b"", end=finish(at, "stop")))
        check_joined(chunks, 0, data[:at], kept)
        assert chunks[-1].finish == finish(at, "stop")
        async with dialled("client", "detokenizer", places) as (node, detokenizer):
            check_joined(await follow(node, detokenizer), 0, data[:at], kept)


async def test_t01_i10_attaching_again_at_any_token_neither_loses_nor_doubles(places: Places) -> None:
    text = "👩‍👩‍👧 ✅ 한국어 ďábel"
    data = text.encode()
    async with scheduler_and_detokenizer(places) as (_, peer):
        peer.send(progress(0, b"", opening()))
        collected, start = "", 0
        for n in range(0, len(data), 5):  # a connection of its own for every five bytes
            async with dialled("client", "detokenizer", places) as (node, detokenizer):
                assert await detokenizer.ask(Attach(id=ID, start=start), Attached, deadline_s=5)
                peer.send(progress(n, data[n : n + 5]))
                chunk = await node.receive(Chunk)
                assert chunk.start == start
                assert "\ufffd" not in chunk.text
                collected, start = collected + chunk.text, chunk.end
        peer.send(progress(len(data), b"", end=finish(len(data))))
        async with dialled("client", "detokenizer", places) as (node, detokenizer):
            rest = await follow(node, detokenizer, start)
        assert collected + "".join(chunk.text for chunk in rest) == text


async def test_t07_a_slow_reader_gets_every_word_in_fewer_chunks(places: Places) -> None:
    data = bytes(97 + n % 26 for n in range(300))
    async with scheduler_and_detokenizer(places) as (_, peer):
        peer.send(progress(0, b"", opening()))
        async with dialled("client", "detokenizer", places) as (node, detokenizer):
            assert await detokenizer.ask(Attach(id=ID, credit=1), Attached, deadline_s=5)
            peer.send(progress(0, data[:1]))
            chunks = [await node.receive(Chunk)]
            for n in range(1, 300):  # all of it comes while the reader sleeps on its only chunk
                peer.send(progress(n, data[n : n + 1]))
            peer.send(progress(300, b"", end=finish(300)))
            async with dialled("admin", "detokenizer", places) as (_, admin):
                tokens = 0
                while tokens < 300:
                    snapshot = await admin.ask(Status(), Snapshot, deadline_s=5)
                    tokens = snapshot.data["tokens"]
                assert snapshot.data["stalled"] == 1
            while chunks[-1].finish is None:
                detokenizer.send(Credit(id=ID, chunks=1))
                chunks.append(await node.receive(Chunk))
        assert len(chunks) == 2
        check_joined(chunks, 0, data, data.decode())


async def test_i05_two_thousand_requests_for_a_client_that_does_not_read_then_reads_all(places: Places) -> None:
    ids = [f"{n:032x}" for n in range(2000)]
    async with scheduler_and_detokenizer(places) as (_, peer):
        async with dialled("client", "detokenizer", places) as (node, detokenizer):
            for request_id in ids:
                detokenizer.send(Attach(id=request_id, credit=1))
            for request_id in ids:
                peer.send(Progress(id=request_id, start=0, ids=pack_u32([65]), opening=opening()))
                await trio.lowlevel.checkpoint()
            for request_id in ids:
                peer.send(Progress(id=request_id, start=1, ids=pack_u32([66, 67]), finish=finish(3)))
                await trio.lowlevel.checkpoint()
            text = dict.fromkeys(ids, "")
            open_ids = set(ids)
            while open_ids:
                chunk = await node.receive(Chunk)
                text[chunk.id] += chunk.text
                if chunk.finish is not None:
                    open_ids.remove(chunk.id)
                else:
                    detokenizer.send(Credit(id=chunk.id, chunks=1))
        assert set(text.values()) == {"ABC"}


async def test_a_new_detokenizer_serves_what_the_scheduler_replays(places: Places) -> None:
    async with running(Scheduler, places, CONFIG) as scheduler:
        async with running(Detokenizer, places, CONFIG, incarnation=1):
            await synced(scheduler, progress(0, b"ab ST", opening(("STOP",))))
            async with dialled("client", "detokenizer", places) as (node, detokenizer):
                await detokenizer.ask(Attach(id=ID), Attached, deadline_s=5)
                first = await node.receive(Chunk)
                assert (first.end, first.text) == (5, "ab ")
        async with running(Detokenizer, places, CONFIG, incarnation=2):
            peer = await synced(scheduler, progress(0, b"ab ST", opening(("STOP",))))
            async with dialled("client", "detokenizer", places) as (node, detokenizer):
                await detokenizer.ask(Attach(id=ID, start=5), Attached, deadline_s=5)
                peer.send(progress(5, b"UV"))
                second = await node.receive(Chunk)
                assert (second.start, second.end, second.text) == (5, 7, "STUV")


async def test_a_stream_goes_on_over_a_scheduler_restart_on_the_same_connection(places: Places) -> None:
    async with running(Detokenizer, places, CONFIG), dialled("client", "detokenizer", places) as (node, detokenizer):
        async with running(Scheduler, places, CONFIG, incarnation=1) as scheduler:
            await synced(scheduler, progress(0, b"ab", opening()))
            await detokenizer.ask(Attach(id=ID), Attached, deadline_s=5)
            chunks = [await node.receive(Chunk)]
        async with running(Scheduler, places, CONFIG, incarnation=2) as scheduler:
            await synced(scheduler, progress(0, b"abc", opening()), progress(3, b"d", end=finish(4)))
            while chunks[-1].finish is None:
                chunks.append(await node.receive(Chunk))
        check_joined(chunks, 0, b"abcd", "abcd")


async def test_an_attach_waits_for_its_request_and_an_unknown_one_is_not_found(places: Places) -> None:
    async with (
        scheduler_and_detokenizer(places, park_s=0.2) as (_, peer),
        dialled("client", "detokenizer", places) as (node, detokenizer),
    ):
        refused = await detokenizer.ask(Attach(id="cd" * 16), (Attached, Rejected), deadline_s=5)
        assert isinstance(refused, Rejected)
        assert refused.code == "not_found"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow, node, detokenizer)
            peer.send(progress(0, b"hi", opening(), finish(2)))


async def test_while_the_scheduler_is_away_an_attach_is_neither_found_nor_refused(places: Places) -> None:
    async with (
        running(Detokenizer, places, CONFIG, park_s=0.05) as actor,
        dialled("client", "detokenizer", places) as (node, detokenizer),
    ):
        with pytest.raises(DeadlinePassed):
            await detokenizer.ask(Attach(id=ID), (Attached, Rejected), deadline_s=0.6)
        assert actor.requests.statistics().parked == 1
        async with running(Scheduler, places, CONFIG) as scheduler:
            await synced(scheduler, progress(0, b"hi", opening(), finish(2)))
            assert (await node.receive(Chunk)).text == "hi"


async def test_a_request_whose_client_left_is_cancelled_after_the_grace(places: Places) -> None:
    async with scheduler_and_detokenizer(places) as (scheduler, peer):
        peer.send(progress(0, b"a", opening(detached=False)))
        async with dialled("client", "detokenizer", places) as (node, detokenizer):
            await detokenizer.ask(Attach(id=ID), Attached, deadline_s=5)
            await node.receive(Chunk)
            detokenizer.send(Bye())
        _, _, cancel = await scheduler.receive(CancelRequest)
        assert cancel == CancelRequest(id=ID, principal="local", reason="abandoned")


async def test_another_principals_request_is_not_found(places: Places) -> None:
    async with scheduler_and_detokenizer(places) as (_, peer):
        peer.send(progress(0, b"a", opening(principal="someone else")))
        async with dialled("client", "detokenizer", places) as (_, detokenizer):
            refused = await detokenizer.ask(Attach(id=ID), (Attached, Rejected), deadline_s=5)
            assert isinstance(refused, Rejected)
            assert refused.code == "not_found"


async def test_a_forgotten_request_is_not_found(places: Places) -> None:
    async with scheduler_and_detokenizer(places, park_s=0.0) as (_, peer):
        peer.send(progress(0, b"a", opening(), finish(1)))
        peer.send(Forget(id=ID))
        async with dialled("admin", "detokenizer", places) as (_, admin):
            requests = 1
            while requests:
                requests = (await admin.ask(Status(), Snapshot, deadline_s=5)).data["requests"]
        async with dialled("client", "detokenizer", places) as (_, detokenizer):
            refused = await detokenizer.ask(Attach(id=ID), (Attached, Rejected), deadline_s=5)
            assert isinstance(refused, Rejected)
