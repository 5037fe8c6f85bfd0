"""The machine around the home: shared memory that is too small or is cleaned, limits, fault hooks that are set."""

import configparser
import os
import resource
from collections.abc import Sequence
from pathlib import Path

from ops.doctor.patient import Patient
from ops.doctor.report import Finding, ok, warning
from services.store.arena.size import FRACTION, is_memory
from shared.config import FaultsConfig

ROOT = Path("/")
FIRST_PERSON = 1000
"""Below it are system users, whom logind spares."""


def check_machine(patient: Patient, *, root: Path = ROOT, uid: int | None = None) -> list[Finding]:
    """`root`, `uid`: for tests."""
    uid = os.getuid() if uid is None else uid
    found = [*_shared_memory(patient), *_logind(patient, root, uid), *_memlock(patient)]
    if patient.config.faults != FaultsConfig():
        text = "fault hooks are set in [faults]: this stack fails on purpose"
        found.append(warning("fault-hooks", text, "remove them from the configuration and the environment"))
    return found or [ok("machine", "shared memory is large enough and nobody cleans it")]


def _shared_memory(patient: Patient) -> list[Finding]:
    directory, wanted = Path(patient.config.store.arena_dir), patient.config.store.host_bytes
    try:
        facts = os.statvfs(directory)
    except OSError as error:
        text = f"store.arena_dir {directory} can't be asked: {error.strerror}"
        return [warning("shm-small", text, "set store.arena_dir to a directory in memory")]
    total = facts.f_blocks * facts.f_frsize
    if wanted <= total * FRACTION or patient.arena_path.exists():
        return []
    text = f"{directory} has {total:,} bytes in all, store.host_bytes asks for {wanted:,}, and at most half is taken"
    way = "enlarge it (in a container: --shm-size), lower store.host_bytes, or set store.arena_dir elsewhere"
    return [warning("shm-small", text, way)]


def logind_files(root: Path) -> list[Path]:
    """Configuration of systemd-logind in the order in which it is read; later ones win."""
    folders = [root / name / "systemd" for name in ("usr/lib", "usr/local/lib", "run", "etc")]
    mains = [folder / "logind.conf" for folder in folders]
    drops: dict[str, Path] = {}
    for folder in folders:
        for path in sorted((folder / "logind.conf.d").glob("*.conf")):
            drops[path.name] = path
    return [*mains, *(drops[name] for name in sorted(drops))]


def removes_ipc(files: Sequence[Path]) -> bool:
    """Whether logind removes a user's shared memory at the last logout; it does unless told otherwise."""
    answer = True
    for path in files:
        parser = configparser.ConfigParser(strict=False, interpolation=None, allow_no_value=True)
        try:
            parser.read_string(path.read_text(errors="replace"))
        except (OSError, configparser.Error):
            continue
        said = (parser.get("Login", "RemoveIPC", fallback="") or "").strip().lower()
        if said:
            answer = said in ("1", "yes", "y", "true", "t", "on")
    return answer


def _logind(patient: Patient, root: Path, uid: int) -> list[Finding]:
    runs = (root / "run/systemd/users").is_dir() and (root / "run/systemd/seats").is_dir()
    shared = is_memory(Path(patient.config.store.arena_dir))
    lingers = (root / "var/lib/systemd/linger" / _name_of(uid)).exists()
    if not runs or not shared or uid < FIRST_PERSON or lingers or not removes_ipc(logind_files(root)):
        return []
    text = (
        f"logind removes what user {_name_of(uid)} has in shared memory at the last logout (RemoveIPC), the arena too"
    )
    way = "RemoveIPC=no in /etc/systemd/logind.conf, or `loginctl enable-linger`; the disk tier keeps its blocks"
    return [warning("remove-ipc", text, way)]


def _name_of(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _memlock(patient: Patient) -> list[Finding]:
    """Each process has the limit for itself; root has none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return []
    kv, store = patient.config.kv, patient.config.store
    wishes = [
        ("kv", "the pool", kv.lock_memory, kv.pool_bytes),
        ("store", "the arena", store.lock_memory, store.host_bytes),
    ]
    found = []
    for section, what, wanted, nbytes in wishes:
        if wanted and nbytes > soft:
            asks = f"{section}.lock_memory asks to lock {nbytes:,} bytes, RLIMIT_MEMLOCK allows {soft:,}"
            text = f"{asks}: {what} may be swapped out"
            found.append(warning("memlock-low", text, "raise memlock in /etc/security/limits.conf (or LimitMEMLOCK=)"))
    return found
