"""A thread that does one thing after another, so that the event loop always answers.

The worker has two: `compute` (model load, steps) and `copy` (transfers). Each is one thread for the whole life of the
process, not a pool: torch keeps its own threads per calling thread, and order is then a matter of course. A waiting
lane sleeps in the kernel.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

import outcome
import trio

T = TypeVar("T")
Done = Callable[[outcome.Outcome[Any]], None]


class Lane:
    """Runs jobs in the order of `submit`; their outcomes come back in the trio run that made the lane."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._token = trio.lowlevel.current_trio_token()
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Done] | None] = SimpleQueue()
        # A daemon: a step that outlives the grace of a drain must not keep the process from exiting.
        self._thread = threading.Thread(target=self._serve, name=f"perdure-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T], done: Callable[[outcome.Outcome[T]], None]) -> None:
        """Queues `job` for the thread; `done(outcome)` is called in the event loop. From the event loop only."""
        self._jobs.put((job, done))

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
        self._jobs.put(None)

    def _serve(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, done = entry
            result = outcome.capture(job)
            try:
                self._token.run_sync_soon(done, result)
            except trio.RunFinishedError:  # the loop ended before us: nobody wants to know
                return
