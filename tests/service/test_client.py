"""The client library against the real tokenizer and detokenizer, with the scheduler's side played by hand."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from ops import waiting
from ops.client import Client, RequestRejected, Server, ServiceAway, Stream, connected
from services.detokenizer.actor import Detokenizer
from services.tokenizer.actor import Tokenizer
from shared.config import Config, FrontConfig, ModelConfig, SuperviseConfig
from shared.messages.front import Chunk, Generate, Sampling
from shared.paths import Places
from shared.testing import running
from tests.front_kit import free_ports, give_key
from tests.service.played_scheduler import Journal, PlayedScheduler

ID = "ab" * 16
CONFIG = Config(model=ModelConfig(source="toy:1"))


def scheduler(places: Places, journal: Journal, incarnation: int = 1) -> AbstractAsyncContextManager[PlayedScheduler]:
    return running(PlayedScheduler, places, CONFIG, incarnation=incarnation, journal=journal)


@asynccontextmanager
async def stack(places: Places) -> AsyncIterator[tuple[PlayedScheduler, Client]]:
    async with (
        scheduler(places, {}) as played,
        running(Tokenizer, places, CONFIG),
        running(Detokenizer, places, CONFIG),
        connected(places) as client,
    ):
        yield played, client


def request(prompt: str = "hi", **more: object) -> Generate:
    return Generate(id=ID, prompt=prompt, **more)  # type: ignore[arg-type]


async def read(stream: Stream, tokens: int) -> str:
    """Text of the next `tokens` tokens."""
    text, last = "", None
    while last is None or last.end < tokens:
        last = await anext(stream)
        text += last.text
    return text


async def test_a_request_is_streamed_to_its_finish(places: Places) -> None:
    async with stack(places) as (played, client), client.generate(request("héllo")) as stream:
        assert await stream.accepted() == 6
        played.draw(ID, "é".encode()[:1])
        assert (await anext(stream)).text == ""
        played.draw(ID, "é".encode()[1:] + b"!")
        played.end(ID)
        result = await stream.result()
        assert (result.ids, result.text) == ((0xA9, ord("!")), "é!")
        assert result.finish.reason == "length"
        assert result.finish.usage.completion_tokens == 3
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert played.cancels == []


async def test_a_refusal_says_code_and_numbers(places: Places) -> None:
    async with stack(places) as (played, client):
        with pytest.raises(RequestRejected, match="at least 1") as caught:
            async with client.generate(request(sampling=Sampling(max_tokens=0))) as stream:
                await anext(stream)
        assert caught.value.rejected.numbers == {"max_tokens": 0}
        assert played.cancels == []


async def test_leaving_early_cancels_and_leaving_a_detached_request_does_not(places: Places) -> None:
    async with stack(places) as (played, client):
        async with client.generate(request()) as stream:
            await stream.accepted()
            played.draw(ID, b"a")
            await anext(stream)
        assert [cancel.id for cancel in played.cancels] == [ID]
        other = Generate(id="cd" * 16, prompt="x", detached=True)
        async with client.generate(other) as stream:
            await stream.accepted()
        assert len(played.cancels) == 1
        played.draw(other.id, b"yz")
        played.end(other.id)
        async with client.follow(other.id) as stream:
            assert (await stream.result()).text == "yz"


async def test_ctrl_c_in_the_middle_cancels_the_request(places: Places) -> None:
    async with stack(places) as (played, client):
        with trio.CancelScope() as scope:
            async with client.generate(request()) as stream:
                await stream.accepted()
                scope.cancel()
                await anext(stream)
        assert [cancel.reason for cancel in played.cancels] == ["client"]


async def test_i10_the_detokenizer_dies_again_and_again_and_no_token_is_lost_or_doubled(places: Places) -> None:
    async with scheduler(places, {}) as played, running(Tokenizer, places, CONFIG), connected(places) as client:
        async with client.generate(request()) as stream:
            text = ""
            for life in range(1, 4):
                async with running(Detokenizer, places, CONFIG, incarnation=life):
                    await stream.accepted()
                    played.draw(ID, b"abc")
                    text += await read(stream, 3 * life)
            played.draw(ID, b"lost in between")
            async with running(Detokenizer, places, CONFIG, incarnation=9):
                played.end(ID)
                result = await stream.result()
        assert text + result.text == "abcabcabclost in between"


async def test_the_scheduler_dies_in_the_middle_and_the_stream_goes_on(places: Places) -> None:
    journal: Journal = {}
    async with (
        running(Tokenizer, places, CONFIG),
        running(Detokenizer, places, CONFIG),
        connected(places) as client,
        client.generate(request()) as stream,
    ):
        async with scheduler(places, journal, 1) as played:
            await stream.accepted()
            played.draw(ID, b"ab")
            assert await read(stream, 2) == "ab"
        journal[ID].tokens += b"c"  # journaled, and killed before it was emitted
        async with scheduler(places, journal, 2) as played:
            assert await read(stream, 3) == "c"
            played.draw(ID, b"d")
            played.end(ID)
            assert (await stream.result()).text == "d"


async def test_the_tokenizer_dies_before_it_answers_and_the_same_request_is_sent_again(places: Places) -> None:
    journal: Journal = {}
    async with (
        running(Detokenizer, places, CONFIG),
        connected(places) as client,
        client.generate(request()) as stream,
    ):
        impatient = Config(model=CONFIG.model, supervise=SuperviseConfig(grace_s=0.01))  # no drain, as if killed
        async with running(Tokenizer, places, impatient, incarnation=1) as tokenizer:
            while not tokenizer.snapshot()["in_work"]:
                await trio.lowlevel.checkpoint()
        async with scheduler(places, journal) as played, running(Tokenizer, places, CONFIG, incarnation=2):
            await stream.accepted()
            assert list(journal) == [ID]
            played.end(ID)
            assert (await stream.result()).ids == ()


async def test_t07_a_slow_reader_loses_nothing_and_holds_few_chunks(places: Places) -> None:
    data = bytes(97 + n % 26 for n in range(300))
    async with stack(places) as (played, client), client.generate(request(), credit=4) as stream:
        await stream.accepted()
        for n in range(len(data)):
            played.draw(ID, data[n : n + 1])
            await trio.lowlevel.checkpoint()
        played.end(ID)
        chunks: list[Chunk] = []
        async for chunk in stream:
            chunks.append(chunk)
            assert len(stream._chunks) <= 4
            await trio.testing.wait_all_tasks_blocked(0.001)
        assert "".join(chunk.text for chunk in chunks) == data.decode()
        assert len(chunks) < 100


async def test_many_streams_share_one_client(places: Places) -> None:
    async with stack(places) as (played, client):
        texts: dict[str, str] = {}

        async def one(n: int) -> None:
            wanted = Generate(id=f"{n:032x}", prompt=str(n))
            async with client.generate(wanted) as stream:
                await stream.accepted()
                played.draw(wanted.id, f"answer {n}".encode())
                played.end(wanted.id)
                texts[wanted.id] = (await stream.result()).text

        async with trio.open_nursery() as nursery:
            for n in range(50):
                nursery.start_soon(one, n)
    assert texts == {f"{n:032x}": f"answer {n}" for n in range(50)}


async def test_a_request_that_nobody_knows_any_more_is_not_found(places: Places) -> None:
    async with (
        scheduler(places, {}),
        running(Tokenizer, places, CONFIG),
        running(Detokenizer, places, CONFIG, park_s=0.1),
        connected(places) as client,
    ):
        with pytest.raises(RequestRejected, match="not_found"):
            async with client.follow(ID) as stream:
                await anext(stream)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at services a while earlier than people need it."""
    monkeypatch.setattr(waiting, "QUIET_S", 0.15)
    monkeypatch.setattr(waiting, "ANSWER_S", 0.3)
    monkeypatch.setattr(waiting, "SERVICES", ("scheduler", "tokenizer", "detokenizer"))


class Notices:
    """What the client said it waits for."""

    def __init__(self) -> None:
        self.said: list[tuple[str, ...]] = []
        self._send, self._receive = trio.open_memory_channel[tuple[str, ...]](100)

    def __call__(self, away: tuple[str, ...]) -> None:
        self._send.send_nowait(away)

    async def next(self) -> tuple[str, ...]:
        with trio.fail_after(10):
            return await self._receive.receive()


@pytest.mark.usefixtures("hasty")
async def test_who_is_waited_for_is_told_and_that_it_is_back(places: Places) -> None:
    notices = Notices()
    texts: list[str] = []
    async with (
        scheduler(places, {}) as played,
        running(Tokenizer, places, CONFIG),
        connected(places, notice=notices) as client,
        client.generate(request()) as stream,
        trio.open_nursery() as nursery,
    ):

        async def read_all() -> None:
            texts.append((await stream.result()).text)

        nursery.start_soon(read_all)
        assert await notices.next() == ("detokenizer",)
        async with running(Detokenizer, places, CONFIG):
            played.draw(ID, b"a")
            assert await notices.next() == ()
            played.worker_ready = False
            assert await notices.next() == ("worker",)
            played.draw(ID, b"b")
            played.end(ID)
            assert await notices.next() == ()
            while not texts:
                await trio.lowlevel.checkpoint()
    assert texts == ["ab"]


@pytest.mark.usefixtures("hasty")
async def test_a_service_that_stays_away_ends_the_wait_with_its_name(places: Places) -> None:
    async with (
        scheduler(places, {}),
        running(Tokenizer, places, CONFIG),
        connected(places, recovery_timeout_s=0.5) as client,
    ):
        with pytest.raises(ServiceAway, match="detokenizer") as caught:
            async with client.generate(request()) as stream:
                await anext(stream)
    assert caught.value.services == ("detokenizer",)


@asynccontextmanager
async def remote_front(places: Places) -> AsyncIterator[Server]:
    """Tokenizer and detokenizer over TCP; the key and address of a user."""
    port, key = free_ports(), give_key(places, "alice")
    config = Config(model=ModelConfig(source="toy:1"), front=FrontConfig(tcp=f"127.0.0.1:{port}"))
    async with running(Tokenizer, places, config), running(Detokenizer, places, config):
        yield Server("127.0.0.1", port, key)


@pytest.mark.usefixtures("hasty")
async def test_over_tcp_an_engine_that_stays_away_after_acceptance_ends_the_wait_with_its_name(
    places: Places, tmp_path: Path
) -> None:
    notices = Notices()
    async with (
        remote_front(places) as server,
        connected(Places(tmp_path / "elsewhere"), notice=notices, recovery_timeout_s=0.5, server=server) as client,
        client.generate(request()) as stream,
    ):
        async with scheduler(places, {}) as played:
            assert await stream.accepted() == 2
            played.draw(ID, b"a")
            assert (await anext(stream)).text == "a"
        with trio.fail_after(20), pytest.raises(ServiceAway, match="scheduler") as caught:
            await anext(stream)
    assert caught.value.services == ("scheduler",)
    assert await notices.next() == ("scheduler",)


@pytest.mark.usefixtures("hasty")
async def test_over_tcp_a_worker_is_waited_for_and_an_engine_that_comes_back_goes_on(
    places: Places, tmp_path: Path
) -> None:
    notices, journal = Notices(), Journal()
    async with (
        remote_front(places) as server,
        connected(Places(tmp_path / "elsewhere"), notice=notices, recovery_timeout_s=3.0, server=server) as client,
        client.generate(request()) as stream,
        trio.open_nursery() as nursery,
    ):

        async def the_rest() -> None:
            assert (await stream.result()).text == "b"

        async with scheduler(places, journal) as played:
            assert await stream.accepted() == 2
            played.draw(ID, b"a")
            assert (await anext(stream)).text == "a"
            nursery.start_soon(the_rest)
            played.worker_ready = False
            assert await notices.next() == ("worker",)
        assert await notices.next() == ("scheduler",)
        async with scheduler(places, journal, 2) as played:
            played.draw(ID, b"b")
            played.end(ID)
            assert await notices.next() == ()


@pytest.mark.usefixtures("hasty")
async def test_silence_while_all_are_there_is_no_reason_to_complain(places: Places) -> None:
    notices = Notices()
    async with (
        scheduler(places, {}) as played,
        running(Tokenizer, places, CONFIG),
        running(Detokenizer, places, CONFIG),
        connected(places, notice=notices, recovery_timeout_s=0.1) as client,
        client.generate(request()) as stream,
    ):
        await stream.accepted()
        with trio.move_on_after(1.5) as waited:
            await anext(stream)
        assert waited.cancelled_caught
        played.end(ID)
        assert (await stream.result()).ids == ()
    assert notices._receive.statistics().current_buffer_used == 0


async def test_a_chunk_whose_tokens_are_not_what_it_says_is_dropped_and_the_right_one_taken(places: Places) -> None:
    async with stack(places) as (played, client), client.generate(request()) as stream:
        await stream.accepted()
        peer = client.detokenizer.peer or await client.detokenizer.wait_up()
        for start, end, ids in ((0, 2, b"12345"), (0, 1 << 40, b""), (-4, 0, b""), (3, 1, b"")):
            client._chunk(peer, Chunk(id=ID, start=start, end=end, ids=ids, text="?"))
        assert client.drops["bad_chunk"] == 4
        played.draw(ID, b"ab")
        played.end(ID)
        assert (await stream.result()).text == "ab"
