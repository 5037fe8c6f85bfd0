"""Progress of a download: a bar where a person looks at a terminal, a line each tenth elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Progress = Callable[[str, int, int], None]
"""Called with (what happens, bytes done, bytes in all); `0, 0` when there is nothing to count."""


def silent(what: str, done: int, total: int) -> None:
    """Says nothing."""


@contextmanager
def shown(out: TextIO | None = None) -> Iterator[Progress]:
    """Progress on `out` (stderr): a bar on a terminal, plain lines otherwise."""
    out = out or sys.stderr
    if not out.isatty():
        yield _plain(out)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=Console(file=out), transient=True) as bars:
        task = bars.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total or None)

        yield show


def _plain(out: TextIO) -> Progress:
    last: tuple[str, int] | None = None

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        tenth = 10 * done // total if total else 0
        if (what, tenth) != last:
            last = (what, tenth)
            amount = f": {done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else ""
            print(f"{what}{amount}", file=out, flush=True)

    return show
