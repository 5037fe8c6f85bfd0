"""Page-aligned buffers for direct IO: footers, and payloads whose own memory is not aligned."""

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from services.store.disk.footer import PAGE

_KEPT = 8
"""Buffers kept for the next caller; more callers at once get buffers that are dropped again."""


def address(buffer: Any) -> int:
    """Where a buffer's memory begins."""
    return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])


def is_aligned(buffer: memoryview) -> bool:
    """Whether direct IO takes this buffer as it is: whole pages at a page's border."""
    return len(buffer) % PAGE == 0 and address(buffer) % PAGE == 0


class ScratchPool:
    """Thread-safe; each buffer has one user at a time."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self, nbytes: int = 0) -> Iterator[memoryview]:
        """A page-aligned writable buffer of at least `nbytes` (anonymous memory, so aligned and zeroed at first)."""
        with self._lock:
            buffer = self._free.pop() if self._free else None
        if buffer is None or len(buffer) < nbytes:
            buffer = memoryview(mmap.mmap(-1, max(self.nbytes, nbytes)))
        try:
            yield buffer
        finally:
            with self._lock:
                if len(self._free) < _KEPT:
                    self._free.append(buffer)
