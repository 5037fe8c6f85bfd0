"""How large the arena may be: what is asked for, clamped to what tmpfs, memory and the cgroup have left."""

import os
from pathlib import Path

from services.store.arena.records import PAGE, Geometry, aligned
from shared.machine import available_memory

MIB = 1 << 20
EXTENT_BYTES = 64 * MIB
FRACTION = 0.5
"""Share of what is free that an arena may take: pool, weights and page cache need the rest."""

SMALLEST = 64 << 10
"""Bytes; below that there is no arena."""

STAGING_BYTES = 32 * MIB
"""Without a host tier, what disk reads and writes pass through."""


def geometry_for(nbytes: int) -> Geometry:
    """Extents of 64 MiB, or a quarter of a smaller tier, in a file of at most `nbytes` (at least SMALLEST)."""
    extents = max(min(4, nbytes // MIB), -(-nbytes // EXTENT_BYTES), 1)
    tables = Geometry(extents, PAGE, 0).data_start
    return Geometry(extents, (nbytes - tables) // extents // PAGE * PAGE, nbytes)


def is_memory(directory: Path) -> bool:
    """Whether files there take memory (tmpfs)."""
    best, kind = "", ""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return False
    where = os.path.realpath(directory)
    for line in lines:
        fields = line.split()
        mount = fields[1]
        inside = where == mount or where.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fields[2]
    return kind in ("tmpfs", "ramfs", "devtmpfs")


def clamped(wanted: int, directory: Path) -> tuple[int, str]:
    """(bytes to take, "" or one line that says what clamped them). OSError when `directory` can't be asked."""
    facts = os.statvfs(directory)
    limits = {f"{directory} has free": facts.f_bavail * facts.f_frsize}
    if is_memory(directory):
        limits["the memory that this process may still take is"] = available_memory()
    name, free = min(limits.items(), key=lambda item: item[1])
    most = int(free * FRACTION) // PAGE * PAGE
    if wanted <= most:
        return aligned(wanted), ""
    return most, f"host tier takes {most:,} bytes instead of {wanted:,}: {name} {free:,}, of which half may be used"
