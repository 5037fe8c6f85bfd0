"""A thread that does one thing after another, so that the event loop always answers.

The worker has three: `compute` (model load, steps), `loads` and `saves` (transfers). Each is one thread for the whole
life of the process, not a pool: torch keeps its own threads per calling thread, and order is then a matter of course.
A waiting lane sleeps in the kernel.

Somebody waits for a load, nobody for a save. So the lane of saves yields the cores to computing (a lowered thread can't
be raised again, hence a thread for each), and works behind that of loads: it begins no job while there are loads, and a
long job lets them go first where it calls `give_way`.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import outcome
import trio

from shared.niceness import lower_thread

T = TypeVar("T")
Done = Callable[[outcome.Outcome[Any]], None]


class Lane:
    """Runs jobs in the order of `submit`; their outcomes come back in the trio run that made it.

    `nice`: to which its thread is lowered. `behind`: the lane whose jobs go before this one's.
    """

    def __init__(self, name: str, *, nice: int = 0, behind: "Lane | None" = None) -> None:
        self.name = name
        self._nice = nice
        self._behind = behind
        self._token = trio.lowlevel.current_trio_token()
        self._jobs: deque[tuple[Callable[[], Any], Done] | None] = deque()
        self._waiting = threading.Semaphore(0)
        self._idle = threading.Condition()
        self._wanted = 0
        """Jobs that are queued or run."""
        # A daemon: a step that outlives the grace of a drain must not keep the process from exiting.
        self._thread = threading.Thread(target=self._serve, name=f"perdure-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T], done: Callable[[outcome.Outcome[T]], None]) -> None:
        """Queues `job` for the thread; `done(outcome)` is called in the event loop. From the event loop only."""
        with self._idle:
            self._wanted += 1
        self._jobs.append((job, done))
        self._waiting.release()

    def give_way(self) -> None:
        """Blocks this lane's thread until the lane before it has nothing to do."""
        if self._behind is not None:
            self._behind.block_until_idle()

    def block_until_idle(self) -> None:
        """Blocks another thread until no job is queued or runs here."""
        with self._idle:
            self._idle.wait_for(lambda: not self._wanted)

    async def run(self, job: Callable[[], T]) -> T:
        """Waits for one job; cancelled, it goes on in the thread and its outcome is dropped."""
        finished = trio.Event()
        results: list[outcome.Outcome[T]] = []

        def done(result: outcome.Outcome[T]) -> None:
            results.append(result)
            finished.set()

        self.submit(job, done)
        await finished.wait()
        return results[0].unwrap()

    async def wait_past(self) -> None:
        """Returns once everything submitted before this call is over."""
        await self.run(lambda: None)

    def stop(self) -> None:
        """Ends the thread after what is queued; does not wait for it."""
        self._jobs.append(None)
        self._waiting.release()

    def _serve(self) -> None:
        lower_thread(self._nice)
        while self._waiting.acquire() and (entry := self._jobs.popleft()) is not None:
            self.give_way()
            if not self._run(*entry):
                return

    def _run(self, job: Callable[[], Any], done: Done) -> bool:
        """False when the loop ended before us, and nobody wants to know."""
        result = outcome.capture(job)
        with self._idle:
            self._wanted -= 1
            self._idle.notify_all()
        try:
            self._token.run_sync_soon(done, result)
        except trio.RunFinishedError:
            return False
        return True
