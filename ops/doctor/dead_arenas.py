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
from shared.paths import Places

SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Stray:
    """An arena that no store has open. `home`: where it belongs, "" when it does not say; `dead`: that is gone."""

    path: Path
    nbytes: int
    home: str
    dead: bool


def strays(directory: Path, own: Path) -> list[Stray]:
    """Arenas of ours in `directory` but the home's own; never one in use, or another user's."""
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
            if page[:8] == MAGIC and not in_use(path):
                home = unpack_home(page)
                found.append(Stray(path, facts.st_blocks * 512, home, _is_dead(home, path.name)))
        except OSError:  # removed meanwhile
            continue
    return found


def _is_dead(home: str, name: str) -> bool:
    """Whether no store on this home would ever attach to it."""
    return bool(home) and (not Path(home).is_dir() or Places(Path(home)).arena().name != name)


def in_use(path: Path) -> bool:
    """Whether a process has it open. Not by its lock: a store that starts just now would find it taken, by us."""
    this = path.stat()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.path.samestat(os.stat(link), this):
                return True
        except OSError:  # closed meanwhile, or another user's
            continue
    return False


def check_dead_arenas(patient: Patient, *, unknown_too: bool = False) -> list[Finding]:
    """`unknown_too`: those that do not say whose they are are to be removed, too."""
    found = []
    for directory in sorted({SHARED, Path(patient.config.store.arena_dir)}):
        for stray in strays(directory, patient.places.arena()):
            holds = f"{stray.path} holds {stray.nbytes:,} bytes"
            if stray.dead:
                text = f"{holds} for {stray.home}, which is no home any more"
                found.append(warning("arena-dead", text, "remove it (--repair does)", mend.remove(stray.path)))
            elif stray.home:
                way = f"`PERDURE_HOME={stray.home} perdure cache purge` gives it back, with that cache"
                found.append(note("arena-idle", f"{holds} for {stray.home}, whose stack does not run", way))
            else:
                text = f"{holds}, is in use by nobody and does not say whose it is"
                way = "remove it with --remove-dead-arenas if no home of yours wants it"
                found.append(note("arena-unknown", text, way, mend.remove(stray.path) if unknown_too else None))
    return found
