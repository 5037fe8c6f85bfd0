"""The home's own files: who owns them, who may read them, the key, and what dead processes left."""

import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ops.doctor.patient import Patient
from ops.doctor.report import Finding, fault, note, ok, warning
from shared.lock_files import holder
from shared.paths import Places, home_of
from shared.welcome import SERVICES

OURS = 0o077
"""Permissions that nobody but the owner has on anything of a home."""


def check_places(patient: Patient) -> list[Finding]:
    """Owners, modes, the key, leftovers, dead run dirs."""
    found = [*_owners_and_modes(patient), *_key(patient), *_leftovers(patient), *_run_dirs(patient)]
    return found or [ok("home", f"{patient.places.home}: owners, modes and the key are as they should be")]


def _private(places: Places) -> Iterator[Path]:
    """What a home keeps that others must not read; models are anybody's."""
    yield from (places.home, places.run, places.incarnations, places.identity_key)
    yield from places.home.glob("ledger.db*")
    for top in (places.store, places.journal):
        if top.is_dir() and not top.is_symlink():
            yield top
            yield from top.rglob("*")


def _owners_and_modes(patient: Patient) -> list[Finding]:
    strangers: list[Path] = []
    open_ones: list[Path] = []
    for path in (*_private(patient.places), patient.arena_path):
        try:
            facts = path.lstat()
        except OSError:  # not there, or removed meanwhile by a stack that lives
            continue
        if facts.st_uid != os.getuid():
            strangers.append(path)
        elif facts.st_mode & OURS and not stat.S_ISLNK(facts.st_mode) and not stat.S_ISSOCK(facts.st_mode):
            open_ones.append(path)
    found = []
    if strangers:
        text = f"files that belong to another user than {os.getuid()}: {len(strangers)} (the first is {strangers[0]})"
        found.append(fault("home-owner", text, "give them back with chown, or set PERDURE_HOME elsewhere"))
    if open_ones:
        mode = stat.S_IMODE(open_ones[0].lstat().st_mode)
        text = f"files that are open to other users: {len(open_ones)} ({open_ones[0]} has mode {mode:04o})"
        found.append(fault("home-mode", text, "they get 0600, folders 0700", lambda: _close(open_ones)))
    return found


def _close(paths: list[Path]) -> str:
    for path in paths:
        if path.exists():
            path.chmod(0o700 if path.is_dir() else 0o600)
    return f"closed files to other users: {len(paths)}"


def _key(patient: Patient) -> list[Finding]:
    path = patient.places.identity_key
    try:
        nbytes = path.stat().st_size
    except FileNotFoundError:
        if not len(patient.index.entries) and not len(patient.arena.records):
            return []
        text = f"{path} is gone: every cached block was named with it and can't be found any more"
        return [fault("identity-key", text, "restore it, or remove the cache with `perdure cache purge`")]
    except OSError as error:
        return [fault("identity-key", f"{path} can't be read: {error.strerror}", "make it readable")]
    if nbytes == 32:
        return []
    text = f"{path} holds {nbytes} bytes, a key has 32: nothing starts"
    return [fault("identity-key", text, "restore it, or remove it and lose the cache")]


def _leftovers(patient: Patient) -> list[Finding]:
    """Sockets of dead services and files that were never renamed; lock files stay by design."""
    places = patient.places
    dead = [
        path
        for role in sorted(SERVICES)
        for path in (places.run / f"{role}.sock",)
        if path.is_socket() and role not in patient.alive
    ]
    if not patient.alive:
        dead += [path for top in (places.home, places.run) for path in _parts(top)]
    if not dead:
        return []
    text = f"files that dead processes left: {len(dead)} (the first is {dead[0]})"
    return [note("leftovers", text, "the next start takes them over", lambda: _remove(dead))]


def _parts(top: Path) -> Iterator[Path]:
    for path in sorted(top.rglob("*")):
        if path.suffix in (".part", ".tmp") and path.is_file() and "models" not in path.relative_to(top).parts:
            yield path


def _remove(paths: list[Path]) -> str:
    for path in paths:
        path.unlink(missing_ok=True)
    return f"removed what dead processes left: {len(paths)}"


def _run_dirs(patient: Patient) -> list[Finding]:
    """Run dirs of homes that are gone, beside ours."""
    own = patient.places.run
    found = []
    prefix = own.name.removesuffix(patient.places.home_hash)
    for path in sorted(own.parent.glob(f"{prefix}*")):
        if path == own or not _is_dead(path):
            continue
        text = f"{path} is the run dir of a home that is gone ({home_of(path)})"
        found.append(warning("run-dir-dead", text, "remove it (--repair does)", partial(_remove_run_dir, path)))
    return found


def _is_dead(path: Path) -> bool:
    try:
        facts = path.lstat()
    except OSError:
        return False
    home = home_of(path)
    if home is None:
        return False
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or home.is_dir():
        return False
    locks = [*path.glob("*.lock"), *path.glob("*.supervisor")]
    return all(holder(lock) is None for lock in locks)


def _remove_run_dir(path: Path) -> str:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    return f"removed {path}"
