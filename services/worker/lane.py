"""A thread that does one thing after another, so that the event loop always answers.

The worker has two: `compute` (model load, steps) and `copy` (transfers). Each is one thread for the whole life of the
process, not a pool: torch keeps its own threads per calling thread, and order is then a matter of course. A waiting
lane sleeps in the kernel. Urgent jobs go before the others, and a long job lets them in where it calls `give_way`:
somebody waits for a load, nobody for a save.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import outcome
import trio

T = TypeVar("T")
Done = Callable[[outcome.Outcome[Any]], None]


class Lane:
    """Runs jobs in the order of `submit`, urgent ones first; their outcomes come back in the trio run that made it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._token = trio.lowlevel.current_trio_token()
        self._urgent: deque[tuple[Callable[[], Any], Done]] = deque()
        self._jobs: deque[tuple[Callable[[], Any], Done] | None] = deque()
        self._waiting = threading.Semaphore(0)
        # A daemon: a step that outlives the grace of a drain must not keep the process from exiting.
        self._thread = threading.Thread(target=self._serve, name=f"perdure-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T], done: Callable[[outcome.Outcome[T]], None], *, urgent: bool = False) -> None:
        """Queues `job` for the thread; `done(outcome)` is called in the event loop. From the event loop only."""
        (self._urgent if urgent else self._jobs).append((job, done))
        self._waiting.release()

    def give_way(self) -> None:
        """Runs what is urgent and waits, from within a job."""
        while self._urgent and self._waiting.acquire(blocking=False):
            self._run(*self._urgent.popleft())

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
        while self._waiting.acquire() and (entry := self._next()) is not None:
            if not self._run(*entry):
                return

    def _next(self) -> tuple[Callable[[], Any], Done] | None:
        return self._urgent.popleft() if self._urgent else self._jobs.popleft()

    def _run(self, job: Callable[[], Any], done: Done) -> bool:
        """False when the loop ended before us, and nobody wants to know."""
        result = outcome.capture(job)
        try:
            self._token.run_sync_soon(done, result)
        except trio.RunFinishedError:
            return False
        return True
