"""The small files of a Hugging Face directory: JSON objects with typed access, in bounded reads."""

import json
import os
from pathlib import Path
from typing import Any, TypeVar

from shared.model.spec import BadModel

T = TypeVar("T", int, float, str, bool)

MAX_CONFIG = 4 << 20
"""Bytes that are read of a configuration."""


class JsonFile:
    """One JSON object; a missing optional file is an empty one. BadModel names file and key."""

    def __init__(self, path: Path, *, optional: bool = False, limit: int = MAX_CONFIG) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        try:
            values = json.loads(read_bounded(path, limit))
        except FileNotFoundError:
            if not optional:
                raise BadModel(f"{path.parent} has no {path.name}; the directory is incomplete") from None
            return
        except (ValueError, RecursionError) as error:
            raise BadModel(f"{path} is no JSON: {error}") from None
        if not isinstance(values, dict):
            raise BadModel(f"{path} is no JSON object")
        self.values = values

    @classmethod
    def of(cls, path: Path, values: object) -> "JsonFile":
        """An object that lies inside the file `path`."""
        if not isinstance(values, dict):
            raise BadModel(f"{path}: {values!r} is no JSON object")
        inner = cls.__new__(cls)
        inner.path, inner.values = path, values
        return inner

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Value of `key` (null counts as absent); integers pass as floats."""
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise BadModel(f"{self.path}: {key} is missing")
        if kind is float and type(value) is int and abs(value) < 1 << 63:
            return kind(value)
        if type(value) is not kind:
            raise BadModel(f"{self.path}: {key} is {value!r}, not of type {kind.__name__}")
        return value

    def ids(self, key: str) -> list[int]:
        """Token ids given as one integer, a list, or null."""
        value = self.values.get(key)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(id) is int for id in listed):
            raise BadModel(f"{self.path}: {key} is {value!r}, not a token id or a list of them")
        return listed


def read_bounded(path: Path, limit: int) -> bytes:
    """Content of a file; BadModel when it is longer than `limit` bytes, FileNotFoundError when it isn't there."""
    try:
        with path.open("rb") as file:
            content = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)  # a buffer of that size is made first
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadModel(f"{path} can't be read: {error.strerror}") from error
    if len(content) > limit:
        raise BadModel(f"{path} is longer than {limit} bytes")
    return content
