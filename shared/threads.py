"""Threads of one's own for blocking work, awaited from the event loop.

trio's cache of threads is shared by all its users, and a thread that has been lowered stays so: what ran there next
would yield, too. These run nothing but their owner's work, all at one nice value. They are daemons, so that a call
that never returns can't keep the process from exiting, and they end when there has been nothing to do for a while.
"""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar, TypeVarTuple

import outcome
import trio

from shared.niceness import lower_thread

IDLE_S = 10.0

Ts = TypeVarTuple("Ts")
T = TypeVar("T")


class Threads:
    """At most `most` threads, lowered to `nice`. A call waits for a free one, in the order of the calls."""

    def __init__(self, name: str, most: int, nice: int = 0, *, idle_s: float = IDLE_S) -> None:
        self._name, self._most, self._nice, self._idle_s = name, most, nice, idle_s
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._wanted = 0
        """Jobs that are queued or run."""
        self._alive = 0

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """What `function(*args)` returns or raises in a thread; a cancelled caller still waits for its end."""
        await trio.lowlevel.checkpoint_if_cancelled()
        token = trio.lowlevel.current_trio_token()
        ended = trio.Event()
        results: list[outcome.Outcome[T]] = []

        def job() -> None:
            results.append(outcome.capture(function, *args))
            try:
                token.run_sync_soon(ended.set)
            except trio.RunFinishedError:  # nobody wants to know any more
                return

        self._submit(job)
        with trio.CancelScope(shield=True):
            await ended.wait()
        return results[0].unwrap()

    def _submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._wanted += 1
            self._jobs.put(job)
            begin = self._alive < min(self._wanted, self._most)
            self._alive += begin
        if begin:
            threading.Thread(target=self._serve, name=f"perdure-{self._name}", daemon=True).start()

    def _serve(self) -> None:
        lower_thread(self._nice)
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_s)
            except Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._alive -= 1
                        return
                continue
            job()
            with self._lock:
                self._wanted -= 1
