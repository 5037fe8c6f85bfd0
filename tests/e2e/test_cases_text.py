"""Cases of text on a real stack: the model is made to "generate" chosen bytes, one a token, so every split occurs."""

from collections.abc import AsyncIterator, Iterator

import pytest

from ops.client import Client, Result, Stream
from ops.stream import joined
from shared.messages.front import ChatMessage, Chunk, Sampling
from tests.e2e.kit import Watched, client_of, settled, shared_stack

SPACES = "  a    b\n x "
STOPPED = "ABC DEFGHIJ K"
WIDE = " 👩‍👩‍👧 ✅ 한국어 ďábel"
EMOJI = "🙂"
TEXT = SPACES + STOPPED + WIDE + EMOJI
DATA = TEXT.encode()


@pytest.fixture(scope="module")
def shared() -> Iterator[Watched]:
    with shared_stack(PERDURE_FAULTS__FIXED_IDS=",".join(map(str, DATA))) as made:
        yield made


@pytest.fixture
async def made(shared: Watched) -> AsyncIterator[Watched]:
    yield shared
    await settled(shared)


def asked(client: Client, endpoint: str, tokens: int = len(DATA), stop: tuple[str, ...] = ()) -> Stream:
    """The request as a completion or as a chat."""
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, stop=stop)
    if endpoint == "chat":
        return client.generate(messages=[ChatMessage(role="user", content="echo")], sampling=sampling)
    return client.generate(prompt="echo", sampling=sampling)


async def both_ways(client: Client, stream: Stream) -> tuple[list[Chunk], Result]:
    """Every delta as it is generated, and the whole afterwards."""
    async with stream:
        deltas = [chunk async for chunk in stream]
    async with client.follow(stream.id) as again:
        whole = await again.result()
    streamed = joined(stream.id, deltas)
    assert (streamed.ids, streamed.text, streamed.finish) == (whole.ids, whole.text, whole.finish)
    assert whole.finish.usage.completion_tokens == len(whole.ids)
    return deltas, whole


async def test_t01_t05_characters_and_spaces_cut_by_tokens_arrive_whole(made: Watched) -> None:
    async with client_of(made) as client:
        for endpoint in ("completion", "chat"):
            deltas, whole = await both_ways(client, asked(client, endpoint))
            assert whole.text == TEXT
            assert not any("\ufffd" in delta.text for delta in deltas)
            assert len(deltas) > 1


@pytest.mark.parametrize("endpoint", ["completion", "chat"])
@pytest.mark.parametrize(("stop", "kept"), [("DEFGHIJ", "ABC "), ("C D", "AB"), ("J K", "ABC DEFGHI")])
async def test_t03_a_stop_string_over_tokens_ends_the_text_before_it(
    made: Watched, endpoint: str, stop: str, kept: str
) -> None:
    async with client_of(made) as client:
        deltas, whole = await both_ways(client, asked(client, endpoint, stop=(stop,)))
    assert whole.text == SPACES + kept
    assert whole.finish.reason == "stop"
    assert whole.finish.usage.completion_tokens == len((SPACES + kept + stop).encode())
    shown = ""
    for delta in deltas:
        shown += delta.text
        assert (SPACES + kept).startswith(shown)


@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_t06_an_end_in_the_middle_of_a_character_shows_one_replacement_in_its_tail(
    made: Watched, cut: int
) -> None:
    whole_characters = len(DATA) - len(EMOJI.encode())
    async with client_of(made) as client:
        deltas, whole = await both_ways(client, asked(client, "completion", whole_characters + cut))
    assert whole.text == TEXT.removesuffix(EMOJI) + "\ufffd"
    assert whole.text == DATA[: whole_characters + cut].decode(errors="replace")
    assert whole.finish.reason == "length"
    assert not any("\ufffd" in delta.text for delta in deltas[:-1])
