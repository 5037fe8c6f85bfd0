"""A tmpfs that is too small for the host tier that is asked for, where this user may mount one."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_tmpfs(folder: Path, size: int) -> Iterator[Path | None]:
    """Mounts `size` bytes at `folder`, which is made; None when mounting is not permitted. Unmounted at the end."""
    folder.mkdir(mode=0o700)
    options = f"size={size},mode=0700"
    command = ["mount", "-t", "tmpfs", "-o", options, "perdure-chaos", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:  # no such command
        mounted = False
    if not mounted:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=True)
