"""What goes into the disk tier and what it says about itself."""

from dataclasses import dataclass
from typing import NamedTuple

from services.store.disk.footer import Footer
from services.store.disk.index_record import Entry
from services.store.disk.troubles import Trouble


class Block(NamedTuple):
    """A block to save. `payload`: `length` bytes, or more up to the next 4 KiB (then page-aligned memory is not
    copied).
    """

    identity: bytes
    parent: bytes
    root: bytes
    generation: int
    checksum: int
    recency: int
    length: int
    payload: memoryview


@dataclass(frozen=True)
class DiskStatistics:
    """Counters since open, and sizes now. `state`: recovering, rebuilding, ready, damaged.

    `blocks` and `bytes` include what recovery has not told yet, of which `unclaimed` blocks. `reason`: the last
    trouble, "" for none; `troubles`: all kinds of them.
    """

    state: str
    reason: str
    blocks: int
    bytes: int
    unclaimed: int
    capacity: int
    counters: dict[str, int]
    troubles: dict[str, Trouble]


def footer_of(entry: Entry) -> Footer:
    """The footer that the slot of an entry must have."""
    return Footer(entry.slot, entry.identity, entry.parent, entry.root, entry.length, entry.generation, entry.checksum)
