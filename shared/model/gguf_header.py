"""The header of a GGUF file: metadata and where each tensor lies, read in a tenth of a second.

The `gguf` package's reader takes seconds for a vocabulary (one object a token). This one walks the bytes with
`struct`. The file is untrusted: every length is checked against the file's size before anything is made from it, and
whatever is wrong is a BadModel that names file and place.
"""

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared.model.spec import BadModel
from shared.model.tensors import BLOCK_VALUES, Bytes, row_bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_RANK = 4
MAX_NAME = 1 << 16
"""Bytes of a metadata key or tensor name."""

# Metadata value types, by their number in the file.
_SCALARS = ("B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d")
_NUMPY = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "<u1", None, None, "<u8", "<i8", "<f8")
_BOOL, _STRING, _ARRAY = 7, 8, 9

# fmt: off
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}
"""ggml's tensor types, so that one we don't read is refused by its name."""
# fmt: on

KINDS = tuple(kind for kind in BLOCK_VALUES if kind in TYPE_NAMES.values())
"""Those that are read."""


@dataclass(frozen=True)
class TensorInfo:
    """`shape` has the slowest dimension first (the file has it last); `start` counts from the file's beginning."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Strings:
    """A list of strings that lies in the file: `ends` [count] says where each ends, its length is in front of it.

    A vocabulary and its merges are 100,000 strings and more; a worker needs none of them.
    """

    buffer: mmap.mmap
    start: int
    ends: list[int]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = self.ends[index - 1] if index else self.start
        return self.buffer[start + 8 : self.ends[index]].decode(errors="replace")

    def read(self) -> list[str]:
        """All of them; bytes that are no UTF-8 become U+FFFD."""
        return [self[index] for index in range(len(self))]


@dataclass(frozen=True)
class GgufHeader:
    """All of a GGUF file but its weights; `content` is the mapped file."""

    path: Path
    content: Bytes
    metadata: Mapping[str, Any]
    """Numbers, bools, str, `Strings`, or numpy arrays of numbers."""
    tensors: Mapping[str, TensorInfo]
    data_start: int

    def blob(self, info: TensorInfo) -> Bytes:
        """Bytes of a tensor, a view; BadModel when its type isn't known or it leaves the file."""
        where = f"{self.path}: tensor {info.name}"
        if info.kind not in KINDS:
            raise BadModel(f"{where} has type {info.kind}; known are {', '.join(KINDS)}")
        try:
            size = math.prod(info.shape[:-1]) * row_bytes(info.kind, info.shape[-1])
        except ValueError as error:
            raise BadModel(f"{where}: {error}") from None
        if info.start + size > len(self.content):
            raise BadModel(
                f"{where} ends at byte {info.start + size}, the file has {len(self.content)}; "
                "it is cut short, fetch it again"
            )
        return self.content[info.start : info.start + size]


def map_file(path: Path) -> mmap.mmap:
    """Maps a whole file for reading; BadModel when it can't be read or is empty."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
    except ValueError:
        raise BadModel(f"{path} is empty") from None
    except OSError as error:
        raise BadModel(f"{path} can't be read: {error.strerror}") from error


def read_header(path: Path) -> GgufHeader:
    """Reads and checks the header; BadModel otherwise."""
    buffer = map_file(path)
    walk = _Walk(path, buffer)
    try:
        return walk.header()
    except UnicodeDecodeError as error:
        raise BadModel(f"{path}: a name near byte {walk.at} is no UTF-8 ({error.reason})") from None


class _Walk:
    """A cursor over the header that can't leave the file."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.at = 0

    def bad(self, why: str) -> BadModel:
        return BadModel(f"{self.path}: {why} (near byte {self.at})")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise self.bad(f"{what} needs {count} bytes, {self.size - self.at} are left in the file")

    def scalar(self, code: str, what: str) -> Any:
        self.need(struct.calcsize(f"<{code}"), what)
        (value,) = struct.unpack_from(f"<{code}", self.buffer, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def count(self, least: int, what: str) -> int:
        """A u64 that counts items of at least `least` bytes each."""
        value = int(self.scalar("Q", what))
        if value * least > self.size - self.at:
            raise self.bad(f"{value} {what} can't fit into the {self.size - self.at} bytes that are left")
        return value

    def string(self, what: str, limit: int) -> str:
        length = self.count(1, f"bytes of {what}")
        if length > limit:
            raise self.bad(f"{what} of {length} bytes is longer than {limit}")
        self.at += length
        return self.buffer[self.at - length : self.at].decode()

    def strings(self, count: int, what: str) -> Strings:
        """Where they are. The hot loop of a start."""
        unpack, buffer, size, start, at = struct.Struct("<Q").unpack_from, self.buffer, self.size, self.at, self.at
        ends: list[int] = []
        while len(ends) < count and at + 8 <= size:
            at += 8 + unpack(buffer, at)[0]
            ends.append(at)
        if len(ends) < count or at > size:
            raise self.bad(f"{what} ends within {count} strings")
        self.at = at
        return Strings(self.buffer, start, ends)

    def value(self, what: str) -> Any:
        kind = self.scalar("I", what)
        if kind == _STRING:
            return self.string(what, self.size)
        if kind == _ARRAY:
            return self.array(what)
        if kind >= len(_SCALARS) or _SCALARS[kind] is None:
            raise self.bad(f"{what} has unknown value type {kind}")
        return self.scalar(_SCALARS[kind] or "", what)

    def array(self, what: str) -> Any:
        kind = self.scalar("I", what)
        if kind == _STRING:
            return self.strings(self.count(8, f"strings of {what}"), what)
        if kind >= len(_NUMPY) or _NUMPY[kind] is None:
            raise self.bad(f"{what} is an array of unknown or nested type {kind}")
        dtype = np.dtype(_NUMPY[kind])
        count = self.count(dtype.itemsize, f"items of {what}")
        start, self.at = self.at, self.at + count * dtype.itemsize
        return np.frombuffer(self.buffer, dtype, count, start)

    def header(self) -> GgufHeader:
        if self.size < 24 or self.buffer[:4] != MAGIC:
            raise BadModel(f"{self.path} is no GGUF file: it begins with {self.buffer[:4]!r}, not {MAGIC!r}")
        self.at = 4
        version = self.scalar("I", "the version")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise self.bad(f"GGUF version {version} (big-endian files show huge ones); known are {known}")
        tensor_count = self.scalar("Q", "the tensor count")
        metadata: dict[str, Any] = {}
        for _ in range(self.count(13, "metadata entries")):
            key = self.string("a metadata key", MAX_NAME)
            if key in metadata:
                raise self.bad(f"metadata key {key!r} is there twice")
            metadata[key] = self.value(key)
        if tensor_count * 32 > self.size - self.at:
            raise self.bad(f"{tensor_count} tensors can't fit into the {self.size - self.at} bytes that are left")
        found = [self.tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise self.bad(f"general.alignment is {alignment!r}, no power of two from 8 to 65536")
        data = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in found:
            if info.name in tensors:
                raise self.bad(f"tensor {info.name!r} is there twice")
            if info.start % alignment:
                raise self.bad(f"tensor {info.name!r} starts at {info.start}, no multiple of {alignment}")
            tensors[info.name] = TensorInfo(info.name, info.kind, info.shape, info.start + data)
        content = np.frombuffer(self.buffer, np.uint8)
        return GgufHeader(self.path, content, metadata, tensors, data)

    def tensor(self) -> TensorInfo:
        name = self.string("a tensor name", MAX_NAME)
        rank = self.scalar("I", f"the rank of {name}")
        if not 1 <= rank <= MAX_RANK:
            raise self.bad(f"tensor {name!r} has {rank} dimensions, 1 to {MAX_RANK} are possible")
        shape = tuple(int(self.scalar("Q", f"the shape of {name}")) for _ in range(rank))[::-1]
        if min(shape) < 1:
            raise self.bad(f"tensor {name!r} has shape {list(shape)}")
        kind = self.scalar("I", f"the type of {name}")
        return TensorInfo(
            name, TYPE_NAMES.get(kind, f"number {kind}"), shape, int(self.scalar("Q", f"the place of {name}"))
        )
