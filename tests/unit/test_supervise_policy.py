"""When a service is started again, and when its supervisor gives up."""

import os
from pathlib import Path

import pytest

from ops.supervise.incarnation import next_incarnation
from ops.supervise.policy import LONGEST_PAUSE_S, RestartPolicy
from ops.supervise.silence import hangs, sign_of


def test_only_exits_before_ready_count_and_ready_resets_the_count() -> None:
    policy = RestartPolicy(max_failures=3)
    for _ in range(10):
        assert policy.after_exit(-9, was_ready=True, planned=False).again
    assert policy.after_exit(1, was_ready=False, planned=False).again
    assert policy.after_exit(1, was_ready=False, planned=False).again
    assert policy.after_exit(-9, was_ready=True, planned=False).again
    assert policy.after_exit(1, was_ready=False, planned=False).again
    assert policy.after_exit(1, was_ready=False, planned=False).again
    verdict = policy.after_exit(1, was_ready=False, planned=False)
    assert not verdict.again
    assert verdict.exit_code == 1
    assert "3 times" in verdict.reason


def test_a_planned_restart_is_at_once_and_never_counts() -> None:
    policy = RestartPolicy(max_failures=1)
    verdict = policy.after_exit(0, was_ready=False, planned=True)
    assert verdict.again
    assert verdict.pause_s == 0


def test_wrong_configuration_and_a_taken_place_stop_at_once() -> None:
    for code in (2, 4):
        verdict = RestartPolicy(max_failures=5).after_exit(code, was_ready=False, planned=False)
        assert not verdict.again
        assert verdict.exit_code == code


def test_the_pause_grows_and_is_bounded() -> None:
    policy = RestartPolicy(max_failures=100)
    pauses = [policy.after_exit(1, was_ready=False, planned=False).pause_s for _ in range(10)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S


def test_incarnations_only_grow_also_over_a_damaged_file(tmp_path: Path) -> None:
    assert [next_incarnation(tmp_path, "store") for _ in range(3)] == [1, 2, 3]
    (tmp_path / "store").write_text("not a number")
    assert next_incarnation(tmp_path, "store") > 1_000_000
    assert next_incarnation(tmp_path, "worker") == 1


@pytest.mark.parametrize(
    ("silent_s", "state", "used_s", "wanted"),
    [
        (9.9, "S", 0.0, False),
        (10.0, "S", 0.0, True),
        (10.0, "T", 0.0, True),  # stopped
        (10.0, "D", 0.0, True),
        (10.0, "R", 0.1, False),  # starved: it could run, and nobody let it
        (10.0, "R", 5.0, True),  # spins
        (59.0, "R", 0.1, False),
        (60.0, "R", 0.1, True),
    ],
)
def test_a_service_that_only_waits_for_a_core_does_not_hang(
    silent_s: float, state: str, used_s: float, wanted: bool
) -> None:
    assert hangs(silent_s, 10.0, state=state, used_s=used_s) is wanted


def test_the_sign_of_a_process_is_read_from_the_kernel() -> None:
    state, used_s = sign_of(os.getpid())
    assert state in "RS"
    assert used_s > 0
    assert sign_of(1 << 30) == ("X", 0.0)
