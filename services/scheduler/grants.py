"""What a save is at each moment: an offer, then a grant of a slot in the arena."""

from dataclasses import dataclass

from services.scheduler.kv.sequence import CachedBlock


@dataclass(frozen=True)
class Offer:
    """A device block to be saved; `pool` tells the pools of successive workers apart.

    `again`: it is offered because the store lacked it when a descendant was to be saved.
    """

    root: bytes
    cached: CachedBlock
    pool: int
    again: bool = False


@dataclass(eq=False)
class Grant:
    """A slot that is ours until it is committed or abandoned. `epoch`: the clear epoch that it was reserved in."""

    offer: Offer
    slot: int
    offset: int
    generation: int
    incarnation: int
    epoch: int
    checksum: int = 0
    void: bool = False
