"""What can go wrong with the disk tier, by what its caller does next."""


class DiskTierError(Exception):
    """Base. `reason` is one line for the log and for status."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class DiskUnusable(DiskTierError):
    """The tier can't be opened (no directory, no permission, a format that we don't know): run without it."""


class DiskFull(DiskTierError):
    """No room: capacity, free-space floor, or ENOSPC. Evict from disk, or wait until there is room again."""


class DiskFault(DiskTierError):
    """The device or file system failed a write or flush (EIO, EROFS, ...): the blocks stay dirty; try later."""


class IndexDamaged(DiskTierError):
    """The index can't be trusted: answer misses, then move it aside and rebuild it from the footers."""


class IndexBusy(DiskTierError):
    """The index is open already, in this process or by another owner."""


class DiskGone(DiskTierError):
    """The directory is no longer the one that was opened (removed, replaced, mounted over): close, and open anew."""
