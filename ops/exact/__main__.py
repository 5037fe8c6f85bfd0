"""`make exact` or `python -m ops.exact [--prompts N] [--cross N] [--activations int8]`: 0 differing bits, or exit 1.

Each prompt is answered in cells that contain every pair of circumstances, the first few of them in all cells; every
answer must be equal, bit for bit, to the first one.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import trio
from rich.console import Console

from kernels import ACTIVATIONS
from ops.exact.matrix import Matrix, prompts_of
from ops.models.download import pull
from ops.models.progress import shown
from ops.stack import ROOT
from shared.config import ModelConfig
from shared.paths import default_home


def main() -> None:
    """Runs the matrix, prints a line a cell, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200, help="answered in cells that contain every pair")
    parser.add_argument("--cross", type=int, default=5, help="of them, answered in every cell")
    parser.add_argument("--longest", type=int, default=4000, help="tokens of the longest prompt")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--isa", nargs="*", default=[], help="instruction sets; default: all that this CPU has")
    parser.add_argument("--activations", choices=ACTIVATIONS, default=ModelConfig().activations)
    parser.add_argument("--model", default=ModelConfig().source)
    arguments = parser.parse_args()
    with shown() as progress:
        known = arguments.model == ModelConfig().source
        source = str(pull(arguments.model, default_home() / "models", progress)) if known else arguments.model
    console = Console()
    prompts = prompts_of(source, arguments.prompts, arguments.longest)
    matrix = Matrix(source, prompts, arguments.threads, arguments.isa, console.print, arguments.activations)
    found = trio.run(matrix.run, arguments.cross)
    results = ROOT / "results"
    results.mkdir(exist_ok=True)
    path = results / f"exact-{arguments.activations}.json"
    facts = {
        "cores": len(os.sched_getaffinity(0)),
        "model": Path(source).name,
        "activations": arguments.activations,
        "prompts": len(prompts),
    }
    path.write_text(json.dumps({"facts": facts, "result": found.facts()}, indent=1))
    console.print(f"{found}; written to {path}")
    sys.exit(0 if found.equal else 1)


if __name__ == "__main__":
    main()
