"""The incarnation counter of a service: raised on disk before each start, so that no two lives share a number."""

import os
from pathlib import Path


def next_incarnation(directory: Path, service: str) -> int:
    """Raises and returns the counter; durable before it is used. A damaged file starts above any plausible value.

    The caller holds the supervisor's lock of this service, so there is one writer.
    """
    path = directory / service
    try:
        last = int(path.read_text())
    except FileNotFoundError:
        last = 0
    except ValueError:
        last = int(path.stat().st_mtime)
    part = path.with_suffix(".part")
    with part.open("w") as out:
        out.write(f"{last + 1}\n")
        out.flush()
        os.fsync(out.fileno())
    part.replace(path)
    return last + 1
