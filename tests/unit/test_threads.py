"""Threads of one's own: how many, how nice, what comes back."""

import os
import threading
from collections.abc import Callable

import pytest
import trio
import trio.testing

from shared.niceness import lower_thread, threads_by_nice
from shared.threads import Threads


def own_nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def lower(by: int) -> int:
    """Below what this process has, which may itself yield already."""
    return min(own_nice() + by, 19)


def in_a_thread(job: Callable[[], None]) -> None:
    thread = threading.Thread(target=job)
    thread.start()
    thread.join()


def test_a_thread_is_lowered_alone_and_never_raised() -> None:
    before = own_nice()
    found: list[int] = []

    def job() -> None:
        found.append(lower_thread(before + 4))
        found.append(lower_thread(before + 2))
        found.append(lower_thread(100))

    in_a_thread(job)
    assert found == [lower(4), lower(4), 19]
    assert own_nice() == before


def test_threads_are_counted_by_their_nice_value() -> None:
    within: list[dict[str, int]] = []

    def job() -> None:
        lower_thread(19)
        within.append(threads_by_nice())

    in_a_thread(job)
    assert within[0]["19"] >= 1
    assert within[0][str(own_nice())] >= 1
    assert sum(within[0].values()) >= 2
    assert threads_by_nice(1 << 30) == {}


async def test_work_runs_in_lowered_threads_and_the_loop_and_trios_own_threads_stay() -> None:
    before = own_nice()
    threads = Threads("test", 2, lower(5))
    assert await threads.run(own_nice) == lower(5)
    assert own_nice() == before
    assert await trio.to_thread.run_sync(own_nice) == before


async def test_no_more_threads_than_allowed_run_at_once_and_all_work_is_done() -> None:
    threads = Threads("test", 2)
    at_once = threading.Barrier(2)
    running: list[int] = []
    most: list[int] = []
    lock = threading.Lock()

    def work(number: int) -> int:
        with lock:
            running.append(number)
            most.append(len(running))
        at_once.wait(10)
        with lock:
            running.remove(number)
        return number

    answers: list[int] = []

    async def ask(number: int) -> None:
        answers.append(await threads.run(work, number))

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(ask, number)
    assert sorted(answers) == list(range(8))
    assert max(most) == 2


async def test_errors_come_back_and_the_thread_goes_on() -> None:
    threads = Threads("test", 1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(lambda: 5) == 5


async def test_a_cancelled_caller_waits_for_the_end_of_what_it_began_and_begins_nothing_more() -> None:
    threads = Threads("test", 1)
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait()
        ended.set()

    async def cancelled(scope: trio.CancelScope) -> None:
        with scope:
            await threads.run(work)

    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancelled, scope)
        await trio.testing.wait_all_tasks_blocked()
        begun.wait()
        scope.cancel()
        go.set()
    assert ended.is_set()
    with trio.CancelScope() as scope:
        scope.cancel()
        await threads.run(lambda: pytest.fail("it was begun"))
    assert scope.cancelled_caught


async def test_idle_threads_end_and_later_work_gets_new_ones() -> None:
    threads = Threads("test", 1, idle_s=0.001)
    first = await threads.run(threading.current_thread)
    first.join(10)
    assert not first.is_alive()
    second = await threads.run(threading.current_thread)
    assert second is not first


def test_a_thread_whose_loop_has_ended_is_no_trouble() -> None:
    threads = Threads("test", 1, idle_s=0.001)
    begun, go = threading.Event(), threading.Event()
    thread: list[threading.Thread] = []

    def work() -> None:
        thread.append(threading.current_thread())
        begun.set()
        go.wait()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(threads.run, work)
            while not begun.is_set():
                await trio.lowlevel.checkpoint()
            go.set()

    trio.run(main)
    thread[0].join(10)
    assert not thread[0].is_alive()
