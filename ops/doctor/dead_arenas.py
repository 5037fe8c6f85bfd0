"""Arenas that nobody will ever attach to again: their home is gone, and they hold memory until somebody removes them.

An arena is ours by name, by magic and by owner. Its home is written in it; one whose home is there is somebody's
cache and is left alone, whether its stack runs or not.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ops.doctor import mend_arena as mend
from ops.doctor.patient import Patient
from ops.doctor.report import Finding, note, warning
from services.store.arena.records import MAGIC, PAGE, unpack_home
from shared.paths import Places, Taken

SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Stray:
    """An arena that no store has open. `home`: where it belonged, "" when it does not say."""

    path: Path
    nbytes: int
    home: str


def strays(directory: Path, own: Path) -> list[Stray]:
    """Arenas of ours in `directory` whose home is gone or unknown; never one in use, or another user's."""
    found = []
    for path in sorted(directory.glob("perdure-*-arena")):
        if path.name == own.name:
            continue
        try:
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid():
                continue
            with path.open("rb") as file:
                page = file.read(PAGE)
            home = unpack_home(page)
            if page[:8] != MAGIC or (home and Path(home).is_dir() and Places(Path(home)).arena().name == path.name):
                continue
            with mend.locked(path):
                found.append(Stray(path, facts.st_blocks * 512, home))
        except (OSError, Taken):
            continue
    return found


def check_dead_arenas(patient: Patient, *, unknown_too: bool = False) -> list[Finding]:
    """`unknown_too`: those that do not say whose they are are to be removed, too."""
    found = []
    for directory in sorted({SHARED, Path(patient.config.store.arena_dir)}):
        for stray in strays(directory, patient.places.arena()):
            if stray.home:
                text = f"{stray.path} holds {stray.nbytes:,} bytes for {stray.home}, which is no home any more"
                found.append(warning("arena-dead", text, "remove it (--repair does)", mend.remove(stray.path)))
            else:
                text = f"{stray.path} holds {stray.nbytes:,} bytes, is in use by nobody and does not say whose it is"
                way = "remove it with --remove-dead-arenas if no home of yours wants it"
                found.append(note("arena-unknown", text, way, mend.remove(stray.path) if unknown_too else None))
    return found
