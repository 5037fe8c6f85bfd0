"""Blocks that a worker could not load are read again here before anything is given up for them.

A scheduler names a block when its copy had another checksum, or when workers died again and again while they copied
it. Neither proves that the bytes here are wrong: somebody who kills workers hits the same load twice. What is right
stays; what is not is quarantined.
"""

from collections.abc import Sequence

import trio
import xxhash

from services.store.arena.arena import Arena
from services.store.catalog.blocks import Blocks
from services.store.catalog.leases import Lease
from services.store.catalog.order import NONE


async def wrong_blocks(arena: Arena, blocks: Blocks, lease: Lease, named: Sequence[int]) -> tuple[int, ...]:
    """Those of the lease's blocks (by index in it) whose bytes in the arena are not what they should be.

    The lease must stay open meanwhile: it pins them.
    """
    entries, slots = blocks.entries, blocks.slots
    places: list[tuple[int, int, int, int]] = []
    for index in sorted(set(named)):
        entry = lease.entries[index] if index < len(lease.entries) else NONE
        slot = entries.host[entry] if entry != NONE else NONE
        if slot != NONE:
            places.append((index, blocks.headers.offset(slot), entries.length[entry], slots.checksum[slot]))

    def wrong() -> tuple[int, ...]:
        return tuple(
            index
            for index, offset, length, checksum in places
            if xxhash.xxh3_64_intdigest(arena.payload(offset, length)[:length]) != checksum
        )

    return await trio.to_thread.run_sync(wrong) if places else ()
