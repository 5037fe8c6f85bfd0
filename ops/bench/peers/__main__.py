"""`make bench-peers` or `python -m ops.bench.peers [--rounds N] [--only KEY ...] [--peers NAME ...]`.

Sets the peers up, searches each one's best settings, measures in turn with ours, prints the table, writes the JSON.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ops.bench.commit import commit
from ops.bench.peers.campaign import TROUBLES, Side, Tongue, rounds_of
from ops.bench.peers.interface import Peer, Place, Say
from ops.bench.peers.llama_cpp import LlamaCpp
from ops.bench.peers.openvino import OpenVino
from ops.bench.peers.ours import Ours
from ops.bench.peers.rows import MEASUREMENTS, SIDES, Measurement
from ops.bench.peers.verdict import Outcome, judged
from ops.bench.peers.vllm import Vllm
from ops.bench.plots import plots
from ops.bench.prompts import Prompts
from ops.cli.logs import quiet_logs
from ops.models.download import pull
from ops.models.progress import shown
from ops.stack import ROOT
from shared.config import ModelConfig
from shared.paths import default_home

PEERS: dict[str, Peer] = {peer.name: peer for peer in (OpenVino(), LlamaCpp(), Vllm())}
MARKS = {True: "[green]held[/]", False: "[red]missed[/]", None: "peer missing"}


def main() -> None:
    """Measures what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], choices=[one.key for one in MEASUREMENTS])
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "peers", help="where the peers are set up")
    parser.add_argument("--search", action="store_true", help="search best settings that are known already anew")
    parser.add_argument(
        "--set-up", action="store_true", help="set the peers up, ask each its question, measure nothing"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--ours", nargs="*", default=list(SIDES), choices=list(SIDES), help="which of ours")
    arguments = parser.parse_args()
    quiet_logs()
    console = Console()

    def say(text: str) -> None:
        console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {text}", highlight=False)

    with shown() as progress:
        gguf = pull(ModelConfig().source, default_home() / "models", progress)
    prompts = Prompts(str(gguf))
    wanted = [one for one in MEASUREMENTS if not arguments.only or one.key in arguments.only]
    lost: dict[str, str] = {}
    sides: dict[str, Side] = {}
    try:
        for name in arguments.peers:
            place = Place((arguments.directory / name).resolve(), gguf, arguments.threads)
            side = Side(PEERS[name], place, Tongue(prompts.encode, prompts.decode), prompts.fresh)
            sides[name] = side
            try:
                _ready(side, [] if arguments.set_up else wanted, arguments.search, say)
            except TROUBLES as error:
                side.stop()
                del sides[name]
                lost[name] = str(error)
                say(f"[red]{name} is left out:[/] {error}")
        if not arguments.set_up:
            _compare(wanted, sides, lost, gguf, arguments, prompts, console, say)
    finally:
        for side in sides.values():
            side.stop()


def _ready(side: Side, wanted: list[Measurement], anew: bool, say: Say) -> None:
    """Set up, asked its question, its best settings known."""
    side.place.root.mkdir(parents=True, exist_ok=True)
    side.peer.prepare(side.place, say)
    side.measured(side.peer.settings(side.place, 1)[0], lambda engine: None)
    say(f"{side.peer.name} answers rightly")
    if wanted:
        if not anew:
            side.recall()
        side.search(wanted, say)
        side.remember()


def _compare(
    wanted: list[Measurement],
    sides: dict[str, Side],
    lost: dict[str, str],
    gguf: Path,
    arguments: argparse.Namespace,
    prompts: Prompts,
    console: Console,
    say: Say,
) -> None:
    ours: dict[str, Ours] = {}
    found: list[tuple[Outcome, dict[str, list[float]]]] = []
    best = {name: side.best for name, side in sides.items()}
    try:
        for name in arguments.ours:
            ours[name] = Ours(Place(Path(), gguf, arguments.threads), SIDES[name])
            ours[name].generate([prompts.fresh(64)], 8)
        numerics = {name: engine.facts for name, engine in ours.items()}
        for one in wanted:
            values = rounds_of(one, ours, sides, arguments.rounds, prompts.fresh, lost)
            for row in one.rows:
                outcome = judged(row, values[row.name])
                found.append((outcome, values[row.name]))
                said = ", ".join(f"{name} {spread}" for name, spread in outcome.spreads.items())
                say(f"{row.name}, {row.unit}: {said}; {'; '.join(map(str, outcome.verdicts))}")
    finally:
        for engine in ours.values():
            engine.stop()
    facts = {
        "commit": commit(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": arguments.threads,
        "model": gguf.name,
        "rounds": arguments.rounds,
        "ours": numerics,
        "told": dict.fromkeys(ours, "ZeroMQ") | {name: PEERS[name].told for name in sides},
    }
    console.print(_table(found, [*ours, *sides], facts, best))
    for name, reason in lost.items():
        console.print(f"{name} was left out: {reason}", highlight=False)
    results = ROOT / "results"
    results.mkdir(exist_ok=True)
    path = results / f"peers-{commit().rstrip('+')}.json"
    path.write_text(json.dumps({"facts": facts, "left_out": lost, "rows": _plain(found, best)}, indent=1))
    console.print(f"written to {path}")
    for plot in plots(path):
        console.print(f"written to {plot}")


def _table(
    found: list[tuple[Outcome, dict[str, list[float]]]],
    engines: list[str],
    facts: dict[str, object],
    best: dict[str, dict[str, str]],
) -> Table:
    where = f"commit {facts['commit']}, {facts['cores']} cores"
    table = Table(title=f"{where}, median (least-greatest)")
    for column in ("", *engines, "best peer", "ours / theirs", "bar", ""):
        table.add_column(column)
    for outcome, _ in found:
        cells = [f"{outcome.row.name}, {outcome.row.unit}"]
        for name in engines:
            spread = outcome.spreads.get(name)
            setting = best.get(name, {}).get(outcome.row.name, "")
            cells.append(f"{spread}\n[dim]{setting}[/]" if spread is not None else "")
        cells.append(outcome.best + (" (equal)" if outcome.equal else ""))
        verdicts = outcome.verdicts
        cells.append("\n".join("-" if one.ratio is None else f"{one.ratio:.2f}" for one in verdicts))
        cells.append("\n".join(one.bar for one in verdicts))
        cells.append("\n".join(MARKS[one.held] for one in verdicts))
        table.add_row(*cells)
    return table


def _plain(
    found: list[tuple[Outcome, dict[str, list[float]]]], best: dict[str, dict[str, str]]
) -> dict[str, dict[str, object]]:
    return {
        outcome.row.name: {
            "unit": outcome.row.unit,
            "more_is_better": outcome.row.more,
            "best": outcome.best,
            "equal": outcome.equal,
            "verdicts": [vars(one) for one in outcome.verdicts],
            "engines": {
                name: vars(spread)
                | {"values": values[name], "setting": best.get(name, {}).get(outcome.row.name, "default")}
                for name, spread in outcome.spreads.items()
            },
        }
        for outcome, values in found
    }


if __name__ == "__main__":
    main()
