"""Where a step's time goes: `make profile` or `python -m ops.bench.profile [--threads N] [--steps N]`.

One process holds the real parts, as `messages` does: engine, journal, both messages encoded and decoded, and a worker
with the real model. Only the sockets are missing. The kernels' part comes from the C library's own counters, by kind
of op; what Python adds is timed around the calls. Each part of a decode is the median of its steps, of a prefill (all
its steps together) the median of its repetitions, in milliseconds.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from kernels.batch import Batch
from kernels.cpu.model import CpuModel
from kernels.interface import Forward, Model
from kernels.paged import PagedKV
from kernels.sampling import Draw, Drawn, Sampler
from ops.bench.commit import commit
from ops.bench.messages import StepPath, random_prompts
from ops.models.download import pull
from ops.models.progress import shown
from ops.stack import ROOT
from services.worker.model_runner import ModelRunner
from services.worker.openmp import settle_openmp
from services.worker.page_store import PageStore
from services.worker.runner import Runner, StepOutput
from shared.config import Config, KVConfig, ModelConfig
from shared.messages.engine import KVFacts, Row, WorkerReady
from shared.paths import Places, default_home

POOL_BYTES = 1 << 29
PROMPT = 128
"""Tokens of a decoding stream's prompt."""
WARM_STEPS = 8


@dataclass(frozen=True)
class Case:
    """`streams` that decode after prompts of `PROMPT` tokens, or, with `prefill`, one prompt of so many tokens."""

    name: str
    streams: int
    prefill: int = 0


CASES = (Case("prefill 512", 1, 512), Case("decode 1", 1), Case("decode 8", 8), Case("decode 32", 32))


@dataclass
class Watch:
    """Seconds of the present step by part, as far as the worker's inside goes, and the kernels' own counters."""

    spent: dict[str, float] = field(default_factory=dict)
    ops: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    def add(self, name: str, since: float) -> None:
        """Time from `since` until now."""
        self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - since

    def begin(self) -> None:
        """A new step."""
        self.spent = {}
        for counter in self.ops.values():
            counter[:] = 0


class WatchedModel:
    """Implements `kernels.interface.Model`."""

    def __init__(self, model: Model, watch: Watch) -> None:
        self._model, self._watch = model, watch
        self.sample: Sampler = self._sample
        if isinstance(model, CpuModel):
            watch.ops = model.watch_ops()

    def step(self, batch: Batch, kv: PagedKV, *, layers: int | None = None) -> Forward:
        """See `Model.step`."""
        begun = time.perf_counter()
        done = self._model.step(batch, kv, layers=layers)
        self._watch.add("model", begun)
        return done

    def _sample(self, draws: Sequence[Draw]) -> list[Drawn]:
        begun = time.perf_counter()
        drawn = self._model.sample(draws)
        self._watch.add("sample", begun)
        return drawn


class WatchedRunner:
    """Implements `services.worker.runner.Runner`."""

    def __init__(self, runner: ModelRunner, watch: Watch) -> None:
        runner.model = WatchedModel(runner.model, watch)
        self._runner, self._watch = runner, watch
        self.ready: WorkerReady = runner.ready
        self.facts: KVFacts = runner.facts
        self.largest_step_s = runner.largest_step_s
        self.exact = runner.exact

    def step(self, rows: Sequence[Row], pool: PageStore) -> StepOutput:
        """See `Runner.step`."""
        begun = time.perf_counter()
        done = self._runner.step(rows, pool)
        self._watch.add("runner", begun)
        return done


def parts_of(path: StepPath, watch: Watch) -> dict[str, float]:
    """Seconds of the step that `path` has just made, by part; together they are the step."""
    worker, inside = path.spent["worker"], watch.spent
    runner, model, sample = (inside.get(name, 0.0) for name in ("runner", "model", "sample"))
    ops = {f"kernels: {name}": int(counter[0]) / 1e9 for name, counter in watch.ops.items() if counter[0]}
    parts = dict(sorted(ops.items(), key=lambda item: -item[1]))
    parts["worker: call of the kernels"] = model - sum(ops.values())
    parts["worker: rows to a batch"] = runner - model
    parts["worker: sampling"] = sample
    parts["worker: plan completed, results"] = worker - runner - sample
    return parts | {name: seconds for name, seconds in path.spent.items() if name != "worker"}


class Bench:
    """One loaded model with its pool."""

    def __init__(self, source: str, threads: int, activations: str) -> None:
        settle_openmp()
        model = ModelConfig(source=source, threads=threads, activations=activations)
        config = Config(model=model, kv=KVConfig(pool_bytes=POOL_BYTES))
        self.watch = Watch()
        self.runner: Runner = WatchedRunner(ModelRunner(config, Places(default_home())), self.watch)
        self.pool = PageStore(self.runner.facts.blocks, self.runner.facts.block_bytes)
        self.pool.blocks[:] = 0  # first touch is not what is measured

    def measure(self, case: Case, steps: int) -> dict[str, float]:
        """Median seconds by part."""
        with tempfile.TemporaryDirectory(prefix="perdure-profile-") as base:
            if case.prefill:
                taken = [self._prefill(case, Path(base) / str(turn)) for turn in range(max(steps // 16, 3))][1:]
            else:
                path = self._path(case, PROMPT, Path(base))
                for _ in range(self._steps_for(case.streams * PROMPT) + WARM_STEPS):
                    path.step()
                taken = [self._step(path) for _ in range(steps)]
        names = dict.fromkeys(name for one in taken for name in one)
        return {name: statistics.median(one.get(name, 0.0) for one in taken) for name in names}

    def _path(self, case: Case, tokens: int, directory: Path) -> StepPath:
        prompts = random_prompts(case.streams, tokens, self.runner.ready.vocab)
        return StepPath(self.runner, self.pool, prompts, directory)

    def _steps_for(self, tokens: int) -> int:
        return -(-tokens // self.runner.ready.limits["step_tokens"])

    def _step(self, path: StepPath) -> dict[str, float]:
        self.watch.begin()
        path.step()
        return parts_of(path, self.watch)

    def _prefill(self, case: Case, directory: Path) -> dict[str, float]:
        path = self._path(case, case.prefill, directory)
        total: dict[str, float] = {}
        for _ in range(self._steps_for(case.prefill)):
            for name, seconds in self._step(path).items():
                total[name] = total.get(name, 0.0) + seconds
        return total


def profile(source: str, threads: int, steps: int, activations: str = "fp32") -> dict[str, dict[str, float]]:
    """Case -> part -> median seconds."""
    bench = Bench(source, threads, activations)
    return {case.name: bench.measure(case, steps) for case in CASES}


def table_of(found: dict[str, dict[str, float]], title: str) -> Table:
    """Milliseconds and, for what is a hundredth or more of a step, its share."""
    table = Table("ms a step (a whole prompt for prefill)", *found, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    sums = {case: sum(parts.values()) for case, parts in found.items()}
    names = dict.fromkeys(name for parts in found.values() for name in parts)
    for name in sorted(names, key=lambda name: not name.startswith("kernels")):
        cells = []
        for case, parts in found.items():
            seconds = parts.get(name, 0.0)
            share = seconds / sums[case]
            cells.append(f"{1e3 * seconds:.3f}" + (f" {share:4.0%}" if share >= 0.01 else " " * 5))
        table.add_row(name, *cells)
    table.add_section()
    table.add_row("together", *(f"{1e3 * total:.3f} 100%" for total in sums.values()))
    return table


def profile_path() -> Path:
    """Where the seconds are written."""
    return ROOT / "results" / f"profile-{commit().rstrip('+')}.json"


def main() -> None:
    """Measures, prints the table, writes `results/profile-<commit>.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=128, help="decode steps of each case")
    parser.add_argument("--activations", default="fp32", choices=("fp32", "int8"))
    arguments = parser.parse_args()
    with shown() as progress:
        source = pull(ModelConfig().source, default_home() / "models", progress)
    found = profile(str(source), arguments.threads, arguments.steps, arguments.activations)
    facts = {"commit": commit(), "threads": arguments.threads, "steps": arguments.steps, "model": source.name}
    facts["activations"] = arguments.activations
    Console(width=130).print(
        table_of(found, f"commit {facts['commit']}, {arguments.threads} threads, {arguments.activations}")
    )
    path = profile_path()
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"facts": facts, "seconds": found}, indent=1))


if __name__ == "__main__":
    main()
