"""The tier's directory: made, locked, and still the one that was opened."""

import os
from pathlib import Path

from services.store.disk.errors import DiskGone, DiskUnusable, IndexBusy
from shared.paths import Lock, PlaceError, Taken


class TierPlace:
    """Ours from here to `release`."""

    def __init__(self, directory: Path) -> None:
        """DiskUnusable; IndexBusy when another owner has it."""
        self.directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = Lock(directory / "lock", "the disk tier")
            self._opened = self._identity()
        except Taken as error:
            raise IndexBusy(str(error)) from error
        except PlaceError as error:
            raise DiskUnusable(f"disk tier: {error}") from error
        except OSError as error:
            raise DiskUnusable(f"disk tier: {directory} can't be used: {error.strerror}") from error

    def _identity(self) -> tuple[int, int]:
        facts = os.stat(self.directory)
        return facts.st_dev, facts.st_ino

    def gone(self) -> DiskGone | None:
        """Whether the path leads elsewhere by now, or nowhere."""
        try:
            same = self._identity() == self._opened
        except OSError as error:
            return DiskGone(f"disk tier: {self.directory} is gone: {error.strerror}")
        return None if same else DiskGone(f"disk tier: {self.directory} is another directory than the one opened")

    def check(self) -> None:
        """DiskGone when it is."""
        if (gone := self.gone()) is not None:
            raise gone

    def release(self) -> None:
        """Another owner may have it."""
        self._lock.release()
