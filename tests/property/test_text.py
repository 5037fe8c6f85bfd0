"""Joined deltas equal the full decode with stops applied, however the bytes are cut into tokens."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers

from services.detokenizer.text import TextStream

SAMPLE = "👩‍👩‍👧 ✅ 한국어 ďábel"
HARD = st.sampled_from([*"ab cdDEFGHIJK\n", "é", "✅", "👩", "\u200d", "가"])


def apply_stops(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The naive rule: cut before the first completed stop string, before the longest of those that end together."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def stream(pieces: list[bytes], stops: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    """Feeds the pieces as tokens 0..n-1; the deltas, one a token, and the tail last."""
    text = TextStream(pieces.__getitem__, stops)
    deltas = []
    for token in range(len(pieces)):
        text.push(token)
        deltas.append(text.released(token, token + 1))
    return [*deltas, text.tail()], text


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    borders = [0, *sorted({place for place in places if 0 < place < len(data)}), len(data)]
    return [data[a:b] for a, b in pairwise(borders)]


def test_t01_every_split_of_emoji_and_cjk_in_two_gives_whole_characters() -> None:
    data = SAMPLE.encode()
    for place in range(1, len(data)):
        deltas, _ = stream([data[:place], data[place:]])
        assert "".join(deltas) == SAMPLE
        assert not any("\ufffd" in delta for delta in deltas)


@given(st.lists(st.integers(1, len(SAMPLE.encode()) - 1)))
def test_t01_any_split_of_emoji_and_cjk_gives_whole_characters(places: list[int]) -> None:
    deltas, _ = stream(cut(SAMPLE.encode(), places))
    assert "".join(deltas) == SAMPLE
    assert not any("\ufffd" in delta for delta in deltas)


@given(st.lists(st.binary(max_size=5), max_size=20))
def test_t06_any_bytes_join_to_the_full_lossy_decode(pieces: list[bytes]) -> None:
    deltas, _ = stream(pieces)
    assert "".join(deltas) == b"".join(pieces).decode("utf-8", "replace")


@given(st.binary(max_size=24), st.lists(st.integers(1, 23)))
def test_t01_equals_the_byte_level_decoder_of_the_tokenizers_package(data: bytes, places: list[int]) -> None:
    alphabet = byte_alphabet()
    words = ["".join(alphabet[byte] for byte in piece) for piece in cut(data, places)]
    deltas, _ = stream(cut(data, places))
    assert "".join(deltas) == decoders.ByteLevel().decode(words)


def byte_alphabet() -> list[str]:
    """Byte -> the character that stands for it in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table, extra = [], 0
    for byte in range(256):
        if byte in printable:
            table.append(chr(byte))
        else:
            table.append(chr(256 + extra))
            extra += 1
    assert sorted(table) == sorted(pre_tokenizers.ByteLevel.alphabet())
    return table


@given(
    st.lists(HARD, max_size=40).map("".join),
    st.lists(st.integers(1, 100)),
    st.lists(st.lists(HARD, min_size=1, max_size=4).map("".join), max_size=4),
)
def test_t03_stops_cut_the_text_as_on_the_whole_text(text: str, places: list[int], stops: list[str]) -> None:
    pieces = cut(text.encode(), places)
    deltas, seen = stream(pieces, stops)
    expected, stopped = apply_stops(text, stops)
    assert "".join(deltas) == expected
    assert (seen.stop_at is not None) == stopped
    if seen.stop_at is not None:  # complete with that token, not with the one before
        assert not apply_stops(b"".join(pieces[: seen.stop_at - 1]).decode("utf-8", "ignore"), stops)[1]


@given(
    st.lists(HARD, max_size=30).map("".join),
    st.lists(st.integers(1, 60)),
    st.lists(st.lists(HARD, min_size=1, max_size=3).map("".join), max_size=3),
    st.data(),
)
def test_any_run_of_tokens_releases_the_same_text_again(
    text: str, places: list[int], stops: list[str], data: st.DataObject
) -> None:
    pieces = cut(text.encode(), places)
    deltas, seen = stream(pieces, stops)
    start = data.draw(st.integers(0, len(pieces)))
    end = data.draw(st.integers(start, len(pieces)))
    assert seen.released(start, end) == "".join(deltas[start:end])


@given(st.lists(HARD, max_size=30).map("".join), st.lists(st.integers(1, 60)), st.integers(0, 30))
def test_text_so_far_never_depends_on_later_tokens(text: str, places: list[int], upto: int) -> None:
    pieces = cut(text.encode(), places)
    whole, _ = stream(pieces, ("ab", "EF"))
    part, _ = stream(pieces[:upto], ("ab", "EF"))
    assert part[:-1] == whole[: len(part) - 1]
