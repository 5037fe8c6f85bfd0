"""Who holds a lock file: its pid is for people, and stays there when the holder is gone."""

import os
from pathlib import Path


def holder(path: Path) -> int | None:
    """The process that the file names, if it lives and has this very file open; else None.

    A pid alone proves nothing: a killed stack leaves its files behind, and the kernel gives pids out again.
    """
    try:
        pid = int(path.read_text())
        this = os.stat(path)
        with os.scandir(f"/proc/{pid}/fd") as opened:
            return pid if any(_is(Path(entry.path), this) for entry in opened) else None
    except (OSError, ValueError):
        return None


def _is(link: Path, this: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(link), this)
    except OSError:  # closed meanwhile
        return False
