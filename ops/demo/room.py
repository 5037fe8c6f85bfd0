"""Whether this machine has the room that the demo needs, said before anything starts."""

import shutil
import tempfile

from shared.machine import available_memory

GIB = 1 << 30
NEEDS = (("memory", 3 * GIB), ("/dev/shm", GIB), ("disk", 2 * GIB))


def shortages() -> list[str]:
    """One line for each resource that is too small, with both numbers. The home lies in the folder for temporary
    files; the model's own download looks for its room itself.
    """
    folder = tempfile.gettempdir()
    have = {
        "memory": available_memory(),
        "/dev/shm": shutil.disk_usage("/dev/shm").free,
        "disk": shutil.disk_usage(folder).free,
    }
    where = {"memory": "", "/dev/shm": "", "disk": f" ({folder}; TMPDIR chooses another folder)"}
    return [
        f"{what}: the demo needs {need / GIB:.1f} GiB, {have[what] / GIB:.1f} GiB are free{where[what]}"
        for what, need in NEEDS
        if have[what] < need
    ]
