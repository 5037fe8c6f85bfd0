"""`perdure cache purge` when the store can't be asked."""

import pytest
from click.testing import CliRunner

import ops.cli.cache as command
from ops.cli import main
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
