"""Text of token sequences: the cases people met elsewhere."""

import itertools

import pytest

from services.detokenizer.stops import StopMatcher
from services.detokenizer.text import TextStream


def deltas(pieces: list[bytes], stop: tuple[str, ...] = (), mute: tuple[int, ...] = ()) -> list[str]:
    text = TextStream(pieces.__getitem__, stop, mute)
    for token in range(len(pieces)):
        text.push(token)
    return [text.released(token, token + 1) for token in range(len(pieces))] + [text.tail()]


@pytest.mark.parametrize(("stop", "kept"), [("DEFGHIJ", "ABC "), ("C D", "AB"), ("J K", "ABC DEFGHI")])
def test_t03_no_part_of_a_stop_string_is_ever_shown(stop: str, kept: str) -> None:
    data = b"ABC DEFGHIJ K"
    for size in range(1, len(data) + 1):
        pieces = [data[i : i + size] for i in range(0, len(data), size)]
        assert "".join(deltas(pieces, (stop,))) == kept


def test_t03_text_that_only_began_like_a_stop_string_is_given_in_full() -> None:
    assert deltas([b"ab", b"abx", b"ab"], ("abab!",)) == ["", "ababx", "", "ab"]


def test_of_stops_complete_together_the_longest_cuts() -> None:
    matcher = StopMatcher(("c", "abc", "bc"))
    assert matcher.feed("xabcx") == "x"
    assert matcher.done


def test_the_stop_complete_first_cuts_also_when_another_began_before() -> None:
    matcher = StopMatcher(("abcd", "bc"))
    assert matcher.feed("abcd") == "a"


@pytest.mark.parametrize("text", [" a", "  a    b", "\n x", " "])
def test_t05_leading_and_repeated_spaces_stay(text: str) -> None:
    data = text.encode()
    for places in itertools.chain.from_iterable(itertools.combinations(range(1, len(data)), n) for n in range(3)):
        borders = [0, *places, len(data)]
        pieces = [data[a:b] for a, b in itertools.pairwise(borders)]
        assert "".join(deltas(pieces)) == text


def test_t06_a_character_cut_by_the_end_becomes_one_replacement_in_the_tail() -> None:
    emoji = "🙂".encode()
    for size in (1, 2, 3):
        assert deltas([b"a", *(bytes((byte,)) for byte in emoji[:size])]) == ["a", *[""] * size, "\ufffd"]


def test_special_and_stop_tokens_release_nothing_and_break_no_character() -> None:
    first, last = "é".encode()[:1], "é".encode()[1:]
    assert deltas([first, b"", last, b"end"], mute=(3,)) == ["", "", "é", "", ""]


def test_after_a_stop_string_tokens_release_nothing() -> None:
    text = TextStream([b"a", b"STOP", b"b"].__getitem__, ("STOP",))
    for token in (0, 1, 2):
        text.push(token)
    assert text.stop_at == 2
    assert (text.released(0, 3), text.tail()) == ("a", "")


def test_long_outputs_cost_a_constant_a_token() -> None:
    """Counts the bytes asked for: each token is read once, whatever came before."""
    asked = []

    def token_bytes(token: int) -> bytes:
        asked.append(token)
        return b"ab"

    text = TextStream(token_bytes, ("abx", "bb"))
    for token in range(20_000):
        text.push(token)
    assert len(asked) == 20_000
    assert len(text.released(0, 20_000) + text.tail()) == 40_000
