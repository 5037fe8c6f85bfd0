"""`perdure ledger`: the record of finished requests."""

import json
import time

import click
from rich.console import Console
from rich.table import Table

from ops.cli.exits import plain_errors
from shared.paths import Places, default_home


@click.group()
def ledger() -> None:
    """Look at finished requests."""


@ledger.command("list")
@click.option("--limit", default=20, show_default=True, help="How many, newest first.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def list_(limit: int, as_json: bool) -> None:
    """Show the newest requests: tokens, what each tier served, how they ended."""
    from services.scheduler.ledger_rows import read_ledger

    with plain_errors():
        rows = read_ledger(Places(default_home()).ledger, limit=limit)
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    table = Table()
    for column in ("request", "finished", "prompt", "output", "device", "host", "disk", "TTFT", "total", "end"):
        table.add_column(column, justify="left" if column in ("request", "finished", "end") else "right")
    for row in rows:
        finished = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["finished_at"]))
        counts = [str(row[name]) for name in ("prompt_tokens", "completion_tokens")]
        tiers = [str(row[f"cached_{tier}"]) for tier in ("device", "host", "disk")]
        seconds = [f"{row[name]:.3f} s" for name in ("ttft_s", "total_s")]
        end = row["finish_reason"] if row["error"] is None else f"{row['finish_reason']}: {row['error']}"
        table.add_row(row["id"][:12], finished, *counts, *tiers, *seconds, end)
    Console().print(table)
