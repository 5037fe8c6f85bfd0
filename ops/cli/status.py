"""`perdure status`: services, incarnations, pool and tiers, hit rates."""

import json
import sys

import click
import msgspec
import trio
from rich.console import Console
from rich.table import Table

from ops.admin import admin, snapshots
from ops.cli.exits import NO_STACK, fail, plain_errors
from ops.cli.status_view import show
from shared.messages.hello import Snapshot
from shared.paths import Places, default_home


async def _ask() -> dict[str, Snapshot | None]:
    async with admin(Places(default_home())) as node:
        return await snapshots(node)


@click.command()
@click.option("--all", "everything", is_flag=True, help="Also everything that each service says of itself.")
@click.option("--json", "as_json", is_flag=True, help="Everything each service says, as one JSON object.")
def status(everything: bool, as_json: bool) -> None:
    """Show the services of this home, their memory and how much the cache serves."""
    with plain_errors():
        found = trio.run(_ask)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(found)))
    else:
        console = Console()
        show(found, console)
        for role, snapshot in found.items():
            if snapshot is not None and everything:
                _details(role, snapshot, console)
    if not any(found.values()):
        fail(NO_STACK, f"no stack runs on {default_home()}; start one with `perdure serve`")
    if not all(found.values()):
        sys.exit(NO_STACK)


def _details(role: str, snapshot: Snapshot, console: Console) -> None:
    rows = {name: value for name, value in snapshot.data.items() if name not in ("faults", "note", "drops")}
    table = Table(title=role, show_header=False)
    table.add_column("what")
    table.add_column("value")
    for name, value in rows.items():
        table.add_row(name, _plain(value))
    drops = snapshot.data.get("drops")
    if drops:
        table.add_row("[yellow]drops[/yellow]", _plain(drops))
    if table.row_count:
        console.print(table)


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
