"""Whether this machine has the room that the demo needs, said before anything starts."""

import shutil
from pathlib import Path

import psutil

GIB = 1 << 30
NEEDS = (("memory", 3 * GIB), ("/dev/shm", GIB), ("disk", 2 * GIB))


def shortages(home: Path) -> list[str]:
    """One line for each resource that is too small, with both numbers."""
    have = {
        "memory": psutil.virtual_memory().available,
        "/dev/shm": shutil.disk_usage("/dev/shm").free,
        "disk": shutil.disk_usage(home).free,
    }
    return [
        f"{what}: the demo needs {need / GIB:.1f} GiB, {have[what] / GIB:.1f} GiB are free"
        for what, need in NEEDS
        if have[what] < need
    ]
