"""`perdure cache` without a stack to ask, and with wrong options."""

from pathlib import Path

import pytest
from click.testing import CliRunner

import ops.cli.clearing as command
from ops.cli import main
from ops.cli.tiers import tiers_of
from shared.lock_files import holder
from shared.paths import Lock, Places


def test_a_store_that_runs_and_does_not_answer_is_one_line_and_code_1(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(places.home))
    monkeypatch.setattr(command, "REACH_S", 0.05)
    lock = Lock(places.run / "store.lock", "the store")
    try:
        done = CliRunner().invoke(main, ["cache", "purge"])
    finally:
        lock.release()
    assert done.exit_code == 1
    assert done.output.startswith("perdure: the cache is not purged: the store of this home runs but does not answer")


def run(places: Places, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    monkeypatch.setenv("PERDURE_HOME", str(places.home))
    done = CliRunner().invoke(main, ["cache", *words])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    "words",
    [
        ("clear", "--model", "--salt", "s"),
        ("clear", "--model", "--prefix", "x"),
        ("clear", "--model", "--user", "alice"),
        ("clear", "--prefix", "x", "--prefix-ids", "1"),
        ("clear", "--chat"),
        ("clear", "--prefix-ids", "1", "--system", "s"),
        ("clear", "--prefix-ids", "1 x"),
    ],
)
def test_options_that_contradict_each_other_are_wrong_usage(
    places: Places, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    assert run(places, monkeypatch, *words)[0] == 2


@pytest.mark.parametrize("words", [("clear",), ("stats",), ("stats", "--json")])
def test_clear_and_stats_without_a_stack_say_so(
    places: Places, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    code, said = run(places, monkeypatch, *words)
    assert code == 4
    assert said.startswith(f"perdure: no stack runs on {places.home}")


def test_purge_of_a_home_that_is_not_there_makes_none(
    places: Places, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "nowhere"))
    done = CliRunner().invoke(main, ["cache", "purge"])
    assert (done.exit_code, "nothing is cached" in done.output) == (0, True)
    assert not (tmp_path / "nowhere").exists()


def test_purge_holds_the_home_while_it_removes(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stack can start in between, and one that holds the home is asked instead."""
    places.store.mkdir()
    held: list[bool] = []

    def removing(path: Path) -> None:
        held.append(holder(places.lock) is not None)
        path.joinpath("gone").write_text("")

    monkeypatch.setattr("shutil.rmtree", removing)
    assert run(places, monkeypatch, "purge")[0] == 0
    assert held == [True]
    assert holder(places.lock) is None
    monkeypatch.setattr(command, "REACH_S", 0.05)
    lock = Lock(places.lock, "the stack")
    try:
        assert run(places, monkeypatch, "purge")[0] == 1
    finally:
        lock.release()
    assert held == [True]


def test_facts_of_a_service_that_is_away_are_missing_and_named() -> None:
    tiers = tiers_of({"scheduler": {}, "store": {}})
    assert tiers["away"] == ["scheduler", "store"]
    assert tiers["device"] == tiers["host"] == tiers["disk"] == {}
