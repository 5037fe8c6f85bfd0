"""Whether a service that is silent hangs, or only waits for a core: on a machine that is busy with something else, a
kill would make things worse, and a few in a row would end the whole stack.
"""

import os
from pathlib import Path

LONGEST = 6
"""Times the limit after which a silent service is taken to hang, whatever it looks like."""


def hangs(silent_s: float, limit_s: float, *, state: str, used_s: float) -> bool:
    """`state`: the kernel's letter for its main thread; `used_s`: processor time since it was last heard.

    A thread that could run (R) and was given next to nothing is not to blame. One that sleeps, is stopped, or spins is.
    """
    if silent_s < limit_s:
        return False
    starved = state == "R" and used_s < limit_s / 2
    return not starved or silent_s >= LONGEST * limit_s


def sign_of(pid: int) -> tuple[str, float]:
    """(state, processor time of all its threads in seconds); ("X", 0.0) for a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return "X", 0.0
