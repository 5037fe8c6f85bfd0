"""The comparison with other engines: what is counted, which setting is best, when a bar is held."""

import socket
import threading
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.bench.peers.campaign import Side, Tongue, Wrong, best_of, checked, rounds_of
from ops.bench.peers.http_stream import HOST, posted, streamed
from ops.bench.peers.interface import Place, Timeline, decode_rate, whole_rate
from ops.bench.peers.rows import MEASUREMENTS, Bar, Measurement, Row
from ops.bench.peers.verdict import judged

MARKER = b'"stop":false'


def timeline(first: float, every: float, tokens: int) -> Timeline:
    return Timeline(tuple(first + every * number for number in range(tokens)), tokens)


def test_rates_of_streams_that_start_one_after_the_other() -> None:
    streams = [timeline(1.0, 0.5, 21), timeline(3.0, 0.5, 21)]
    assert whole_rate(streams) == pytest.approx(42 / 13.0)
    assert decode_rate(streams) == pytest.approx(4.0)  # from 3.0 to 11.0 two tokens each half second
    assert decode_rate([timeline(0.0, 0.1, 5), timeline(9.0, 0.1, 5)]) == 0.0


def test_a_piece_of_several_tokens_counts_for_all_of_them() -> None:
    assert decode_rate([Timeline((0.0, 1.0, 2.0), 6)]) == pytest.approx(2.0)
    assert Timeline((1.0, 2.0, 3.0), 5).itl_s == pytest.approx(0.5)


def server(answers: Sequence[Sequence[bytes]]) -> int:
    """Answers one connection after the other with the given pieces; its port."""
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        with listener:
            for pieces in answers:
                connection, _ = listener.accept()
                with connection:
                    asked = b""
                    while b"\r\n\r\n" not in asked or not asked.endswith(b"}"):
                        asked += connection.recv(1 << 16)
                    for piece in pieces:
                        connection.sendall(piece)

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


@given(cuts=st.lists(st.integers(0, 400), max_size=12))
def test_pieces_are_counted_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    whole = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(b'data: {"n":%d,"stop":false}\n\n' % n for n in range(9))
    whole += b'data: {"stop":true}\n\n'
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    port = server([[whole[a:b] for a, b in pairwise(edges)]])
    found = streamed(port, "/completion", [{"prompt": [1]}], MARKER, 9)
    assert len(found[0].arrivals) == 9
    assert list(found[0].arrivals) == sorted(found[0].arrivals)


def test_a_refusal_is_an_error_with_its_text() -> None:
    refusal = [b"HTTP/1.1 400 Bad Request\r\n\r\n", b'{"error": "context too small"}']
    with pytest.raises(RuntimeError, match="context too small"):
        streamed(server([refusal]), "/completion", [{}], MARKER, 4)
    with pytest.raises(RuntimeError, match="context too small"):
        posted(server([refusal]), "/completion", {})


def test_a_whole_answer_may_come_in_chunks() -> None:
    chunked = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n{"text":\r\n5\r\n "a"}\r\n0\r\n\r\n'
    assert posted(server([[chunked]]), "/v1/completions", {}) == {"text": "a"}


LESS = Row("ttft", "s", more=False, bars=(Bar(1.2, at_most=True), Bar(0.7, at_most=True, peer="b")))
MORE = Row("rate", "tokens/s", more=True, bars=(Bar(1.25, at_most=False),))


def test_the_best_setting_depends_on_what_is_better() -> None:
    values = {"on": 2.0, "off": 1.0}
    assert (best_of(LESS, values), best_of(MORE, values)) == ("off", "on")


def test_bars_are_judged_by_medians_against_the_best_peer_or_the_named_one() -> None:
    found = judged(LESS, {"ours": [1.0, 9.0, 1.1], "a": [1.0, 1.0, 1.0], "b": [2.0, 2.0, 1.9]})
    assert found.best == "a"
    assert [(one.peer, one.held) for one in found.verdicts] == [("a", True), ("b", True)]
    assert found.verdicts[0].ratio == pytest.approx(1.1)
    assert found.equal  # within ours' spread
    slow = judged(MORE, {"ours": [110.0], "a": [100.0], "b": [90.0]})
    assert (slow.best, slow.verdicts[0].held, slow.equal) == ("a", False, False)


def test_a_bar_whose_peer_is_missing_is_neither_held_nor_missed() -> None:
    found = judged(LESS, {"ours": [1.0]})
    assert [one.held for one in found.verdicts] == [None, None]
    assert found.best == ""


def test_every_bar_of_ours_has_its_row() -> None:
    bars = [(row.name, str(bar)) for one in MEASUREMENTS for row in one.rows for bar in row.bars]
    assert len(bars) == len(set(bars)) == 15


class Spoken:
    """An engine of known speed and knowledge that notes what is done with it."""

    def __init__(self, speed: float, knows: str = "It is Paris.") -> None:
        self.speed, self.knows, self.calls = speed, knows, list[str]()

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Timeline]:
        self.calls.append("generate")
        if self.speed <= 0:
            raise RuntimeError("out of memory")
        return [timeline(self.speed, self.speed, tokens) for _ in prompts]

    def answer(self, prompt: Sequence[int], tokens: int) -> str:
        return self.knows

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def stop(self) -> None:
        self.calls.append("stop")


class Kind:
    """A peer whose settings are named after their speed."""

    name = told = "spoken"

    def __init__(self, *settings: str) -> None:
        self._settings = list(settings)
        self.started: list[Spoken] = []

    def prepare(self, place: Place, say: object) -> None:
        pass

    def settings(self, place: Place, streams: int) -> list[str]:
        return self._settings

    def start(self, place: Place, setting: str) -> Spoken:
        self.started.append(Spoken(float(setting)))
        return self.started[-1]


ONE = Measurement(
    "one", (LESS,), 1, lambda fresh: [fresh(4)], lambda engine, prompts: [engine.generate(prompts, 1)[0].ttft_s]
)


def side(place: Place, *settings: str) -> Side:
    return Side(Kind(*settings), place, Tongue(lambda text: [1], lambda ids: ""), lambda n: [1] * n)


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("peer"), tmp_path_factory.mktemp("model"), 1)


def test_the_search_takes_every_setting_once_and_is_remembered(place: Place) -> None:
    first = side(place, "3", "1", "2")
    first.search([ONE], lambda text: None)
    assert first.best == {"ttft": "1"}
    assert isinstance(first.peer, Kind)
    assert [engine.calls[-1] for engine in first.peer.started] == ["stop", "stop", "pause"]
    first.remember()
    again = side(place, "3", "1", "2")
    again.recall()
    again.search([ONE], lambda text: None)
    assert isinstance(again.peer, Kind)
    assert (again.best, again.peer.started) == ({"ttft": "1"}, [])


def test_a_peer_that_fails_in_a_round_is_lost_and_the_others_go_on(place: Place) -> None:
    sides = {"good": side(place, "2"), "bad": side(place, "0")}
    for one in sides.values():
        one.best = {"ttft": one.peer.settings(place, 1)[0]}
    lost: dict[str, str] = {}
    ours = Spoken(1.0)
    values = rounds_of(ONE, {"ours": ours}, sides, 3, lambda n: [1] * n, lost)
    assert values == {"ttft": {"ours": [1.0] * 3, "good": [2.0] * 3}}
    assert lost == {"bad": "out of memory"}
    assert ours.calls == ["resume", "generate", "pause"] * 3


def test_an_engine_that_knows_nothing_is_not_timed() -> None:
    tongue = Tongue(lambda text: [1], lambda ids: "")
    checked(Spoken(1.0), tongue)
    with pytest.raises(Wrong, match="Berlin"):
        checked(Spoken(1.0, "Berlin."), tongue)
