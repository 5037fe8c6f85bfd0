"""`python -m ops.demo`. Exit codes: 0 every promise held, 1 one failed, 4 too little room, 130 interrupted."""

import signal
import sys

import trio
from rich.console import Console
from rich.table import Table

from ops.cli.exits import FAULT, INTERRUPTED, NO_STACK, OK
from ops.cli.logs import quiet_logs
from ops.cli.serve import check_platform
from ops.client import RequestRejected, ServiceAway
from ops.demo.room import shortages
from ops.demo.story import Broken, Row, Story, tell
from ops.models.download import pull
from ops.models.progress import shown
from ops.stack import Stack, StackError
from shared.config import ModelConfig
from shared.model.errors import ModelError
from shared.paths import default_home

LIMIT_S = 600.0


def show(rows: list[Row], console: Console) -> None:
    """The one table."""
    table = Table(title="what happened")
    for column in ("request", "killed", "prompt", "device", "host", "disk", "TTFT", "ids"):
        table.add_column(column, justify="left" if column in ("request", "killed", "ids") else "right")
    for row in rows:
        usage, timing = row.result.finish.usage, row.result.finish.timing
        tiers = [str(usage.cached_by_tier[tier]) for tier in ("device", "host", "disk")]
        table.add_row(row.what, row.killed, str(usage.prompt_tokens), *tiers, f"{timing.ttft_s:.3f} s", row.verdict)
    console.print(table)


def main() -> int:
    """Runs the demo on a home of its own, which is removed at the end whatever happens."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    quiet_logs()
    check_platform()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    home = default_home()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    short = shortages()
    if short:
        for line in short:
            console.print(f"[red]{line}[/red]")
        return NO_STACK
    try:
        with shown() as progress:
            pull(ModelConfig().source, home / "models", progress)
    except ModelError as error:
        console.print(f"[red]{error}[/red]")
        return FAULT
    with Stack() as stack:
        story = Story(stack, lambda text: console.print(f"[dim]·[/dim] {text}"))
        problems: list[BaseException] = []
        try:
            seconds = trio.run(tell, story, LIMIT_S)
        except* (Broken, StackError, RequestRejected, ServiceAway, trio.TooSlowError, KeyboardInterrupt) as group:
            problems.extend(leaves(group))
        show(story.rows, console)
        if any(isinstance(problem, KeyboardInterrupt) for problem in problems):
            return INTERRUPTED
        for problem in problems:
            console.print(f"[red]a promise failed: {problem}[/red]")
        if problems:
            console.print(stack.log_tail(), markup=False)
            return FAULT
        console.print(f"[green]every promise held[/green], in {seconds:.0f} s")
    return OK


def leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The single exceptions of a nested group."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found.extend(leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found


sys.exit(main())
