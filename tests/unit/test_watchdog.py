"""What counts as hung: by measured work, in the loop's own time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from services.worker import watchdog
from services.worker.watchdog import SLACK, Hung, Watchdog


@contextmanager
def hanging(dog: Watchdog, size: int) -> Iterator[None]:
    """A job that is inside the watchdog until the block ends."""
    begun, go_on = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        go_on.wait()

    thread = threading.Thread(target=dog.around(size, job))
    thread.start()
    begun.wait()
    yield
    go_on.set()
    thread.join()


def ticks_until_hung(dog: Watchdog, most: int = 1000) -> int:
    for count in range(most):
        if dog.tick(1.0) is not None:
            return count
    raise AssertionError(f"not hung after {most} ticks")


@pytest.fixture
def rate(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that each job seems to take."""
    times, now = [1.0], [0.0]

    def clock() -> float:
        now[0] += times[0]
        return now[0]

    monkeypatch.setattr(watchdog.time, "perf_counter", clock)
    return times


def test_a_job_that_goes_on_past_its_limit_is_hung_and_one_that_ends_is_not() -> None:
    dog = Watchdog("step", 2.0)
    with hanging(dog, 5):
        assert ticks_until_hung(dog) == 3
        assert dog.tick(1.0) == Hung("step", 5, 4.0, 2.0)
    assert dog.tick(1000.0) is None


def test_the_limit_follows_measured_work_of_its_size_but_is_never_less_than_the_least(rate: list[float]) -> None:
    dog = Watchdog("step", 2.0)
    rate[0] = 4.0
    dog.around(8, lambda: None)()  # half a second a token
    assert dog.limit_s(1) == SLACK * 0.5
    assert dog.limit_s(100) == SLACK * 50
    rate[0] = 0.001
    for _ in range(200):
        dog.around(8, lambda: None)()
    assert dog.limit_s(8) == 2.0
    with hanging(dog, 8):
        assert ticks_until_hung(dog) == 3


def test_before_the_first_job_the_expected_rate_counts() -> None:
    assert Watchdog("step", 2.0, expected=0.5).limit_s(3) == SLACK * 1.5


def test_only_ticks_count_as_time_and_each_job_begins_at_none() -> None:
    dog = Watchdog("step", 1.0)
    for _ in range(30):
        with hanging(dog, 1):  # one tick each; together they would be far past the limit
            assert dog.tick(5.0) is None


def test_0_means_never() -> None:
    dog = Watchdog("step", 0.0)
    with hanging(dog, 1):
        assert not any(dog.tick(1000.0) for _ in range(10))


def test_a_save_that_waits_for_loads_is_watched_again_from_then_on() -> None:
    dog = Watchdog("saves", 2.0)
    waiting, go, begun, go_on = (threading.Event() for _ in range(4))

    def wait_for_loads() -> None:
        waiting.set()
        go.wait()

    def save() -> None:
        dog.pause(wait_for_loads)
        begun.set()
        go_on.wait()

    thread = threading.Thread(target=dog.around(7, save))
    thread.start()
    waiting.wait()
    assert not any(dog.tick(1.0) for _ in range(10))
    go.set()
    begun.wait()
    assert ticks_until_hung(dog) == 3
    hung = dog.tick(1.0)
    go_on.set()
    thread.join()
    assert hung is not None
    assert hung.size == 7
