"""CURVE key pairs in files: the server's, made once per home, and a client's, which is all that a client needs.

Keys are Z85 text of 40 characters, as ZeroMQ writes them. Files are 0600, and refused when others could read them.
"""

import glob
import os
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from shared.config import ConfigError
from shared.fileio import FileIO, write_all

MAX_FILE = 1 << 20
"""Bytes; no file of keys is larger."""
KEY_CHARS = 40


class KeyFileError(ConfigError):
    """A file of keys can't be used; the text names it and the way out."""


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Both halves of a CURVE key, Z85."""

    public: str
    secret: str


class ClientKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client's whole credential: who it is, its key pair, and the server's public key, which proves the server."""

    user: str
    public: str
    secret: str
    server: str


@dataclass(frozen=True)
class Remote:
    """Where a mailbox is reached over TCP, and with which key."""

    endpoint: str
    key: ClientKey


def new_pair() -> KeyPair:
    """A fresh key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public.decode(), secret=secret.decode())


def is_key(text: str) -> bool:
    """Whether the text is a CURVE key in Z85."""
    if len(text) != KEY_CHARS or not text.isascii():
        return False
    try:
        return len(z85.decode(text.encode())) == 32
    except (KeyError, ValueError, ZeroDivisionError, OverflowError, struct.error):  # the last: digits above 2^32
        return False


def read_private(path: Path, what: str) -> bytes:
    """The bytes of a file of ours that nobody else can read or write; FileNotFoundError, or KeyFileError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise KeyFileError(f"{what} {path} can't be opened: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise KeyFileError(f"{what} {path} is no regular file")
        if facts.st_uid != os.getuid():
            raise KeyFileError(f"{what} {path} belongs to uid {facts.st_uid}, we are {os.getuid()}")
        if facts.st_mode & 0o077:
            mode = stat.S_IMODE(facts.st_mode)
            raise KeyFileError(f"{what} {path} is open to others (mode {mode:03o}); chmod 600 it, or make a new key")
        if facts.st_size > MAX_FILE:
            raise KeyFileError(f"{what} {path} has {facts.st_size:,} bytes; at most {MAX_FILE:,} are read")
        return file.read(MAX_FILE)


def write_new(path: Path, data: bytes, io: FileIO | None = None) -> None:
    """A new file, 0600, whole and durable or not at all; FileExistsError when something is there."""
    io = io or FileIO()
    part = write_part(path, data, io)
    try:
        io.link(part, path)
        io.sync_dir(path.parent)
    finally:
        io.unlink(part)


def write_part(path: Path, data: bytes, io: FileIO) -> Path:
    """The content of a file, durable and 0600, under a name of its own; callers give it the name `path`."""
    _sweep_parts(path, io)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    fd = io.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_all(io, fd, data)
        io.fdatasync(fd)
    except OSError:
        io.unlink(part)
        raise
    finally:
        io.close(fd)
    return part


def _sweep_parts(path: Path, io: FileIO) -> None:
    """What dead writers of `path` left behind goes: it may hold a secret."""
    for left in path.parent.glob(f"{glob.escape(f'.{path.name}.')}*.part"):
        io.unlink(left)


def load_server_key(path: Path) -> KeyPair:
    """The server's key pair; FileNotFoundError, or KeyFileError when it is damaged."""
    damaged = f"the server's key {path} is damaged; restore it, or remove it and make all keys anew"
    try:
        pair = msgspec.json.decode(read_private(path, "the server's key"), type=KeyPair)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KeyFileError(damaged) from error
    if not is_key(pair.secret) or zmq.curve_public(pair.secret.encode()).decode() != pair.public:
        raise KeyFileError(damaged)
    return pair


def load_or_create_server_key(path: Path, io: FileIO | None = None) -> KeyPair:
    """The key pair of this home, made once; callers hold `changing`, so that a part file is a dead maker's."""
    io = io or FileIO()
    if path.exists():
        _sweep_parts(path, io)
    else:
        with suppress(FileExistsError):
            write_new(path, msgspec.json.encode(new_pair()) + b"\n", io)
    return load_server_key(path)


def load_client_key(path: Path) -> ClientKey:
    """A client's credential; KeyFileError for whatever is wrong."""
    try:
        key = msgspec.json.decode(read_private(path, "key file"), type=ClientKey)
    except FileNotFoundError:
        raise KeyFileError(f"there is no key file {path}; `perdure keys add` on the server makes one") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KeyFileError(f"key file {path} is damaged: {error}") from error
    if not all(is_key(text) for text in (key.public, key.secret, key.server)):
        raise KeyFileError(f"key file {path} is damaged: a key is Z85 text of {KEY_CHARS} characters")
    return key
