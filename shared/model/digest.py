"""Digest of a model's weights: their content, not the file's name; cached because 16 GB take eleven seconds.

The cache (`digests.json` beside the models) is keyed by (device, inode, size, mtime_ns) of each file. A file written
less than two seconds ago is not cached: within one tick of its clock it could change again unseen.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from shared.model.tensors import Bytes

CACHE_NAME = "digests.json"
MAX_ENTRIES = 256
MAX_CACHE_BYTES = 1 << 20
FRESH_S = 2.0
THREADS = 4
_PIECE = 8 << 20


def cached_digest(models_dir: Path, files: Sequence[Path], compute: Callable[[], bytes]) -> bytes:
    """`compute()`, or what it gave for these very files before. A broken or missing cache only costs time."""
    facts = [file.stat() for file in files]
    key = ";".join(f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}" for s in facts)
    cache = models_dir / CACHE_NAME
    known = _read(cache)
    if key in known:
        return bytes.fromhex(known[key])
    digest = compute()
    if time.time() - max(s.st_mtime for s in facts) > FRESH_S:
        known = dict(list(_read(cache).items())[-MAX_ENTRIES + 1 :]) | {key: digest.hex()}
        _write(cache, known)
    return digest


def digest_tensors(entries: Iterable[tuple[str, str, tuple[int, ...], Bytes]]) -> bytes:
    """32 bytes over (name, type, shape, bytes) of each tensor; the order of `entries` doesn't matter to the result.

    Each tensor is hashed by itself, several at a time (hashing lets go of the interpreter's lock), then all digests.
    """
    listed = sorted(entries, key=lambda entry: entry[0])
    whole = blake2b(digest_size=32, person=b"perdure-weights")
    with ThreadPoolExecutor(THREADS, "digest") as pool:
        for (name, kind, shape, blob), content in zip(
            listed, pool.map(_content, (blob for *_, blob in listed)), strict=True
        ):
            facts = json.dumps([name, kind, list(shape), blob.nbytes]).encode()
            whole.update(len(facts).to_bytes(8, "little") + facts + content)
    return whole.digest()


def _content(blob: Bytes) -> bytes:
    digest = blake2b(digest_size=32, person=b"perdure-tensor")
    view = memoryview(blob)  # type: ignore[arg-type]  # an array is a buffer
    for start in range(0, blob.nbytes, _PIECE):
        digest.update(view[start : start + _PIECE])
    return digest.digest()


def _read(cache: Path) -> dict[str, str]:
    try:
        with cache.open("rb") as file:
            raw = json.loads(file.read(MAX_CACHE_BYTES))
        return {str(key): str(value) for key, value in raw.items() if len(bytes.fromhex(value)) == 32}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return {}


def _write(cache: Path, known: dict[str, str]) -> None:
    part = cache.with_name(f"{CACHE_NAME}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(known, file, indent=0)
        part.replace(cache)
    except OSError:  # a read-only place: the digest is computed each time
        with contextlib.suppress(OSError):
            part.unlink()
