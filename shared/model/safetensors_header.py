"""The header of a safetensors file: where each tensor lies. Read without torch (bf16 has no numpy type).

The file is untrusted: sizes are checked against the file's before anything is made from them. The format allows no
holes and no overlap, so the tensors must tile the data exactly.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from shared.model.gguf_header import map_file
from shared.model.spec import BadModel
from shared.model.tensors import BLOCK_BYTES, F8, Bytes

MAX_HEADER = 100 << 20
KINDS = ("F32", "F16", "BF16", F8)


def read_safetensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], Bytes]]:
    """Name -> (type, shape, bytes as a view of the mapped file); BadModel names what is wrong."""
    content = np.frombuffer(map_file(path), np.uint8)
    size = len(content)
    length = int.from_bytes(content[:8].tobytes(), "little")
    if size < 8 or length > min(MAX_HEADER, size - 8):
        raise BadModel(
            f"{path}: the header claims {length} bytes, the file has {size}; it is cut short or no safetensors"
        )
    try:
        header = json.loads(content[8 : 8 + length].tobytes())
    except (ValueError, RecursionError) as error:
        raise BadModel(f"{path}: the header is no JSON ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise BadModel(f"{path}: the header is no JSON object")
    data = content[8 + length :]
    out: dict[str, tuple[str, tuple[int, ...], Bytes]] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape, start, stop = _entry(f"{path}: tensor {name}", entry)
        if not 0 <= start <= stop <= len(data):
            raise BadModel(
                f"{path}: tensor {name} lies at [{start}, {stop}), the file has {len(data)} bytes of data; "
                "it is cut short, fetch it again"
            )
        if stop - start != math.prod(shape) * BLOCK_BYTES[kind]:
            raise BadModel(f"{path}: tensor {name} of {kind} {list(shape)} can't have {stop - start} bytes")
        spans.append((start, stop, name))
        out[name] = (kind, shape, data[start:stop])
    at = 0
    for start, stop, name in sorted(spans):
        if start != at:
            raise BadModel(f"{path}: tensor {name} starts at byte {start}, the one before ends at {at}")
        at = stop
    if at != len(data):
        raise BadModel(f"{path}: tensors end at byte {at}, the file has {len(data)} bytes of data")
    return out


def _entry(where: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        kind, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise BadModel(f"{where}: its entry in the header lacks dtype, shape or data_offsets") from None
    if kind not in KINDS:
        raise BadModel(f"{where} has type {kind}; known are {', '.join(KINDS)}")
    counts = [*shape, start, stop] if isinstance(shape, list) else [None]
    if not all(type(n) is int and n >= 0 for n in counts):
        raise BadModel(f"{where}: shape {shape!r} or offsets [{start!r}, {stop!r}] are no counts")
    return kind, tuple(shape), start, stop
