"""Published blocks as a file, so that a benchmark knows what a killed run had completed. Off unless configured."""

from collections.abc import Iterable
from pathlib import Path

FIRST = bytes(32)
"""Stands for the parent of a first block."""
RECORD = 64
"""Bytes a block: its identity, then its parent's."""


class CommitLog:
    """Appends to the file of `faults.record_commits`; does nothing when there is none."""

    def __init__(self, path: str) -> None:
        self.active = bool(path)
        self._path = Path(path)

    def append(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        """(identity, parent) of each block, in one write."""
        with self._path.open("ab", buffering=0) as file:
            file.write(b"".join(identity + parent for identity, parent in pairs))


def whole_chains(path: Path) -> set[bytes]:
    """Identities of a file that are complete down to a first block; a torn last record is left out.

    A block whose parent was never published could not be found by anybody.
    """
    data = path.read_bytes() if path.exists() else b""
    parents = {data[at : at + 32]: data[at + 32 : at + RECORD] for at in range(0, len(data) - RECORD + 1, RECORD)}
    whole: set[bytes] = set()
    for identity in parents:
        run, at = [], identity
        while at in parents and at not in whole:
            run.append(at)
            at = parents[at]
        if at in whole or at == FIRST:
            whole.update(run)
    return whole
