"""When a load of the model counts as hung, and the kernel's counters that say so."""

import mmap
import os
from pathlib import Path

import pytest

from services.worker.load_watch import LoadWatch, Meter, Stuck

SAID = ("loading weights", 0.25)


def run(watch: LoadWatch, ticks: int, *, moved: object = 0, used_s: float = 0.0) -> Stuck | None:
    """The first complaint in so many ticks of half a second."""
    for _ in range(ticks):
        stuck = watch.tick(0.5, said=SAID, moved=moved, used_s=used_s)
        if stuck is not None:
            return stuck
    return None


def test_a_load_in_which_nothing_moves_is_stuck_after_the_limit() -> None:
    watch = LoadWatch(10.0)
    assert run(watch, 21) is None  # the first tick only looks
    assert run(watch, 1) == Stuck("loading weights 25%", 10.5, 10.0)


def test_a_slow_disk_that_reads_now_and_then_is_never_stuck() -> None:
    watch = LoadWatch(10.0)
    assert all(run(watch, 20, moved=piece) is None for piece in range(1000))
    assert run(watch, 30, moved=999) is not None


def test_news_of_the_loader_count_too() -> None:
    watch = LoadWatch(1.0)
    for done in range(100):
        for _ in range(2):
            assert watch.tick(0.5, said=("loading weights", done / 100), moved=0, used_s=0.0) is None


def test_computing_alone_is_allowed_ten_times_as_long() -> None:
    watch = LoadWatch(10.0)
    assert run(watch, 201, used_s=0.5) is None
    stuck = run(watch, 1, used_s=0.5)
    assert stuck is not None
    assert stuck.limit_s == 100.0


def test_an_event_loop_that_merely_lives_is_no_progress() -> None:
    assert run(LoadWatch(10.0), 40, used_s=0.01) is not None


def test_nothing_is_stuck_without_a_limit() -> None:
    assert run(LoadWatch(0.0), 10_000) is None


def test_the_meter_sees_what_a_device_read_and_no_pipe(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    os.fsync(fd)
    meter = Meter()
    meter.moved()
    before = meter.moved()
    reading, writing = os.pipe()
    for _ in range(100):
        os.write(writing, bytes(4096))
        os.read(reading, 4096)
    os.close(reading)
    os.close(writing)
    assert meter.moved()[0] == before[0]
    with mmap.mmap(-1, 1 << 20) as buffer:
        try:
            os.preadv(fd, [buffer], 0)
        except OSError as error:
            pytest.skip(f"no direct reads here: {error.strerror}")
        finally:
            os.close(fd)
    after = meter.moved()[0]
    if after == 0:
        pytest.skip("this kernel does not count what devices read")
    assert after - before[0] >= 1 << 20


def test_the_meter_sees_a_core_that_is_used() -> None:
    meter = Meter()
    meter.used_s()
    assert sum(range(2_000_000)) > 0
    assert meter.used_s() > 0
