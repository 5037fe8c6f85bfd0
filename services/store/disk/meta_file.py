"""A few small durable records beside the index, so that they survive an index that is begun anew."""

import os
from collections.abc import Mapping
from pathlib import Path

import crc32c
import msgspec

from shared.fileio import FileIO


class MetaFile:
    """One file, replaced as a whole; a damaged one is empty. OSError of the kernel. Not thread-safe."""

    def __init__(self, path: Path, io: FileIO) -> None:
        self._path = path
        self._io = io
        self.values: dict[str, bytes] = {}
        self.damaged = False
        try:
            stored = path.read_bytes()
            if crc32c.crc32c(stored[4:]) != int.from_bytes(stored[:4], "little"):
                raise msgspec.DecodeError("checksum")
            self.values = msgspec.msgpack.decode(stored[4:], type=dict[str, bytes])
        except FileNotFoundError:
            pass
        except msgspec.MsgspecError:
            self.damaged = True

    def put(self, values: Mapping[str, bytes]) -> None:
        """Sets records; they are on the device when this returns."""
        merged = {**self.values, **values}
        whole = packed(merged)
        part = self._path.with_suffix(".part")
        fd = self._io.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            if self._io.write(fd, whole) != len(whole):
                raise OSError(28, "short write")
            self._io.fdatasync(fd)
        finally:
            self._io.close(fd)
        self._io.rename(part, self._path)
        self._io.sync_dir(self._path.parent)
        self.values = merged


def packed(values: Mapping[str, bytes]) -> bytes:
    """The file's content: CRC32C u32, then the records."""
    body = msgspec.msgpack.encode(values)
    return crc32c.crc32c(body).to_bytes(4, "little") + body
