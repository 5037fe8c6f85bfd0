"""`make bench` or `python -m ops.bench [--rounds N] [--only NAME ...]`: one run, ratios, JSON in `results/`."""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import trio
from rich.console import Console
from rich.table import Table

from ops.bench.catalogue import catalogue
from ops.bench.commit import commit
from ops.bench.copies import copies
from ops.bench.figures import Figures
from ops.bench.messages import messages
from ops.bench.plots import plots
from ops.bench.profile import profile_path
from ops.bench.restore import restore
from ops.bench.suite import Suite
from ops.cli.logs import quiet_logs
from ops.models.download import pull
from ops.models.progress import shown
from ops.stack import ROOT, Stack
from shared.config import ModelConfig
from shared.paths import default_home

BARE: dict[str, Callable[[int, Figures], None]] = {
    "catalogue": catalogue,
    "copies": copies,
    "messages": messages,
    "restore": restore,
}
"""Sections that need no running stack and no model."""

SERVED = ("prefill", "streams", "warm", "start", "encoding", "services", "revival", "overhead")
STEPS = "steps"
"""The section of the step breakdown: a process of its own, see `profile`."""


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of each figure")
    parser.add_argument("--only", nargs="*", default=[], choices=(*SERVED, *BARE, STEPS), help="sections to run")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    quiet_logs()
    console = Console()
    book = Figures(console.print)
    wanted = set(arguments.only) or {*SERVED, *BARE, STEPS}
    for name, section in BARE.items():
        if name in wanted:
            section(arguments.rounds, book)
    source = ""
    served: dict[str, str | None] = {"backend": None, "numerics": None, "kv_dtype": None}
    if wanted & set(SERVED):
        with shown() as progress:
            source = str(pull(ModelConfig().source, default_home() / "models", progress))
        settings = {"PERDURE_MODEL__SOURCE": source, "PERDURE_MODEL__THREADS": str(arguments.threads)}
        with Stack(settings) as stack:
            suite = Suite(stack, source, arguments.threads, arguments.rounds, book)

            async def run() -> None:
                await stack.start()
                worker = (await stack.snapshots())["worker"]
                if worker is not None:
                    served.update({name: worker.data[name] for name in served})
                await suite.run(wanted)

            trio.run(run)
    steps = None
    if STEPS in wanted:
        subprocess.run([sys.executable, "-m", "ops.bench.profile", "--threads", str(arguments.threads)], check=True)
        steps = json.loads(profile_path().read_text())["seconds"]
    facts = {
        "commit": commit(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": arguments.threads,
        "python": platform.python_version(),
        "model": Path(source).name or None,
        "rounds": arguments.rounds,
    } | served
    table = Table(title=f"commit {facts['commit']}, {facts['cores']} cores, median (least-greatest)")
    for column in ("what", "ours", "alternative", "ratio"):
        table.add_column(column)
    for row in book.rows:
        table.add_row(*row)
    console.print(table)
    results = ROOT / "results"
    results.mkdir(exist_ok=True)
    path = results / f"bench-{facts['commit'].rstrip('+')}.json"
    path.write_text(json.dumps({"facts": facts, "figures": book.figures, "steps": steps}, indent=1))
    console.print(f"written to {path}")
    for plot in plots(path):
        console.print(f"written to {plot}")


if __name__ == "__main__":
    main()
