"""What this machine lets this process have: cores and memory, cgroup limits included. Reads /proc and /sys only."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def boot_id() -> str:
    """Changes with each start of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def own_cgroups(controller: str, root: Path = CGROUP) -> Iterator[Path]:
    """Directories of our cgroup and its ancestors, of v2 or of v1's `controller`, innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        # Inside a container the path may be the host's; the mounted root is then ours.
        for group in (Path(path.lstrip("/")), *Path(path.lstrip("/")).parents):
            if (base / group).is_dir():
                yield base / group


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # absent, or "max"
        return None


def memory_headroom(groups: Iterable[Path]) -> int | None:
    """Bytes below the tightest memory limit of these cgroups, None without one; reclaimable page cache is free."""
    room: list[int] = []
    for group in groups:
        limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
        if limit is None or used is None:
            continue
        try:
            facts = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            facts = {}
        cache = int(facts.get("total_inactive_file", facts.get("inactive_file", 0)))
        room.append(max(0, limit - used + cache))
    return min(room, default=None)


def available_memory() -> int:
    """Bytes that this process may still take without swapping or being killed."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    room = memory_headroom(own_cgroups("memory"))
    return free if room is None else min(free, room)


def paid_cores(groups: Iterable[Path], cores: int) -> int:
    """`cores`, or what the tightest CPU quota of these cgroups pays for, at least 1."""
    for group in groups:
        try:
            quota, period = (int(x) for x in (group / "cpu.max").read_text().split())
        except (OSError, ValueError):  # no v2 limit
            quota, period = _number(group / "cpu.cfs_quota_us") or -1, _number(group / "cpu.cfs_period_us") or 0
        if quota > 0 and period > 0:
            cores = min(cores, max(1, round(quota / period)))
    return cores


def usable_cores() -> int:
    """Cores this process may use: its affinity, and no more than the cgroup's CPU quota pays for."""
    return paid_cores(own_cgroups("cpu"), len(os.sched_getaffinity(0)))


def resident_bytes() -> tuple[int, int]:
    """(now, highest since the last `forget_peak`) bytes of this process in memory."""
    facts = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            facts[name] = int(value.split()[0]) * 1024
    return facts["VmRSS"], facts["VmHWM"]


def forget_peak() -> bool:
    """Starts `resident_bytes`' peak anew; False where the kernel doesn't let us."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
