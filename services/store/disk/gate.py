"""Many inside, or one alone: LMDB's map may be resized, and an environment closed, only with no transaction open."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """`shared` for any transaction, `alone` for what must have none. Whoever waits to be alone stops newcomers.

    Neither may be entered again by a thread that is inside.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = False

    def enter(self) -> None:
        """Inside with others, until `leave`."""
        with self._changed:
            while self._alone:
                self._changed.wait()
            self._inside += 1

    def leave(self) -> None:
        """Outside again."""
        with self._changed:
            self._inside -= 1
            if not self._inside and self._alone:
                self._changed.notify_all()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """`enter` and `leave` around a block."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside with nobody else."""
        with self._changed:
            while self._alone:
                self._changed.wait()
            self._alone = True
            while self._inside:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()
