"""What a command says while it waits: who is away, and how far a worker is that loads its model. On stderr."""

import sys

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn


class WaitingLine:
    """A bar where a person looks at a terminal, one line a stage elsewhere."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._stage = ""

    def notice(self, away: tuple[str, ...]) -> None:
        """Who is away has changed; () when all are back."""
        if "worker" not in away:
            self.end()
        click.echo(f"perdure: waiting for {', '.join(away)}" if away else "perdure: going on", err=True)

    def loading(self, what: str, share: float) -> None:
        """The worker is at `what`, and `share` (0 to 1) of it is done."""
        if not sys.stderr.isatty():
            if what != self._stage:
                click.echo(f"perdure: the worker is {what}", err=True)
        else:
            if self._bar is None:
                columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
                self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
                self._bar.add_task("")
                self._bar.start()
            self._bar.update(self._bar.task_ids[0], description=f"worker: {what}", completed=100 * share, total=100)
        self._stage = what

    def end(self) -> None:
        """Takes the bar away; idempotent."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._stage = ""
