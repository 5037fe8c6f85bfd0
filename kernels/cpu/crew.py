"""The threads that compute, and what a kernel says that refuses."""

import weakref
from typing import Any

from kernels.cpu.library import declarations


class KernelError(RuntimeError):
    """The kernels refused a call; nothing of it has been computed. The text says why."""


class Crew:
    """Threads number 1 to `threads` - 1; number 0 is whoever calls. They sleep between calls and end with this."""

    def __init__(self, library: Any, threads: int) -> None:
        ffi = declarations()
        opened = ffi.new("pd_crew **")
        code = library.pd_crew_open(threads, opened)
        if code:
            raise KernelError(f"{threads} compute threads: {ffi.string(library.pd_error_text(code)).decode()}")
        self.threads = threads
        self.c = opened[0]
        weakref.finalize(self, library.pd_crew_close, self.c)
