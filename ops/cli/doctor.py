"""`perdure doctor`: is all well with a home; what is not, in words; and mending it."""

import json
import sys
from pathlib import Path

import click
import trio

from ops.cli.exits import FAULT, plain_errors
from ops.doctor.exam import examine, repair
from ops.doctor.report import Level, Report
from ops.doctor.running import ask
from shared.config import load_config
from shared.paths import Places, default_home

COLOURS = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.FAULT: "red"}


@click.command()
@click.option("--home", type=click.Path(path_type=Path), help="The home to look at; default: PERDURE_HOME.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--quick", is_flag=True, help="Do not read the blocks' bytes to verify their checksums.")
@click.option("--repair", "mend", is_flag=True, help="Mend what can be mended; the stack must be stopped.")
@click.option("--remove-dead-arenas", is_flag=True, help="Repair, and remove arenas that nobody claims, too.")
def doctor(home: Path | None, as_json: bool, quick: bool, mend: bool, remove_dead_arenas: bool) -> None:
    """Check pool, arena, disk tier, leases, journal, ledger and machine; explain what is wrong.

    Exit codes: 0 no fault, 1 a fault was found (or is left after --repair), 4 --repair while a stack runs.
    """
    with plain_errors():
        config = load_config()
        places = Places(home.expanduser().absolute() if home else default_home())
        if mend or remove_dead_arenas:
            report = repair(places, config, quick=quick, remove_dead_arenas=remove_dead_arenas)
        else:
            told = trio.run(ask, places) if places.run.is_dir() else None
            report = examine(places, config, quick=quick, told=told)
    if as_json:
        click.echo(json.dumps(report.plain()))
    else:
        show(report)
    sys.exit(0 if report.content else FAULT)


def show(report: Report) -> None:
    """Lines that people read, the worst last."""
    for line in report.mended:
        click.echo(f"mended    {line}")
    for finding in sorted(report.findings, key=lambda finding: finding.level):
        level = click.style(f"{finding.level.name.lower():8}", fg=COLOURS[finding.level])
        click.echo(f"{level}  {finding.name}: {finding.what}")
        if finding.way_out and finding.level:
            click.echo(f"{'':10}-> {finding.way_out}")
    levels = [finding.level for finding in report.findings]
    counts = ", ".join(f"{levels.count(level)} {level.name.lower()}" for level in Level)
    click.echo(f"{report.home}: {counts} ({report.seconds:.1f} s)")
    mendable = [finding for finding in report.at_least(Level.NOTE) if finding.mend is not None]
    if mendable:
        click.echo(f"{len(mendable)} of these `perdure doctor --repair` mends, with the stack stopped")
