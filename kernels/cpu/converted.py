"""Packed weights as one file that is mapped, not read: a worker that starts again finds them in the page cache.

    magic, length of the table, CRC32C of the table │ table (JSON: name -> offset, bytes, XXH3-64) │ parts, page-aligned

The file's name is a hash of what it was made from and of how it was packed, so it is never stale, only missing. It is
written beside its place and renamed when whole; a file that is cut short or bent is made again. Parts are checked once
a mapping: a flipped bit would be a wrong token (and reading them is what brings them into memory before the first
request needs them).
"""

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import xxhash
from crc32c import crc32c
from numpy.typing import NDArray

MAGIC = b"perdure-packed-1"
_HEAD = struct.Struct("<16sII")
ALIGN = 4096
MAX_TABLE = 64 << 20

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Part:
    """Where a part lies in the file: `offset` and `nbytes`; `digest` is the XXH3-64 of its bytes."""

    offset: int
    nbytes: int
    digest: int


class Damaged(ValueError):
    """The file can't be used; the text says why."""


def path_of(directory: Path, digest: bytes, packing: str) -> Path:
    """Name of the file for weights of this `digest`, packed as `packing` says."""
    name = blake2b(digest + packing.encode(), digest_size=16, person=b"perdure-packed").hexdigest()
    return directory / f"{name}.packed"


def opened(path: Path, sizes: Mapping[str, int]) -> dict[str, Bytes]:
    """Read-only views of all parts, which must be those of `sizes` (bytes by name). Damaged, or OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(fd).st_size
        table = _table(os.pread(fd, _HEAD.size + MAX_TABLE, 0), size)
        if {name: part.nbytes for name, part in table.items()} != dict(sizes):
            raise Damaged(f"{path}: other parts than this model has")
        whole = np.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(fd)
    views = {name: whole[part.offset : part.offset + part.nbytes] for name, part in table.items()}
    for name, part in table.items():
        if xxhash.xxh3_64_intdigest(views[name].data) != part.digest:
            raise Damaged(f"{path}: {name} is not what was written")
    return views


def _table(start: bytes, size: int) -> dict[str, Part]:
    if len(start) < _HEAD.size:
        raise Damaged(f"{size} bytes are no packed weights")
    magic, length, crc = _HEAD.unpack_from(start)
    text = start[_HEAD.size : _HEAD.size + length]
    if magic != MAGIC or length > MAX_TABLE or len(text) < length or crc32c(text) != crc:
        raise Damaged("the table of parts is damaged or of another format")
    table = {str(name): Part(*map(int, facts)) for name, facts in json.loads(text).items()}
    for name, part in table.items():
        if part.offset % ALIGN or part.nbytes < 0 or part.offset + part.nbytes > size:
            raise Damaged(f"{name} ends at {part.offset + part.nbytes:,}, the file at {size:,}")
    return table


def write(path: Path, parts: Iterable[tuple[str, int]], pack: Callable[[str], Bytes]) -> None:
    """Packs part by part (name, bytes) straight into a new file at `path`; OSError when that can't be."""
    sizes = list(parts)
    table: dict[str, Part] = {}
    room = sum(len(json.dumps([name, [1 << 62, 1 << 62, (1 << 64) - 1]])) for name, _ in sizes) + 2
    at = _aligned(_HEAD.size + room)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(path)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        for name, nbytes in sizes:
            made = pack(name)
            if made.nbytes != nbytes:
                raise ValueError(f"{name} packs into {made.nbytes:,} bytes, not {nbytes:,}")
            _written(fd, made.reshape(-1).data, at)
            table[name] = Part(at, nbytes, xxhash.xxh3_64_intdigest(made.reshape(-1).data))
            at = _aligned(at + nbytes)
        text = json.dumps({name: [p.offset, p.nbytes, p.digest] for name, p in table.items()}).encode()
        _written(fd, memoryview(_HEAD.pack(MAGIC, len(text), crc32c(text)) + text), 0)
        os.ftruncate(fd, at)
        os.fsync(fd)
        beside.rename(path)
    finally:
        os.close(fd)
        beside.unlink(missing_ok=True)  # renamed, unless something went wrong


def _sweep(path: Path) -> None:
    """What a worker that was killed while it packed left behind goes: it is as large as the model."""
    for left in path.parent.glob(f"{path.name}.*.part"):
        pid = left.name.removesuffix(".part").rpartition(".")[2]
        if not Path(f"/proc/{pid}").exists():
            left.unlink(missing_ok=True)


def _written(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN
