"""A few small durable records beside the index, so that they survive an index that is begun anew."""

from collections.abc import Mapping
from pathlib import Path

import crc32c
import msgspec

from shared.fileio import FileIO, replace_file


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
        replace_file(self._io, self._path, packed(merged), part=self._path.with_suffix(".part"))
        self.values = merged


def packed(values: Mapping[str, bytes]) -> bytes:
    """The file's content: CRC32C u32, then the records."""
    body = msgspec.msgpack.encode(values)
    return crc32c.crc32c(body).to_bytes(4, "little") + body
