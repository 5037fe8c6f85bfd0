"""How far each mode of ours is from fp32 weights and fp32 KV of the same file, position by position.

`python -m ops.bench.quality SOURCE [--positions N] [--length N]`: passages of the project's own text, each position's
next-token distribution p against q of the mode. Same top-1: share of positions whose likeliest token is the same. KL:
sum of p log(p / q), in nats. The reference is the `reference` backend, torch on the file's weights as fp32, KV in fp32.
Ends with 1 when the default mode misses its bars; writes `results/quality.json`.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from kernels import choose_backend
from kernels.batch import make_batch
from kernels.paged import PagedKV
from ops.bench.prompts import CHARACTERS_A_TOKEN
from ops.prompts import passage
from ops.stack import ROOT
from services.worker.models.decoder import decoder
from shared.model.spec import ModelSource, open_model

BLOCK = 32
CHUNK = 250
SEED = 9000
LEAST_TOP1, MOST_KL = 0.999, 1e-5
"""Bars of the default mode: same top-1, mean KL."""


@dataclass(frozen=True)
class Setting:
    """A way to serve a file."""

    name: str
    backend: str
    activations: str
    kv_dtype: str


REFERENCE = Setting("fp32 weights, fp32 KV", "reference", "fp32", "fp32")
DEFAULT = Setting("default", "cpu", "fp32", "fp16")
SETTINGS = (DEFAULT, Setting("activations int8", "cpu", "int8", "fp16"))


class Reader:
    """A loaded setting that reads one passage after another."""

    def __init__(self, source: ModelSource, setting: Setting, length: int, threads: int) -> None:
        spec = source.spec
        program = decoder(spec, source.tensors(), length)
        facts = {"head_dim": spec.head_dim, "block_tokens": BLOCK}
        backend = choose_backend(setting.backend, threads, activations=setting.activations, **facts).backend
        self._model = backend.load(program, None, lambda done, total: None)
        self._blocks = -(-length // BLOCK)
        layout = spec.kv_layout(setting.kv_dtype, BLOCK)
        self._kv = PagedKV(bytearray(layout.block_bytes * self._blocks), layout)

    def logits(self, start: int, ids: Sequence[int]) -> NDArray[np.float32]:
        """[len(ids), vocab], behind each of them, which are positions from `start` on; those before were read."""
        table = np.arange(self._blocks, dtype=np.int32)
        batch = make_batch([(start, np.array(ids, np.int32), table, True)])
        every = np.arange(len(ids), dtype=np.int32)
        return self._model.step(replace(batch, sampled=every), self._kv).logits


@dataclass
class Distance:
    """Of a setting from the reference, over the positions seen so far."""

    positions: int = 0
    same: int = 0
    kl_sum: float = 0.0
    kl_max: float = 0.0

    def add(self, truth: NDArray[np.float32], ours: NDArray[np.float32]) -> None:
        """Rows of logits [n, vocab]."""
        for p, q in zip(_log_softmax(truth), _log_softmax(ours), strict=True):
            kl = float(np.sum(np.exp(p) * (p - q)))
            self.positions += 1
            self.same += int(p.argmax() == q.argmax())
            self.kl_sum += kl
            self.kl_max = max(self.kl_max, kl)

    @property
    def top1(self) -> float:
        """Share of positions with the same likeliest token."""
        return self.same / self.positions

    @property
    def kl(self) -> float:
        """Mean, in nats."""
        return self.kl_sum / self.positions


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def measure(source: ModelSource, positions: int, length: int, threads: int) -> dict[str, Distance]:
    """Each setting's distance over so many positions, in passages of `length` tokens."""
    truth = Reader(source, REFERENCE, length, threads)
    readers = {setting.name: Reader(source, setting, length, threads) for setting in SETTINGS}
    found = {name: Distance() for name in readers}
    tokenizer = source.tokenizer()
    for first in range(0, positions, length):
        text = passage(SEED + first, length * CHARACTERS_A_TOKEN)
        ids = tokenizer.encode(text, add_special_tokens=False).ids[: min(length, positions - first)]
        for start in range(0, len(ids), CHUNK):
            part = ids[start : start + CHUNK]
            expected = truth.logits(start, part)
            for name, reader in readers.items():
                found[name].add(expected, reader.logits(start, part))
    return found


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("--positions", type=int, default=2000)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    source = open_model(arguments.source, Path())
    found = measure(source, arguments.positions, arguments.length, arguments.threads)
    table = Table(title=f"{arguments.positions:,} positions against {REFERENCE.name}")
    for column in ("mode", "same top-1", "mean KL", "max KL"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for name, one in found.items():
        table.add_row(name, f"{one.top1:.2%}", f"{one.kl:.2g}", f"{one.kl_max:.2g}")
    Console().print(table)
    results = ROOT / "results"
    results.mkdir(exist_ok=True)
    facts = {"model": source.spec.name, "positions": arguments.positions, "length": arguments.length}
    figures = {name: asdict(one) | {"top1": one.top1, "kl": one.kl} for name, one in found.items()}
    (results / "quality.json").write_text(json.dumps({"facts": facts, "figures": figures}, indent=1))
    default = found[DEFAULT.name]
    sys.exit(0 if default.top1 >= LEAST_TOP1 and default.kl <= MOST_KL else 1)


if __name__ == "__main__":
    main()
