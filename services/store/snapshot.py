"""What `perdure status` shows of the store, as plain values.

tiers.host, tiers.disk: capacity, used (blocks and bytes), hits, evictions, losses, state and its reason.
tiers.host.memory: huge pages and locking of the arena, see LargeMemory.facts.
tiers.disk: `failures`, failed tries of the lane; `unreadable`, blocks whose disk copy was gone or bad;
`unclaimed`, blocks that a rebuild of the index has not come to yet; `troubles`, by kind.
lookups: asked, misses. leases, grants, staging: what is out now. note: what a person should know, "" if nothing.
"""

from dataclasses import asdict
from typing import Any

from services.store.disk_lane import DiskLane
from services.store.opening import Opened


def snapshot(opened: Opened, lane: DiskLane, arena_trouble: str) -> dict[str, Any]:
    """Keys as above, of a store that has an arena."""
    catalog, arena = opened.catalog, opened.arena
    assert catalog is not None
    assert arena is not None
    facts = catalog.statistics()
    found = facts.lookups
    strides = {
        str(size): catalog.blocks.slots.extent_size.count(i) for i, size in enumerate(catalog.blocks.slots.sizes)
    }
    return {
        "tiers": {
            "host": {
                "state": "troubled" if arena_trouble else "ready",
                "reason": arena_trouble,
                "path": str(arena.path),
                "recovered": arena.recovered,
                "bytes": arena.geometry.total,
                "memory": opened.large.facts() if opened.large is not None else {},
                "capacity": facts.host_capacity,
                "used": facts.host_used,
                "used_bytes": facts.host_bytes,
                "clean": facts.host_clean,
                "dirty": facts.host_dirty,
                "granted": facts.granted,
                "staging": facts.staging,
                "hits": found.host_hits,
                "hit_bytes": found.host_hit_bytes,
                "evictions": facts.counters.host_evictions,
                "losses": facts.counters.host_losses,
                "lost_bytes": facts.counters.host_lost_bytes,
                "quarantined": facts.counters.quarantined,
                "cleared": facts.counters.cleared,
                "extents_by_slot_bytes": strides,
                "extents_reclaimed": facts.counters.extents_reclaimed,
            },
            "disk": _disk(lane)
            | {
                "held": facts.on_disk,
                "hits": found.disk_hits,
                "hit_bytes": found.disk_hit_bytes,
                "staged": found.staged,
                "staged_bytes": found.staged_bytes,
                "stage_failures": found.stage_failures,
                "evictions": facts.counters.disk_evictions,
                "unreadable": facts.counters.disk_failures,
                "queued": facts.queued,
            },
        },
        "note": _note(lane, arena_trouble),
        "blocks": facts.blocks,
        "pinned": facts.pinned,
        "leases": facts.leases,
        "lookups": found.lookups,
        "looked_up": found.asked,
        "misses": found.asked - found.host_hits - found.disk_hits,
        "no_room": found.no_room,
        "epoch": facts.epoch,
        "recovered": opened.adopted,
        "notes": opened.notes,
    }


def _note(lane: DiskLane, arena_trouble: str) -> str:
    parts = [arena_trouble] if arena_trouble else []
    if lane.state not in ("ready", "off"):
        parts.append(f"disk tier {lane.state}: {lane.reason}")
    elif lane.disk is not None and lane.disk.reason:
        parts.append(f"disk tier, last trouble: {lane.disk.reason}")
    return "; ".join(parts)


def _disk(lane: DiskLane) -> dict[str, Any]:
    plain: dict[str, Any] = {"state": lane.state, "reason": lane.reason, **asdict(lane.counters)}
    if lane.disk is not None:
        facts = lane.disk.statistics()
        plain |= {
            "capacity_bytes": facts.capacity,
            "used": facts.blocks,
            "used_bytes": facts.bytes,
            "unclaimed": facts.unclaimed,
            "counters": facts.counters,
            "troubles": {kind: trouble._asdict() for kind, trouble in facts.troubles.items()},
            "last_trouble": facts.reason,
        }
    return plain
