"""One thread, one job after another, outcomes in the event loop."""

import os
import threading

import outcome
import pytest
import trio
import trio.testing

from services.worker.lane import Lane


async def test_jobs_run_in_order_in_one_thread_that_is_not_the_loops() -> None:
    lane = Lane("test")
    order: list[int] = []
    threads: set[int] = set()
    callers: set[int] = set()

    def job(i: int) -> None:
        order.append(i)
        threads.add(threading.get_ident())

    for i in range(100):
        lane.submit(lambda i=i: job(i), lambda _: callers.add(threading.get_ident()))  # type: ignore[misc]
    assert callers == set()
    await lane.wait_past()
    assert order == list(range(100))
    assert len(threads) == 1
    assert callers == {threading.get_ident()}
    assert threads.isdisjoint(callers)
    lane.stop()


async def test_saves_begin_behind_loads_and_a_long_save_lets_them_go_first() -> None:
    loads = Lane("loads")
    saves = Lane("saves", nice=7, behind=loads)
    order: list[str] = []
    begun, go = threading.Event(), threading.Event()

    def long_save() -> None:
        begun.set()
        go.wait()
        for part in range(3):
            saves.give_way()
            order.append(f"long {part}")

    saves.submit(long_save, lambda _: None)
    while not begun.is_set():
        await trio.lowlevel.checkpoint()
    for name in ("save a", "save b"):
        saves.submit(lambda name=name: order.append(name), lambda _: None)  # type: ignore[misc]
    loading, loaded = threading.Event(), threading.Event()

    def long_load() -> None:
        loading.set()
        loaded.wait()
        order.append("load a")

    loads.submit(long_load, lambda _: None)
    loads.submit(lambda: order.append("load b"), lambda _: None)
    loading.wait()
    go.set()
    loaded.set()
    with trio.fail_after(10):
        await saves.wait_past()
    assert order == ["load a", "load b", "long 0", "long 1", "long 2", "save a", "save b"]
    loads.stop()
    saves.stop()


async def test_a_lane_lowers_its_own_thread_and_no_other() -> None:
    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = nice()
    loads = Lane("loads")
    lower = min(before + 3, 19)
    saves = Lane("saves", nice=lower, behind=loads)
    assert (await loads.run(nice), await saves.run(nice), nice()) == (before, lower, before)
    loads.stop()
    saves.stop()


async def test_a_job_that_raises_is_an_outcome_and_the_lane_goes_on() -> None:
    lane = Lane("test")
    seen: list[outcome.Outcome[int]] = []
    lane.submit(lambda: 1 // 0, seen.append)
    with pytest.raises(KeyError):
        await lane.run(lambda: {}["absent"])
    assert await lane.run(lambda: 5) == 5
    assert isinstance(seen[0], outcome.Error)
    assert isinstance(seen[0].error, ZeroDivisionError)
    lane.stop()


async def test_the_loop_answers_while_a_job_blocks_and_a_cancelled_wait_leaves_it_running() -> None:
    lane = Lane("test")
    release = threading.Event()
    ended: list[bool] = []

    def job() -> None:
        release.wait()
        ended.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.run, job)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert ended == []
    release.set()
    await lane.wait_past()
    assert ended == [True]
    lane.stop()


def test_a_lane_whose_loop_has_ended_ends_too() -> None:
    started, release = threading.Event(), threading.Event()
    before = set(threading.enumerate())

    async def main() -> None:
        def job() -> None:
            started.set()
            release.wait()

        Lane("test").submit(job, lambda _: None)
        while not started.is_set():
            await trio.lowlevel.checkpoint()

    trio.run(main)
    (thread,) = set(threading.enumerate()) - before
    release.set()
    thread.join(10)
    assert not thread.is_alive()
