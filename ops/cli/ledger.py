"""`perdure ledger`: the record of finished requests."""

import json

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
    from services.scheduler.ledger import read_ledger

    with plain_errors():
        rows = read_ledger(Places(default_home()).ledger, limit=limit)
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    table = Table()
    columns = list(rows[0]) if rows else ["no requests yet"]
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
