"""A file system of its own for the home, where this user may mount one, that grows full and roomy again on command."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ops.chaos.tmpfs import small_tmpfs

ROOMY = 4 << 30
"""Bytes; a tmpfs takes memory only for what lies in it."""


class Volume:
    """A mounted tmpfs. `home`: a place in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.home = folder / "home"

    def leave(self, nbytes: int) -> None:
        """So many bytes are free from now on, until somebody writes or removes something."""
        facts = os.statvfs(self._folder)
        used = (facts.f_blocks - facts.f_bfree) * facts.f_frsize
        self._resize(max(used + nbytes, facts.f_frsize))

    def relieve(self) -> None:
        """There is room for everything."""
        self._resize(ROOMY)

    def _resize(self, size: int) -> None:
        """To less than lies in it by now it does not go: then it stays as it was, and the next try may meet it."""
        command = ["mount", "-o", f"remount,size={size}", str(self._folder)]
        subprocess.run(command, capture_output=True, check=size == ROOMY)


@contextmanager
def volume(folder: Path) -> Iterator[Volume | None]:
    """None when mounting is not permitted. Gone at the end, with what lies in it."""
    with small_tmpfs(folder, ROOMY) as mounted:
        yield Volume(mounted) if mounted is not None else None
