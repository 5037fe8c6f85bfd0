"""A GGUF model in one file or in several: NAME-00001-of-00003.gguf and so on.

The first shard has all metadata; each has tensors, and says which of how many it is. Any of them may be named.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.model.gguf_header import GgufHeader, TensorInfo, read_header
from shared.model.spec import BadModel
from shared.model.tensors import Bytes

NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
MAX_SHARDS = 99_999


@dataclass(frozen=True)
class GgufModel:
    """`path` is the first shard, `name` what all are called; `metadata` is the first's, `tensors` those of all."""

    path: Path
    name: str
    shards: tuple[GgufHeader, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    owners: Mapping[str, GgufHeader]

    @property
    def files(self) -> list[Path]:
        """All files of the model."""
        return [shard.path for shard in self.shards]

    def blob(self, info: TensorInfo) -> Bytes:
        """Bytes of a tensor, see `GgufHeader.blob`."""
        return self.owners[info.name].blob(info)


def read_gguf(path: Path) -> GgufModel:
    """Reads and checks the headers of all shards; BadModel names the file that is missing or does not belong."""
    header = read_header(path)
    count = header.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_SHARDS:
        raise BadModel(f"{path}: split.count is {count!r}, no number of files")
    if count <= 1:
        owners = dict.fromkeys(header.tensors, header)
        return GgufModel(path, path.stem, (header,), header.metadata, header.tensors, owners)
    stem, paths = _names(path, count)
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BadModel(
            f"{path}: {len(missing)} of the model's {count} files are missing: {', '.join(missing[:3])}{more}; "
            f"they belong beside it"
        )
    shards = tuple(header if each == path else read_header(each) for each in paths)
    tensors: dict[str, TensorInfo] = {}
    owners = {}
    for number, shard in enumerate(shards):
        _check_place(shard, number, count)
        for name, info in shard.tensors.items():
            if name in tensors:
                raise BadModel(f"{shard.path}: tensor {name!r} is in {owners[name].path.name} too")
            tensors[name], owners[name] = info, shard
    total = shards[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise BadModel(f"{paths[0]}: the model has {total} tensors, its {count} files hold {len(tensors)}")
    return GgufModel(paths[0], stem, shards, shards[0].metadata, tensors, owners)


def _names(path: Path, count: int) -> tuple[str, list[Path]]:
    match = NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise BadModel(f"{path} is one of {count} files; they are found by names that end in -00001-of-{count:05}.gguf")
    return match[1], [path.with_name(f"{match[1]}-{n + 1:05}-of-{count:05}.gguf") for n in range(count)]


def _check_place(shard: GgufHeader, number: int, count: int) -> None:
    found = shard.metadata.get("split.no"), shard.metadata.get("split.count")
    if found != (number, count):
        raise BadModel(
            f"{shard.path} says that it is file {found[0]} of {found[1]} (counted from 0), "
            f"its name that it is {number} of {count}"
        )
