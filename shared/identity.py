"""Names of KV blocks: fingerprint, root, chained identity (keyed BLAKE2b-256), and the key they are made with.

Two blocks share an identity if and only if everything that changes their KV is equal: the fingerprint (model,
numerics, layout), adapter, tenant salt, and every token before and in them. Each hashed field is length-framed
and type-tagged, so that an adapter "X" never equals a salt "X". Never Python's `hash()`, which differs by process.

A root is made of parts, so that a clear finds all blocks of a model, a tenant or a salt on every tier, those of
earlier lives too, without a table of roots that could be lost:

    model 6 │ tenant 5 │ salt 5 │ everything 16        bytes, each a keyed hash of its own

What separates namespaces is the whole. A part alone is met by another one once in 2^40, and then a clear drops more
than it was asked to: a miss.
"""

import contextlib
import hmac
import os
import secrets
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

from shared.fileio import FileIO

IDENTITY_BYTES = 32
KEY_FORMAT = 2
"""Raised when the derivation below changes; part of every root."""

LOCAL = "local"
"""The principal of this user's own processes, over ipc: the default tenant."""
_DEFAULT_TENANT = bytes(32)

MODEL, TENANT, SALT = slice(0, 6), slice(6, 11), slice(11, 16)
"""Where the parts of a root lie."""


class KeyDamaged(ValueError):
    """The key's file does not hold a key; the text names the file and the way out."""


def _framed(tag: bytes, value: bytes) -> bytes:
    return bytes((len(tag),)) + tag + len(value).to_bytes(8, "little") + value


def fingerprint(fields: Mapping[str, str | int | bytes]) -> bytes:
    """32 bytes over named facts (weights digest, architecture, RoPE, numerics id, KV dtype, block size, layout).

    Independent of the mapping's order; unkeyed, so that it may be shown and compared between homes.
    """
    digest = blake2b(digest_size=IDENTITY_BYTES, person=b"perdure-fprint")
    digest.update(_framed(b"key-format", KEY_FORMAT.to_bytes(4, "little")))
    for name in sorted(fields):
        value = fields[name]
        if isinstance(value, bytes):
            digest.update(_framed(b"b:" + name.encode(), value))
        elif isinstance(value, int):
            digest.update(_framed(b"i:" + name.encode(), str(value).encode()))
        else:
            digest.update(_framed(b"s:" + name.encode(), value.encode()))
    return digest.digest()


def root(key: bytes, fingerprint: bytes, *, adapter: str = "", salt: bytes = b"") -> bytes:
    """The identity that stands before the first block of a namespace; `salt` as `namespace_salt` makes it."""
    digest = blake2b(digest_size=16, key=key, person=b"perdure-root")
    digest.update(_framed(b"key-format", KEY_FORMAT.to_bytes(4, "little")))
    digest.update(_framed(b"fingerprint", fingerprint))
    digest.update(_framed(b"adapter", adapter.encode()))
    digest.update(_framed(b"salt", salt))
    return model_part(key, fingerprint) + tenant_part(key, salt) + salt_part(key, salt) + digest.digest()


def model_part(key: bytes, fingerprint: bytes) -> bytes:
    """The bytes MODEL of every root of this fingerprint."""
    return _part(key, b"model", fingerprint, MODEL)


def tenant_part(key: bytes, salt: bytes) -> bytes:
    """The bytes TENANT of every root of the tenant that a namespace's salt belongs to."""
    return _part(key, b"tenant", salt[:32] or _DEFAULT_TENANT, TENANT)


def salt_part(key: bytes, salt: bytes) -> bytes:
    """The bytes SALT of every root of the salt that a request named (or of none)."""
    return _part(key, b"salt", salt[32:], SALT)


def _part(key: bytes, tag: bytes, value: bytes, where: slice) -> bytes:
    size = where.stop - where.start
    return blake2b(_framed(tag, value), digest_size=size, key=key, person=b"perdure-part").digest()


def child(key: bytes, parent: bytes, tokens: bytes) -> bytes:
    """Identity of a full block: `tokens` is its packed u32 ids, `parent` the identity before it."""
    digest = blake2b(parent, digest_size=IDENTITY_BYTES, key=key, person=b"perdure-block")
    digest.update(tokens)
    return digest.digest()


def chain(key: bytes, parent: bytes, tokens: bytes, block_tokens: int) -> Iterator[bytes]:
    """Identities of the full blocks of `tokens` (packed u32), in order; a partial tail has none."""
    width = 4 * block_tokens
    for start in range(0, len(tokens) - width + 1, width):
        parent = child(key, parent, tokens[start : start + width])
        yield parent


def tenant_salt(key: bytes, tenant: str) -> bytes:
    """Salt of a tenant, from its id and not its API key, so that a rotated key keeps the cache."""
    return hmac.digest(key, b"tenant:" + tenant.encode(), "sha256")


def namespace_salt(key: bytes, principal: str, cache_salt: str | None = None) -> bytes:
    """What separates the cache of this principal, and of the salt that its request names, from everybody else's.

    b"" for a local process that names none; else 32 bytes of the tenant, and 32 more for a named salt: these cover
    the tenant too, so two principals that write the same salt share nothing.
    """
    tenant = _DEFAULT_TENANT if principal == LOCAL else tenant_salt(key, principal)
    if cache_salt is None:
        return b"" if principal == LOCAL else tenant
    named = _framed(b"tenant", tenant) + _framed(b"cache-salt", cache_salt.encode())
    return tenant + hmac.digest(key, named, "sha256")


def load_or_create_key(path: Path, io: FileIO | None = None) -> bytes:
    """The 32-byte key of a home, 0600, created once; callers hold the home lock.

    KeyDamaged when the file has another size: a truncated key would silently make every block a stranger.
    """
    io = io or FileIO()
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        key = _create_key(path, io)
    parts = list(path.parent.glob(f"{path.stem}.*.part"))
    if parts:  # ours, or of a creator that died; perhaps before its key's name was durable
        io.sync_dir(path.parent)
        for part in parts:
            with contextlib.suppress(FileNotFoundError):
                io.unlink(part)
    if len(key) != 32:
        raise KeyDamaged(f"{path} holds {len(key)} bytes, a key has 32; restore it, or remove it and lose the cache")
    return key


def _create_key(path: Path, io: FileIO) -> bytes:
    """Whole and durable before it has its name: blocks named with a key that a power loss takes are lost with it."""
    key = secrets.token_bytes(32)
    part = path.with_suffix(f".{os.getpid()}.part")
    fd = io.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)  # a dead process with our pid may have left one
    try:
        io.write(fd, key)
        io.fdatasync(fd)
    finally:
        io.close(fd)
    try:
        io.link(part, path)
    except (FileExistsError, FileNotFoundError):  # the first of two creators wins, and both read its key
        key = path.read_bytes()
    return key
