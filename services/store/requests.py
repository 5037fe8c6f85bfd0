"""Packed fields of messages <-> the catalogue's own types; what does not fit together is refused with a reason."""

from collections.abc import Sequence

from services.store.catalog.catalog import Grant
from services.store.catalog.leases import BlockPlace
from shared.actor import Reject
from shared.messages.base import IDENTITY_BYTES, pack_u32, pack_u64, split_identities, unpack_u32, unpack_u64
from shared.messages.store import TIER_DISK, TIER_HOST, Clear, Found, Reserved, Staged
from shared.scope import Scope


def grants_in(slots: bytes, generations: bytes) -> list[tuple[int, int]]:
    """(slot, generation) pairs; Reject when the fields do not fit."""
    if len(slots) % 4 or len(generations) != 2 * len(slots):
        raise Reject("bad_request", f"{len(slots)} bytes of slots and {len(generations)} of generations do not fit")
    return list(zip(unpack_u32(slots), unpack_u64(generations), strict=True))


def checksums_in(blob: bytes, count: int) -> list[int]:
    """`count` checksums; Reject when there are not so many."""
    if len(blob) != 8 * count:
        raise Reject("bad_request", f"{len(blob)} bytes of checksums for {count} slots")
    return list(unpack_u64(blob))


def chains(identities: bytes, parents: bytes, root: bytes) -> list[tuple[bytes, bytes]]:
    """(identity, parent) pairs; Reject when the fields do not fit."""
    ragged = len(identities) % IDENTITY_BYTES or len(root) != IDENTITY_BYTES
    if ragged or len(identities) != len(parents):
        sizes = f"{len(identities)}, {len(parents)} and {len(root)}"
        raise Reject("bad_request", f"identities, parents and root of {sizes} bytes do not fit")
    return list(zip(split_identities(identities), split_identities(parents), strict=True))


def scope_of(message: Clear) -> Scope:
    """What to clear; Reject when it is no scope."""
    fault = message.scope.fault()
    if fault:
        raise Reject("bad_request", fault)
    return message.scope


def answer_reserved(grants: Sequence[Grant], incarnation: int) -> Reserved:
    """The answer to a Reserve."""
    return Reserved(
        status=bytes(grant.status for grant in grants),
        slots=pack_u32(grant.slot for grant in grants),
        offsets=pack_u64(grant.offset for grant in grants),
        generations=pack_u64(grant.generation for grant in grants),
        incarnation=incarnation,
    )


def answer_found(lease: int, places: Sequence[BlockPlace], epoch: int) -> Found:
    """The answer to a Lookup; what is still on disk has offset 0."""
    return Found(
        lease=lease,
        tiers=bytes(TIER_DISK if place.from_disk else TIER_HOST for place in places),
        slots=pack_u32(place.slot for place in places),
        offsets=pack_u64(place.offset if place.staged else 0 for place in places),
        generations=pack_u64(place.generation for place in places),
        checksums=pack_u64(place.checksum for place in places),
        epoch=epoch,
    )


def pushed(lease: int, first: int, places: Sequence[BlockPlace], *, failed: bool) -> Staged:
    """News of a lease."""
    return Staged(
        lease=lease,
        first=first,
        slots=pack_u32(place.slot for place in places),
        offsets=pack_u64(place.offset for place in places),
        generations=pack_u64(place.generation for place in places),
        checksums=pack_u64(place.checksum for place in places),
        failed=failed,
    )
