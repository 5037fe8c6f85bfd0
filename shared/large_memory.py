"""Huge pages and locking for one large mapping: asked of the kernel, checked, and told in words.

Huge pages make first touch and address translation cheaper; locking keeps a cache from being swapped out, which would
be slower than computing it again. Both are best effort: whatever the kernel refuses, the mapping works.
"""

import ctypes
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config import ConfigError

_MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 14, 15
_MLOCK_ONFAULT = 1
_FRESH_S = 10.0
"""Bytes are counted anew at most so often: the kernel walks the whole mapping for it."""

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
HUGE_PAGES = ("auto", "on", "off")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mlock2 = _libc.mlock2
_mlock2.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)


@dataclass(frozen=True)
class Wish:
    """`huge`: auto (ask, and say in status what came of it), on (and warn when there are none), off."""

    huge: str = "auto"
    lock: bool = False

    def checked(self, section: str) -> "Wish":
        """Itself; ConfigError for a word that means nothing."""
        if self.huge not in HUGE_PAGES:
            raise ConfigError(f"{section}.huge_pages is {self.huge!r}; write one of {', '.join(HUGE_PAGES)}")
        return self


class LargeMemory:
    """`buffer`: a whole writable mapping, page-aligned, that is never unmapped. `warnings`: what was asked for in vain.

    `file`: the tmpfs file that is mapped, None for anonymous memory. `name` and `section` are for people.
    """

    def __init__(self, name: str, section: str, buffer: Any, wish: Wish, file: Path | None = None) -> None:
        view = memoryview(buffer).cast("B")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        self._nbytes = len(view)
        self.warnings: list[str] = []
        self._no_huge = self._ask_huge(wish.huge, file)
        self._no_lock = self._ask_lock() if wish.lock else f"off: {section}.lock_memory is false"
        if wish.huge == "on" and self._no_huge:
            self.warnings.append(f"{name} has no huge pages: {self._no_huge}")
        if wish.lock and self._no_lock:
            self.warnings.append(f"{name} is not locked in memory: {self._no_lock}")
        self._counted: tuple[float, dict[str, int]] = (-_FRESH_S, {})

    def _advise(self, advice: int) -> str:
        done = _libc.madvise(self._address, self._nbytes, advice) == 0
        return "" if done else f"madvise: {os.strerror(ctypes.get_errno())}"

    def _ask_huge(self, huge: str, file: Path | None) -> str:
        """Why there will be none; nothing when there may be."""
        if huge == "off":
            self._advise(_MADV_NOHUGEPAGE)
            return "off: huge_pages is off"
        refused = self._advise(_MADV_HUGEPAGE)
        return refused or (anonymous_policy() if file is None else tmpfs_policy(file))

    def _ask_lock(self) -> str:
        # On fault: what is not touched yet would otherwise be touched here, gigabytes of it, before ready.
        if _mlock2(self._address, self._nbytes, _MLOCK_ONFAULT) == 0:
            return ""
        reason = os.strerror(ctypes.get_errno())
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if limit != resource.RLIM_INFINITY and limit < self._nbytes:
            return f"it is {self._nbytes:,} bytes, RLIMIT_MEMLOCK allows {limit:,} ({reason}); raise it (ulimit -l)"
        return reason

    def facts(self) -> dict[str, Any]:
        """`huge_pages`, `locked`: "yes", or why not. `huge_bytes`, `locked_bytes`: what the kernel counts now."""
        now = time.monotonic()
        if now - self._counted[0] >= _FRESH_S:
            self._counted = (now, counted(self._address))
        return {"huge_pages": self._no_huge or "yes", "locked": self._no_lock or "yes"} | self._counted[1]


def _chosen(name: str) -> str:
    """The word in brackets of one of the kernel's switches; "" where there is none."""
    try:
        return (SYSTEM / name).read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def anonymous_policy() -> str:
    """Why anonymous memory that asks gets no huge pages; nothing when it may."""
    chosen = _chosen("enabled")
    if not chosen:
        return "the kernel has no transparent huge pages"
    return f"{SYSTEM / 'enabled'} is {chosen}; write madvise" if chosen == "never" else ""


def tmpfs_policy(file: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Why a tmpfs file that asks gets no huge pages; nothing when it may."""
    chosen = _chosen("shmem_enabled")
    if chosen in ("", "deny"):
        return f"{SYSTEM / 'shmem_enabled'} is {chosen or 'not there'}"
    where, options = os.path.realpath(file.parent), ""
    best = ""
    for line in mounts.read_text().splitlines():
        point, kind, these = line.split()[1:4]
        if (where == point or where.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, options = point, these if kind == "tmpfs" else "no tmpfs"
    if options == "no tmpfs":
        return f"{best} is no tmpfs"
    huge = next((word[5:] for word in options.split(",") if word.startswith("huge=")), "never")
    if huge == "never" and chosen != "force":
        return f"{best} is mounted without huge pages; remount it with huge=advise"
    return ""


def counted(address: int) -> dict[str, int]:
    """What the kernel counts of the mapping at `address`: bytes in huge pages, and bytes locked; zeros if unknown."""
    sums = {"huge_bytes": 0, "locked_bytes": 0}
    inside = False
    try:
        with open("/proc/self/smaps") as lines:
            for line in lines:
                head, _, rest = line.partition(" ")
                if not head.endswith(":"):
                    start, _, end = head.partition("-")
                    inside = int(start, 16) <= address < int(end, 16)
                elif inside and head in ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"):
                    sums["huge_bytes"] += int(rest.split()[0]) << 10
                elif inside and head == "Locked:":
                    sums["locked_bytes"] += int(rest.split()[0]) << 10
    except (OSError, ValueError):
        pass
    return sums
