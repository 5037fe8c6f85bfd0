import pytest

from ops.cli.waiting_line import WaitingLine


def test_a_loading_worker_is_one_line_a_stage_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    line = WaitingLine()
    line.notice(("worker",))
    for share in (0.0, 0.5, 1.0):
        line.loading("loading weights", share)
    line.loading("sizing the pool", 0.0)
    line.notice(())
    line.end()
    assert capsys.readouterr().err.splitlines() == [
        "perdure: waiting for worker",
        "perdure: the worker is loading weights",
        "perdure: the worker is sizing the pool",
        "perdure: going on",
    ]


def test_on_a_terminal_it_is_a_bar_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    line = WaitingLine()
    line.loading("loading weights", 0.5)
    assert line._bar is not None
    assert line._bar.tasks[0].completed == 50
    line.end()
    line.end()
    assert line._bar is None
