"""What the tiers hold, serve, save and lose, from the services' own numbers; tables and JSON of `cache stats`."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

TIERS = ("device", "host", "disk")


def tiers_of(data: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Snapshots of scheduler and store, {} for one that is away -> {tier: facts}, `leases`, `away`.

    Blocks and bytes are those of now, all others count since the start of their service. Facts of a service that is
    away are missing.
    """
    scheduler, store = data["scheduler"], data["store"]
    tiers: dict[str, Any] = {tier: {} for tier in TIERS}
    counters = scheduler.get("counters", {})
    for tier in TIERS:
        if counters:
            tiers[tier]["hit_tokens"] = counters[f"cached_{tier}"]
    if counters:
        tiers["device"] |= _device(scheduler)
        tiers["host"]["saves"] = counters["save_committed"]
    if found := store.get("tiers"):
        tiers["host"] |= _host(found["host"])
        tiers["disk"] |= _disk(found["disk"])
    return {
        **tiers,
        "leases": store.get("leases", 0),
        "unused": {name: counters.get(name, 0) for name in ("no_read", "no_store")},
        "note": "; ".join(filter(None, (scheduler.get("note", ""), store.get("note", "")))),
        "away": [role for role in data if not data[role]],
    }


def _device(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    pool, size, counters = scheduler["pool"], scheduler["block_bytes"], scheduler["counters"]
    errors = {
        "bad_loads": counters["load_blocks_bad"],
        "late_loads": counters["load_timeouts"],
        "late_lookups": counters["lookup_timeouts"],
        "failed_saves": counters["save_failed"],
    }
    if not pool:
        return {"blocks": 0, "bytes": 0, "capacity_bytes": 0, "errors": errors}
    used = pool["total"] - pool["free"]
    return {
        "blocks": used,
        "bytes": used * size,
        "capacity_bytes": pool["total"] * size,
        "locked": pool["locked"],
        "saves": pool["inserted"],
        "evictions": {"for_room": pool["evicted"]},
        "errors": errors,
    }


def _host(host: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "state": host["state"],
        "blocks": host["used"],
        "bytes": host["used_bytes"],
        "capacity_bytes": host["bytes"],
        "hits": host["hits"],
        "hit_bytes": host["hit_bytes"],
        "dirty": host["dirty"],
        "evictions": {
            "for_room": host["evictions"],
            "unwritten": host["losses"],
            "damaged": host["quarantined"],
            "cleared": host["cleared"],
        },
    }


def _disk(disk: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "state": disk["state"],
        "blocks": disk.get("used", 0),
        "bytes": disk.get("used_bytes", 0),
        "capacity_bytes": disk.get("capacity_bytes", 0),
        "hits": disk["hits"],
        "hit_bytes": disk["hit_bytes"],
        "saves": disk["written"],
        "dirty": disk["queued"],
        "evictions": {"for_room": disk["evictions"], "unreadable": disk["unreadable"], "cleared": disk["cleared"]},
        "errors": {"failed": disk["failures"], "full": disk["full"], "rebuilds": disk["rebuilds"]},
    }


def show_tiers(tiers: Mapping[str, Any], console: Console) -> None:
    """A table: a row a fact, a column a tier."""
    table = Table()
    for column in ("", *TIERS):
        table.add_column(column)
    names = list(dict.fromkeys(name for tier in TIERS for name in tiers[tier]))
    for name in names:
        table.add_row(name.replace("_", " "), *(_cell(tiers[tier].get(name)) for tier in TIERS))
    console.print(table)
    console.print(f"leases: {tiers['leases']}")
    for name, count in tiers["unused"].items():
        console.print(f"requests with {name}: {count}")
    for away in tiers["away"]:
        console.print(f"[red]the {away} is away: its numbers are missing[/red]")
    if tiers["note"]:
        console.print(f"[yellow]{tiers['note']}[/yellow]", markup=True)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name.replace('_', ' ')} {count:,}" for name, count in value.items())
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
