"""Bare forward steps of our runner against `transformers` (sdpa, cache on, fp32 weights, same threads), in one run.

`python -m ops.bench.forward SOURCE [--threads N] [--cpu] [--only NAME,...] [--against fp32]`: interleaved, medians,
ratios above 1 are ours faster. `--activations int8` makes ours round its activations; `--against fp32` replaces
`transformers` by ours with fp32 activations. `--cpu` counts CPU seconds instead of wall time: the only figure worth
having on a busy machine, and then with `--threads 1`, since waiting threads spin.
"""

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from kernels import ACTIVATIONS
from ops.bench.measure import interleaved
from ops.bench.reference_model import build
from services.worker.model_runner import ModelRunner
from services.worker.page_store import PageStore
from shared.config import Config, KVConfig, ModelConfig, SchedulerConfig
from shared.messages.base import pack_u32
from shared.messages.engine import Row, SampleSpec
from shared.model.spec import open_model
from shared.paths import Places

GREEDY = SampleSpec()
DECODES = 8
"""Decode steps of one measurement; the figure is one step's."""


class Ours:
    """Our runner with a pool; block tables are scattered, as they are in service."""

    def __init__(
        self, source: str, threads: int, chunk: int, pool_bytes: int, home: Path, activations: str = "fp32"
    ) -> None:
        config = Config(
            model=ModelConfig(source=source, threads=threads, activations=activations),
            kv=KVConfig(pool_bytes=pool_bytes),
            scheduler=SchedulerConfig(step_tokens=chunk),
        )
        self.runner = ModelRunner(config, Places(home))
        facts = self.runner.facts
        self.pool = PageStore(facts.blocks, facts.block_bytes)
        self.pool.blocks[:] = 0  # first touch is not what is measured
        self.chunk = chunk
        self.order = random.Random(3).sample(range(facts.blocks), facts.blocks)

    def table(self, row: int, tokens: int) -> bytes:
        """Block table of a row; rows do not overlap."""
        need = -(-tokens // self.runner.facts.block_tokens)
        return pack_u32(self.order[row * need : (row + 1) * need])

    def prefill(self, ids: list[int]) -> None:
        """The prompt in chunks, logits at its end."""
        table = self.table(0, len(ids))
        for start in range(0, len(ids), self.chunk):
            part = ids[start : start + self.chunk]
            last = start + len(part) == len(ids)
            self.runner.step([Row(0, start, pack_u32(part), table, GREEDY if last else None)], self.pool)

    def cache(self, rows: int, context: int) -> int:
        """What `decode` wants to know of sequences of `context` tokens; what lies in the pool does not matter."""
        return context

    def decode(self, context: int, rows: int) -> None:
        """DECODES steps of `rows` sequences that have `context` tokens."""
        tables = [self.table(row, context + DECODES) for row in range(rows)]
        for done in range(DECODES):
            self.runner.step(
                [Row(row, context + done, pack_u32([5]), table, GREEDY) for row, table in enumerate(tables)], self.pool
            )


class Theirs:
    """transformers."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> Any:
        """One pass, logits of the last position, KV kept."""
        cache = DynamicCache(config=self.model.config)
        self.model(torch.tensor([ids]), cache=cache, use_cache=True, logits_to_keep=1)
        return cache

    @torch.inference_mode()
    def cache(self, rows: int, context: int) -> Any:
        """A cache of `context` random tokens."""
        cache = DynamicCache(config=self.model.config)
        config = self.model.config
        shape = (rows, config.num_key_value_heads, context, config.head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(shape), torch.randn(shape), layer)
        return cache

    @torch.inference_mode()
    def decode(self, cache: Any, rows: int) -> None:
        """DECODES steps on the cache, which is left as it was."""
        for _ in range(DECODES):
            self.model(torch.full((rows, 1), 5), cache=cache, use_cache=True, logits_to_keep=1)
        cache.crop(-DECODES)


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--activations", choices=ACTIVATIONS, default="fp32", help="of ours")
    parser.add_argument("--against", choices=("transformers", "fp32"), default="transformers")
    parser.add_argument("--only", default="p512,p2048,p7500,d1,d1@6000,d8,d32")
    parser.add_argument("--home", type=Path, default=Path("results/forward-home"))
    args = parser.parse_args()
    clock = time.process_time if args.cpu else time.perf_counter
    wanted = set(args.only.split(","))
    sizes = (args.source, args.threads, args.chunk, 1 << 29, args.home)
    ours = Ours(*sizes, args.activations)
    theirs = Ours(*sizes) if args.against == "fp32" else Theirs(build(open_model(args.source, args.home)))
    torch.set_num_threads(args.threads)
    table = Table(
        title=f"{args.threads} threads, {'CPU' if args.cpu else 'wall'} seconds, chunks of {args.chunk}; "
        f"ours: {ours.runner.ready.numerics}, KV in {ours.runner.facts.kv_dtype}; theirs: {args.against}"
    )
    for column in ("what", "ours ms", "theirs ms", "ratio"):
        table.add_column(column, justify="left" if column == "what" else "right")

    def row(what: str, pair: list[float], per: float = 1.0) -> None:
        mine, peer = (1e3 * seconds / per for seconds in pair)
        table.add_row(what, f"{mine:.1f}", f"{peer:.1f}", f"{peer / mine:.2f}")

    rng = random.Random(1)
    for tokens in (512, 2048, 7500):
        if f"p{tokens}" in wanted:
            ids = [rng.randrange(1000, 40000) for _ in range(tokens)]
            repeats = args.repeats if tokens < 4000 else max(1, args.repeats // 2)
            pair = interleaved([lambda: ours.prefill(ids), lambda: theirs.prefill(ids)], repeats, clock)  # noqa: B023
            row(f"prefill {tokens}", pair)
    alone = 0.0
    for name, rows, context in (("d1", 1, 64), ("d1@6000", 1, 6000), ("d8", 8, 192), ("d32", 32, 192)):
        if name in wanted:
            mine, other = ours.cache(rows, context), theirs.cache(rows, context)
            pair = interleaved(
                [lambda: ours.decode(mine, rows), lambda: theirs.decode(other, rows)],  # noqa: B023
                args.repeats,
                clock,
            )
            row(f"decode step, {rows} x {context}", pair, DECODES)
            if name == "d1":
                alone = pair[0]
            elif name == "d8" and alone:
                table.caption = f"8 decodes: {8 * alone / pair[0]:.2f}x our one-at-a-time throughput"
    Console().print(table)


if __name__ == "__main__":
    main()
