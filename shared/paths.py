"""Where things lie: the home (state that survives), the run dir (sockets, locks) and the arena.

Everything is 0700, and a path that is not ours (another owner, a symlink) is refused, not used.
"""

import fcntl
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import platformdirs

RUN_LABEL = "home"
"""File of a run dir that names its home, so that one whose home is gone can be told."""

MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket path that Linux takes."""


class PlaceError(RuntimeError):
    """A file or directory can't be used; the text says which, why, and the way out."""


class Taken(PlaceError):
    """Another process holds the lock."""


def default_home() -> Path:
    """PERDURE_HOME, else the user's data dir."""
    given = os.environ.get("PERDURE_HOME")
    return Path(given).expanduser().absolute() if given else Path(platformdirs.user_data_dir("perdure"))


@dataclass(frozen=True)
class Places:
    """All paths of one stack, derived from its home alone."""

    home: Path

    @property
    def home_hash(self) -> str:
        """Ten hex digits that name this home in shared directories."""
        return hashlib.blake2b(os.fsencode(self.home), digest_size=5).hexdigest()

    @property
    def run(self) -> Path:
        """The run dir: sockets, endpoint locks, supervisor files."""
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        if runtime:
            candidate = Path(runtime) / f"perdure-{self.home_hash}"
            if len(os.fsencode(candidate)) + len("/detokenizer.sock") <= MAX_SOCKET_PATH and Path(runtime).is_dir():
                return candidate
        return Path(f"/tmp/perdure-{os.getuid()}-{self.home_hash}")

    def endpoint(self, role: str) -> str:
        """ZeroMQ address of a mailbox."""
        return f"ipc://{self.run / role}.sock"

    def arena(self, directory: str = "/dev/shm") -> Path:
        """File of the host tier."""
        return Path(directory) / f"perdure-{self.home_hash}-arena"

    def models(self, directory: str = "") -> Path:
        """Fetched models: `model.dir` when it is set, so that several homes may share them."""
        return Path(directory) if directory else self.home / "models"

    @property
    def store(self) -> Path:
        """Disk tier: `index/` (LMDB) and `segments/`."""
        return self.home / "store"

    @property
    def journal(self) -> Path:
        """The scheduler's journal segments."""
        return self.home / "journal"

    @property
    def ledger(self) -> Path:
        """SQLite file of finished requests."""
        return self.home / "ledger.db"

    @property
    def rates(self) -> Path:
        """How quick computing and loading were measured to be."""
        return self.home / "rates.json"

    @property
    def identity_key(self) -> Path:
        """The key of all identities of this home."""
        return self.home / "identity.key"

    @property
    def keys(self) -> Path:
        """Who may come in over TCP: `server.key` and `allowed.json`."""
        return self.home / "keys"

    @property
    def server_key(self) -> Path:
        """The CURVE key pair that proves this home to its TCP clients."""
        return self.keys / "server.key"

    @property
    def allowed_keys(self) -> Path:
        """The client keys that may come in, and whose they are."""
        return self.keys / "allowed.json"

    @property
    def incarnations(self) -> Path:
        """One counter file a service."""
        return self.home / "incarnations"

    @property
    def lock(self) -> Path:
        """Held while a stack runs on this home."""
        return self.home / "lock"

    def make(self) -> None:
        """Creates home and run dir (which says whose it is), 0700, ours; PlaceError otherwise."""
        for path in (self.home, self.run, self.incarnations):
            private_dir(path)
        label = self.run / RUN_LABEL
        if not label.exists():
            label.write_bytes(os.fsencode(self.home))


def home_of(run: Path) -> Path | None:
    """The home that a run dir belongs to; None when it does not say."""
    try:
        home = (run / RUN_LABEL).read_bytes()
    except OSError:
        return None
    return Path(os.fsdecode(home)) if home else None


def private_dir(path: Path) -> Path:
    """Creates `path` 0700 (parents as needed) or checks that it is a directory of ours; PlaceError otherwise."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = path.lstat()
    except OSError as error:
        raise PlaceError(f"{path} is no usable directory: {error.strerror}; set PERDURE_HOME elsewhere") from error
    if not stat.S_ISDIR(facts.st_mode):
        raise PlaceError(f"{path} is no directory (a link or file lies there); remove it or set PERDURE_HOME elsewhere")
    if facts.st_uid != os.getuid():
        raise PlaceError(f"{path} belongs to uid {facts.st_uid}, we are {os.getuid()}; set PERDURE_HOME elsewhere")
    if facts.st_mode & 0o077:
        path.chmod(0o700)
    return path


class Lock:
    """An flock held for the life of this object's process; Taken when another process has it.

    The file holds the owner's pid, for people; the flock alone decides.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self.fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise PlaceError(f"{what}: lock {path} can't be opened: {error.strerror}") from error
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self.fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self.fd)
            raise Taken(f"{what} is taken by process {owner} ({path}); stop it or use another PERDURE_HOME") from None
        owner = f"{os.getpid()}\n"
        try:
            os.pwrite(self.fd, owner.encode(), 0)  # before it is cut: a full disk has room for what is there already
            os.ftruncate(self.fd, len(owner))
        except OSError as error:
            os.close(self.fd)
            raise PlaceError(f"{what}: lock {path} can't be written: {error.strerror}") from error

    def keep_across_exec(self) -> None:
        """Lets the lock pass to the program that this process becomes."""
        os.set_inheritable(self.fd, True)

    def release(self) -> None:
        """Gives the lock back; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
