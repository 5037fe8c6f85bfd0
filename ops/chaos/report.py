"""The report of a campaign: `results/chaos-<commit>.json` and a table."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ops.admin import SERVICES
from ops.chaos.campaign import Campaign
from ops.chaos.schedule import PAIRS


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and count of at least one value."""
    ordered = sorted(values)
    at = min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))
    return {"median": round(statistics.median(ordered), 3), "p95": round(ordered[at], 3), "count": len(ordered)}


def facts_of(campaign: Campaign, commit: str) -> dict[str, Any]:
    """Everything that is kept, as plain values."""
    tally, totals = campaign.tally, campaign.totals
    cached = sum(totals.cached.values())
    return {
        "commit": commit,
        "model": campaign.subject.name,
        "seed": campaign.seed,
        "kills": tally.kills,
        "kills_asked": campaign.kills,
        "seconds": round(campaign.seconds, 1),
        "kills_by_service": {name: tally.strikes[name] for name in SERVICES},
        "kills_by_pair": {"+".join(pair): tally.strikes["+".join(pair)] for pair in PAIRS},
        "kills_of_more": {
            name: count
            for name, count in sorted(tally.strikes.items())
            if count and name not in SERVICES and tuple(name.split("+")) not in PAIRS
        },
        "deaths_by_service": dict(tally.deaths),
        "ways": dict(tally.ways),
        "moments": dict(tally.moments),
        "stack_starts": tally.starts,
        "recovery_s": {kind: spread(values) for kind, values in tally.recovery_s.items()},
        "requests": dict(totals.requests),
        "ends": dict(totals.ends),
        "refused": dict(totals.refused),
        "judged": totals.accepted,
        "replayed": totals.replayed,
        "retries": totals.retries,
        "tokens": totals.tokens,
        "near_ties": campaign.near_ties,
        "cached_share": round(cached / totals.prompt_tokens, 4) if totals.prompt_tokens else 0.0,
        "cached_by_tier": dict(totals.cached),
        "largest_resident_bytes": campaign.largest,
        "checkpoints": campaign.checkpoints,
        "violations": [str(violation) for violation in campaign.violations],
    }


def write(facts: dict[str, Any], folder: Path) -> Path:
    """`chaos-<commit>.json`: a list of the campaigns run on that commit, this one added."""
    folder.mkdir(exist_ok=True)
    path = folder / f"chaos-{facts['commit'].rstrip('+')}.json"
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        before = []
    path.write_text(json.dumps([*before, facts], indent=1))
    return path


def together(path: Path, model: str) -> str:
    """One line on all campaigns of a report's file on one model: the bars may be met by several seeds together."""
    runs = [run for run in json.loads(path.read_text()) if run["model"] == model]
    services, pairs = (
        min(sum(run[key][name] for run in runs) for name in runs[0][key])
        for key in ("kills_by_service", "kills_by_pair")
    )
    kills, violations = sum(run["kills"] for run in runs), sum(len(run["violations"]) for run in runs)
    text = f"{len(runs)} runs on {model} at this commit: {kills} kills, each service at least {services} times"
    return f"{text}, each pair at least {pairs} times; {violations} violations"


def show(facts: dict[str, Any], console: Console) -> None:
    """The table."""
    title = f"chaos on {facts['model']}, seed {facts['seed']}, commit {facts['commit']}, {facts['seconds']:.0f} s"
    table = Table(title=title, show_header=False)
    table.add_row("kills", f"{facts['kills']} of {facts['kills_asked']}; {_plain(facts['ways'])}")
    for name in ("kills_by_service", "kills_by_pair", "kills_of_more", "deaths_by_service", "moments"):
        table.add_row(name.replace("_", " "), _plain(facts[name]))
    for kind, one in facts["recovery_s"].items():
        said = f"median {one['median']:.2f} s, 95 % {one['p95']:.2f} s ({one['count']})"
        table.add_row(f"serving again after: {kind}", said)
    for name in ("requests", "ends", "refused"):
        table.add_row(name, _plain(facts[name]))
    table.add_row("judged, replayed, retries", f"{facts['judged']}, {facts['replayed']}, {facts['retries']}")
    table.add_row("tokens, near ties", f"{facts['tokens']}, {facts['near_ties']}")
    table.add_row("cached share of prompts", f"{facts['cached_share']:.1%}; {_plain(facts['cached_by_tier'])}")
    table.add_row("violations", str(len(facts["violations"])))
    console.print(table)
    for line in facts["violations"]:
        console.print(f"[red]{line}[/red]", highlight=False)


def _plain(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
