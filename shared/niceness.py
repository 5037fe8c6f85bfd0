"""How much a thread yields the cores to others: its nice value, which on Linux is each thread's own.

Compute threads wait for each other at barriers, so whatever takes a core from one of them takes it from all. Work that
nobody waits for runs in threads that yield. A thread can be lowered but, without privileges, never raised again: give
such work threads of its own. A thread that holds the GIL while others have the cores keeps its whole process waiting,
so only threads whose long parts release it are lowered.

Where the kernel groups sessions (autogroup), nice values count only inside a session, and the session as a whole has
one of its own; each of our services is a session. See `yield_session`.
"""

import os
import sys
import threading
from collections import Counter
from pathlib import Path

LOWEST = 19


def lower_thread(nice: int) -> int:
    """Lowers the calling thread to `nice` (0 to 19), never raises it; the value that it has then."""
    if sys.platform != "linux":  # elsewhere the value is the process's, event loop included
        return os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    if nice > before:
        os.setpriority(os.PRIO_PROCESS, thread, min(nice, LOWEST))
    return os.getpriority(os.PRIO_PROCESS, thread)


def lower_process(pid: int, nice: int) -> None:
    """Lowers all threads that a process has now; those that they start inherit it."""
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)
    except OSError:  # it has exited already
        return


def yield_session(pid: int, nice: int) -> bool:
    """Lowers the whole session of a process against other sessions, where the kernel groups them.

    False when the kernel wants to be asked again: it takes one such change in a tenth of a second, of everybody.
    """
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))
    except BlockingIOError:
        return False
    except OSError:  # it has exited already, or this kernel has no such groups
        return True
    return True


def threads_by_nice(pid: int | str = "self") -> dict[str, int]:
    """How many threads of a process have which nice value; empty where there is no /proc."""
    found: Counter[int] = Counter()
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            try:
                found[int((thread / "stat").read_text().rpartition(")")[2].split()[16])] += 1
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                continue
    except OSError:
        return {}
    return {str(nice): found[nice] for nice in sorted(found)}
