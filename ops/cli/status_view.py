"""What people read in `perdure status`: services, model, requests, tiers, and whatever is not as it should be.

Pure: from the services' own snapshots (plain values) to text. A fact that is missing, as its service is away or still
starting, is left out.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ops.cli.tiers import TIERS, tiers_of
from shared.messages.hello import Snapshot

Found = Mapping[str, Snapshot | None]

ORDINARY = frozenset({"refused", "deadline", "unanswered"})
"""Why messages are turned away in every restart: a hello that came too early, an answer whose asker has gone."""


def show(found: Found, console: Console) -> None:
    """The whole picture, in about a screen."""
    console.print(_services(found))
    data = {role: snapshot.data if snapshot is not None else {} for role, snapshot in found.items()}
    lines = Table.grid(padding=(0, 2))
    for name, text in (("model", model(data)), ("requests", requests(data)), ("memory", memory(data))):
        if text:
            lines.add_row(f"[bold]{name}[/bold]", escape(text))
    console.print(lines)
    if data.get("scheduler") or data.get("store"):
        console.print(_tiers(data))
    for line in troubles(found):
        console.print(f"[yellow]![/yellow] {escape(line)}", highlight=False)


def _services(found: Found) -> Table:
    table = Table()
    for column in ("service", "state", "incarnation", "pid", "up for", "notes"):
        table.add_column(column)
    for role, snapshot in found.items():
        if snapshot is None:
            table.add_row(role, "[red]away[/red]", "", "", "", "")
            continue
        state = "[green]ready[/green]" if snapshot.ready else "[yellow]starting[/yellow]"
        notes = escape(str(snapshot.data.get("note", "")))
        if snapshot.data.get("faults"):
            notes = f"[red]fault hooks are set[/red] {notes}"
        up = f"{snapshot.uptime_s:.0f} s"
        table.add_row(role, state, str(snapshot.incarnation), str(snapshot.pid), up, notes)
    return table


def model(data: Mapping[str, Mapping[str, Any]]) -> str:
    """Which model, how it is computed, and the blocks of its KV."""
    worker, scheduler = data.get("worker", {}), data.get("scheduler", {})
    if "architecture" not in worker:
        return str(worker.get("loading", ""))
    parts = [
        f"{worker['model']} ({worker['architecture']})",
        f"backend {worker['backend']}, numerics {worker['numerics']}, "
        + ("exact" if worker["exact"] else "to a tolerance"),
        f"KV {worker['kv_dtype']}",
    ]
    if scheduler.get("block_bytes"):
        parts.append(f"blocks of {scheduler['block_tokens']} tokens, {size(scheduler['block_bytes'])}")
    parts.append(f"context {worker['max_context']:,}")
    return "; ".join(parts)


def requests(data: Mapping[str, Mapping[str, Any]]) -> str:
    """How many there are now, and what was served since the scheduler's start."""
    scheduler = data.get("scheduler", {})
    if "requests" not in scheduler:
        return ""
    now, ever = scheduler["requests"], scheduler["counters"]
    ended = {name: ever[f"finished_{name}"] for name in ("stop", "length", "cancelled", "deadline", "error")}
    said = ", ".join(f"{count:,} by {name}" for name, count in ended.items() if count) or "none"
    return (
        f"{now['running']:,} running, {now['waiting']:,} waiting, {now['loading']:,} loading; "
        f"{ever['accepted']:,} accepted, {ever['rejected']:,} rejected, ended: {said}; "
        f"{ever['prompt_tokens']:,} prompt and {ever['output_tokens']:,} output tokens"
    )


def memory(data: Mapping[str, Mapping[str, Any]]) -> str:
    """What became of huge pages and locked memory."""
    parts = []
    arena = data.get("store", {}).get("tiers", {}).get("host", {}).get("memory")
    for name, facts in (("arena", arena), ("pool", data.get("worker", {}).get("pool"))):
        if facts and "huge_pages" in facts:
            parts.append(f"{name}: huge pages {facts['huge_pages']}; locked {facts['locked']}")
    return "\n".join(parts)


def _tiers(data: Mapping[str, Mapping[str, Any]]) -> Table:
    picture = tiers_of({role: data.get(role, {}) for role in ("scheduler", "store")})
    prompts = data.get("scheduler", {}).get("counters", {}).get("prompt_tokens", 0)
    table = Table()
    for column in ("tier", "state", "used", "of", "blocks", "hit tokens", "of prompts", "unwritten"):
        table.add_column(column, justify="left" if column in ("tier", "state") else "right")
    for tier in TIERS:
        facts = picture[tier]
        hits = facts.get("hit_tokens")
        table.add_row(
            tier,
            str(facts.get("state", "ready" if facts.get("capacity_bytes") else "")),
            size(facts["bytes"]) if "bytes" in facts else "",
            size(facts["capacity_bytes"]) if "capacity_bytes" in facts else "",
            f"{facts['blocks']:,}" if "blocks" in facts else "",
            "" if hits is None else f"{hits:,}",
            f"{hits / prompts:.1%}" if hits is not None and prompts else "",
            f"{facts['dirty']:,}" if tier == "host" and "dirty" in facts else "",
        )
    return table


def troubles(found: Found) -> Iterator[str]:
    """A line for each thing that is not as it should be, in words; nothing on a good day."""
    for role, snapshot in found.items():
        if snapshot is None:
            continue
        for target, link in snapshot.data.get("links", {}).items():
            if snapshot.ready and not link["up"]:
                yield f"the {role} does not reach the {target}"
        drops = {why: count for why, count in snapshot.data.get("drops", {}).items() if why not in ORDINARY}
        if drops:
            told = ", ".join(f"{name} {count:,}" for name, count in drops.items())
            yield f"the {role} has turned away messages since its start: {told}"
    store = found.get("store")
    if store is not None:
        yield from _of_store(store.data)
    scheduler = found.get("scheduler")
    if scheduler is not None and scheduler.ready:
        yield from _of_scheduler(scheduler.data)


def _of_store(store: Mapping[str, Any]) -> Iterator[str]:
    for tier, facts in store.get("tiers", {}).items():
        if facts.get("reason"):
            yield f"{tier} tier: {facts['reason']}"
    host = store.get("tiers", {}).get("host", {})
    if host.get("losses"):
        yield f"host tier: {host['losses']:,} blocks had to go before they were on disk"
    if host.get("quarantined"):
        yield f"host tier: {host['quarantined']:,} damaged blocks were taken out"
    for note in store.get("notes", ()):
        yield f"store: {note}"


def _of_scheduler(scheduler: Mapping[str, Any]) -> Iterator[str]:
    if not scheduler.get("worker_ready", True):
        yield "the scheduler has no worker: nothing is computed"
    if not scheduler.get("store_open", True):
        yield "the scheduler has no store: the worker's pool is all the cache there is"
    breaker = scheduler.get("store", {}).get("breaker", "closed")
    if breaker != "closed":
        yield f"the store answers too late (breaker {breaker}): requests go on without it"
    if scheduler.get("ledger", {}).get("lost"):
        yield f"the ledger lacks {scheduler['ledger']['lost']:,} requests"


def size(count: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
