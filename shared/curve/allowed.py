"""Which client keys may come in, and whose they are: one file, read by the front, written by `perdure keys`.

The front looks at the file's stat at every handshake and once a second, so a change acts on a running stack. What
can't be read lets nobody in: a damaged list must not keep a removed key alive.
"""

import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from shared.config import ConfigError
from shared.curve.keys import KeyFileError, is_key, read_private, write_part
from shared.fileio import FileIO
from shared.identity import LOCAL
from shared.paths import PlaceError, private_dir

MAX_KEYS = 4096
KEY_REFUSED = "this key is not allowed (it never was, or it was removed)"
"""What a client hears, before and after the handshake alike."""
_USER = re.compile(r"[a-z0-9][a-z0-9._@-]{0,62}")


class AllowedKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One client key: its owner, its public half (Z85), and when it was added (UTC, ISO 8601)."""

    user: str
    public: str
    added: str

    @property
    def id(self) -> str:
        """Short name of the key, for people."""
        return key_id(self.public)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[AllowedKey, ...]
    version: int = 1


def key_id(public: str) -> str:
    """Short name of a public key: the hex of its first 8 characters, so that a shell takes it unquoted."""
    return public[:8].encode().hex()


def check_user(user: str) -> str:
    """The name of a user, if it may be one; ConfigError otherwise."""
    if not _USER.fullmatch(user) or user == LOCAL:
        reason = f"{user[:80]!r} is no user name; 1 to 63 of a-z 0-9 . _ @ -, begun by a letter or digit"
        raise ConfigError(f"{reason}, and not {LOCAL!r}, which is whoever works on this machine")
    return user


def read_allowed(path: Path) -> tuple[AllowedKey, ...]:
    """The keys of the list, in the order added; FileNotFoundError, or KeyFileError when it can't be trusted."""
    try:
        data = read_private(path, "the list of client keys")
    except PermissionError as error:
        raise KeyFileError(f"the list of client keys {path} can't be read: {error.strerror}") from error
    try:
        found = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KeyFileError(f"the list of client keys {path} is damaged: {error}; restore it") from error
    if found.version != 1:
        raise KeyFileError(f"the list of client keys {path} has version {found.version}; this Perdure reads 1")
    for key in found.keys:
        if not is_key(key.public):
            raise KeyFileError(f"the list of client keys {path} is damaged: {key.public[:60]!r} is no key; restore it")
        try:
            check_user(key.user)
        except ConfigError as error:
            raise KeyFileError(f"the list of client keys {path} is damaged: {error}; restore it") from error
    return found.keys


def write_allowed(path: Path, keys: tuple[AllowedKey, ...], io: FileIO | None = None) -> None:
    """Replaces the list, at once and durably; callers hold `changing`."""
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{len(keys):,} client keys; at most {MAX_KEYS:,} are kept, remove old ones")
    io = io or FileIO()
    part = write_part(path, msgspec.json.format(msgspec.json.encode(_File(keys=keys))) + b"\n", io)
    io.rename(part, path)
    io.sync_dir(path.parent)


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """Holds the folder of keys for one change; others wait, as no change takes long."""
    private_dir(folder)
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise PlaceError(f"{folder / 'lock'} can't be opened: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class Allowed:
    """The list as it stands now. `complain(why, detail)` hears once a second at most why nobody is let in."""

    def __init__(self, path: Path, complain: Callable[[str, str], object]) -> None:
        self._path = path
        self._complain = complain
        self._seen: tuple[int, ...] | None = None
        self._users: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._users)

    def user_of(self, public: str) -> str | None:
        """Whose key it is, by the list as last looked at; None for one that is not allowed."""
        return self._users.get(public)

    def refresh(self) -> bool:
        """Looks at the file, reads it when it is another; True when the list has changed."""
        seen: tuple[int, ...] = ()
        try:
            facts = os.stat(self._path, follow_symlinks=False)
            seen = (facts.st_ino, facts.st_size, facts.st_mtime_ns, stat.S_IMODE(facts.st_mode), facts.st_uid)
        except OSError:
            pass  # looked into below, where the reason is told
        if seen == self._seen:
            return False
        before, self._users = self._users, {}
        try:
            self._users = {key.public: key.user for key in read_allowed(self._path)}
        except FileNotFoundError:
            self._complain("no_keys", f"the list of client keys {self._path} is gone; nobody is let in over TCP")
        except ConfigError as error:
            self._complain("no_keys", f"{error}; nobody is let in over TCP meanwhile")
        self._seen = seen
        return before != self._users
