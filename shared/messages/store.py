"""Scheduler -> store: open, lookup, taken, release, reserve, commit, clear.

Blobs: `identities`, `parents` hold 32 bytes per block; `slots` packed u32; `generations`, `offsets`,
`checksums` packed u64; `status`, `tiers` one byte per block.
"""

from typing import Literal

from shared.identity import LOCAL
from shared.messages.base import Message
from shared.scope import EVERYTHING, Scope

RESERVE_GRANTED, RESERVE_HAVE, RESERVE_FULL, RESERVE_STALE, RESERVE_NO_PARENT = 0, 1, 2, 3, 4
"""Per-block answers to Reserve: a slot is granted; the identity is held already; no room; older epoch; the parent is
not held (any more), so the block could never be found: save the parent first."""

COMMIT_DONE, COMMIT_STALE = 0, 1
"""Per-block answers to Commit: published; refused (other incarnation, generation or epoch)."""

TIER_MISS, TIER_HOST, TIER_DISK = 0, 1, 2


class OpenEngine(Message, frozen=True, kw_only=True):
    """First message of an engine: the payload size of its slots, and the grants that it still holds.

    Grants of this engine that are not listed are abandoned (their worker has provably stopped: the scheduler
    sends this only after Idle); so are those of engines of other names that have exited. Answered by EngineOpened.
    """

    slot_bytes: int
    held_slots: bytes = b""
    held_generations: bytes = b""


class EngineOpened(Message, frozen=True, kw_only=True):
    """`arena`: path of the arena file, "" when the host tier is off; `arena_key`: identity of this very file.

    `epoch`: the clear epoch that grants and lookups carry. `kept`: one byte per held grant, 1 = still granted.
    """

    arena: str
    arena_key: str
    epoch: int
    kept: bytes


class Lookup(Message, frozen=True, kw_only=True):
    """How long a run of `identities`, from the first, does the store hold? Answered by Found, which leases it."""

    identities: bytes


class Found(Message, frozen=True, kw_only=True):
    """The leading run that the store holds, per block: tier now, slot, payload offset, checksum, generation.

    Blocks on disk have offset 0 and follow by Staged once they are in the arena, those at the end of the run first. The
    run may be larger than the host tier: what is here must be given back by Taken for the rest to come. `lease` 0:
    nothing was found.
    """

    lease: int
    tiers: bytes
    slots: bytes
    offsets: bytes
    generations: bytes
    checksums: bytes
    epoch: int


class Staged(Message, frozen=True, kw_only=True):
    """Push: blocks [first, first + n) of a lease are in the arena now, in any order; `failed`: they will not come."""

    lease: int
    first: int
    slots: bytes
    offsets: bytes
    generations: bytes
    checksums: bytes
    failed: bool = False


class Taken(Message, frozen=True, kw_only=True):
    """Push: these blocks of a lease (packed u32 indices) are on the device, checked. They are leased no longer: their
    slots are room for what is still to be staged. Blocks that were not told of are ignored.
    """

    lease: int
    blocks: bytes


class Release(Message, frozen=True, kw_only=True):
    """Gives a lease back; idempotent. `bad`: packed u32 indices of blocks whose checksum failed on load."""

    lease: int
    bad: bytes = b""


class Reserve(Message, frozen=True, kw_only=True):
    """Asks for slots to save full blocks into; answered by Reserved, in order.

    `root`: 32 bytes, one for all. Every block is full, so its length is OpenEngine's `slot_bytes`. `epoch` as in
    EngineOpened.
    """

    identities: bytes
    parents: bytes
    root: bytes
    epoch: int


class Reserved(Message, frozen=True, kw_only=True):
    """Per block: status, and for a granted one slot, payload offset and generation."""

    status: bytes
    slots: bytes
    offsets: bytes
    generations: bytes
    incarnation: int


class Commit(Message, frozen=True, kw_only=True):
    """Publishes granted slots whose bytes are complete; answered by Committed. Stale ones are refused."""

    incarnation: int
    epoch: int
    slots: bytes
    generations: bytes
    checksums: bytes


class Committed(Message, frozen=True, kw_only=True):
    """Per block, COMMIT_DONE or COMMIT_STALE."""

    status: bytes


class Abandon(Message, frozen=True, kw_only=True):
    """Gives granted slots back unused; idempotent, stale ones are ignored."""

    incarnation: int
    slots: bytes
    generations: bytes


class Clear(Message, frozen=True, kw_only=True):
    """Drops cached KV of a scope, to the store (scheduler, or `admin` while no scheduler is connected).

    Durable before Cleared; one that is cut short by a death is finished by the next store.
    """

    scope: Scope = EVERYTHING


class ClearCache(Message, frozen=True, kw_only=True):
    """`admin` -> scheduler: drops cached KV on all tiers. Answered by Cleared.

    `what`: all; model: of the model that the worker runs; tenant: all that `principal` has; salt: the namespace of
    `principal` and `cache_salt` (None: the one without a salt), of every model; prefix: in that namespace and of the
    worker's model, the prompts that begin as `ids` (packed u32) do: their first block, and all that continues it.
    """

    what: Literal["all", "model", "tenant", "salt", "prefix"]
    principal: str = LOCAL
    cache_salt: str | None = None
    ids: bytes = b""


class Cleared(Message, frozen=True, kw_only=True):
    """Blocks and bytes dropped per tier, and the new epoch."""

    blocks: dict[str, int]
    bytes: dict[str, int]
    epoch: int
