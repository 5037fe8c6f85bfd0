"""`python -m ops.bench.products`: the CPU kernels' matrix products against torch's fp32 ones, in one run.

`int8 ms` are the same products from activations rounded to 8 bits, the rounding included; the ratio behind it is to
ours in fp32.

The products of one step of SmolLM2-135M, 30 layers in their order (Q4_1) and, for as many rows as a decode step has,
the head (Q8), with panels of random values. Every matrix is another one, so that few rows read memory as they do in
a model. Ours runs on plain threads that don't wait for each other between products: kernels alone, without a step's
barriers. Interleaved, medians; GB/s are bytes of the weights as packed, GF/s two operations a weight and row. `--cpu`
counts processor seconds, for a busy machine, and then with `--threads 1`: waiting threads of torch spin.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from kernels.cpu import library, packing
from kernels.cpu.blocks import GROUPS
from ops.bench.measure import interleaved

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""[out, in] of q + k + v, o, gate + up, down."""
HEAD = (49152, 576)
LAYERS = 30
HEAD_ROWS = 32
"""Up to so many rows the head is part of it."""


class Ours:
    """The kernels on `threads` threads."""

    def __init__(self, format: str, threads: int, library_: str) -> None:
        self.library = library.load(library_)
        self.layers = [random_matrix(format, *shape) for _ in range(LAYERS) for shape in LAYER]
        self.head = random_matrix("Q8", *HEAD)
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads)
        self.scratch = [np.empty(self.library.pd_product_scratch(), np.float32) for _ in range(threads)]

    def matrices(self, rows: int) -> list[packing.Matrix]:
        """Those of a step."""
        return self.layers + [self.head] * (rows <= HEAD_ROWS)

    def step(self, rows: int) -> Callable[[], None]:
        """What runs all products once."""
        matrices = self.matrices(rows)
        x = np.random.default_rng(1).standard_normal((rows, max(matrix.width for matrix in matrices)))
        x = x.astype(np.float32)
        y = np.empty((rows, max(matrix.out for matrix in matrices)), np.float32)
        null = library.pointer(None, "float *")

        def part(number: int) -> None:
            scratch, source, target = (library.pointer(a, "float *") for a in (self.scratch[number], x, y))
            for matrix in matrices:
                self.library.pd_product(
                    matrix.c, source, x.shape[1], rows, target, y.shape[1], null, null, 0, scratch, number, self.threads
                )

        return lambda: [None for _ in self.pool.map(part, range(self.threads))].clear()

    def step_i8(self, rows: int) -> Callable[[], None]:
        """The same from activations of 8 bits; every thread rounds all rows for itself, as it does for few."""
        matrices, lib, at = self.matrices(rows), self.library, library.pointer
        width = max(matrix.width for matrix in matrices)
        x = np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)
        y = np.empty((rows, max(matrix.out for matrix in matrices)), np.float32)
        null = at(None, "float *")
        scratch = [library.aligned(4 * lib.pd_product_i8_scratch()) for _ in range(self.threads)]
        q, scales = (
            np.empty((self.threads, rows * width), np.int8),
            np.empty((self.threads, 2, rows * width // 32), "f4"),
        )

        def part(number: int) -> None:
            room = at(scratch[number], "float *")
            memory = {"q": at(q[number], "int8_t *"), "d": at(scales[number, 0], "float *")}
            memory["sum"] = at(scales[number, 1], "float *")
            for matrix in matrices:
                rounded = library.declarations().new("pd_rows_i8 *", memory | {"in": matrix.width})
                lib.pd_quantise_rows(at(x, "float *"), width, rows, rounded, 0, 1)
                lib.pd_product_i8(
                    matrix.c, rounded, rows, at(y, "float *"), y.shape[1], null, null, 0, room, number, self.threads
                )

        return lambda: [None for _ in self.pool.map(part, range(self.threads))].clear()


def random_matrix(format: str, out: int, width: int) -> packing.Matrix:
    """Any bits will do as weights, so long as the scales are sound."""
    random = np.random.default_rng(out + width)
    plan = packing.Plan((packing.Run(format, out),), width)
    data = library.aligned(plan.nbytes)
    data[:] = random.integers(0, 256, plan.nbytes, dtype=np.uint8)
    if format in GROUPS:
        groups = data.view(GROUPS[format])
        for name in {"d", "m"} & set(groups.dtype.names or ()):
            scale = 0.002 + 0.001 * random.random(groups[name].shape)
            groups[name] = scale if groups[name].dtype == np.float32 else scale.astype(np.float16).view(np.uint16)
    else:
        floats = np.float32 if format == "F32" else np.float16  # which is something for bf16, too
        data[:] = random.standard_normal(plan.nbytes // floats().itemsize).astype(floats).view(np.uint8)
    return packing.Matrix(plan, data)


class Theirs:
    """torch, fp32."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.layers = [torch.randn(shape) for _ in range(LAYERS) for shape in LAYER]
        self.head = torch.randn(HEAD)

    def step(self, rows: int) -> Callable[[], None]:
        """What runs all products once."""
        matrices = self.layers + [self.head] * (rows <= HEAD_ROWS)
        sources = {width: torch.randn(rows, width) for _, width in {*LAYER, HEAD}}

        def run() -> None:
            with torch.inference_mode():
                for matrix in matrices:
                    F.linear(sources[matrix.shape[1]], matrix)

        return run


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,8,32,128,512")
    parser.add_argument("--format", default="Q4_1", choices=list(packing.NUMBERS))
    parser.add_argument("--isa", default=None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu else time.perf_counter
    isa = arguments.isa or library.chosen()
    takes_int8 = arguments.format in packing.INT8_FORMATS
    ours, theirs = Ours(arguments.format, arguments.threads, isa), Theirs(arguments.threads)
    table = Table(
        title=f"{arguments.format} layers, Q8 head up to {HEAD_ROWS} rows; {isa}, {arguments.threads} threads"
    )
    for column in ("rows", "ours ms", "GB/s", "GF/s", "int8 ms", "ratio", "torch fp32 ms", "GF/s", "ratio"):
        table.add_column(column, justify="right")
    for rows in map(int, arguments.rows.split(",")):
        runs = [ours.step(rows), theirs.step(rows)]
        if takes_int8:
            runs.append(ours.step_i8(rows))
        mine, peer, *rounded = interleaved(runs, arguments.repeats, clock)
        matrices = ours.matrices(rows)
        bytes_read = sum(matrix.data.nbytes for matrix in matrices)
        work = 2e-9 * rows * sum(matrix.out * matrix.width for matrix in matrices)
        figures = [1e3 * mine, 1e-9 * bytes_read / mine, work / mine]
        int8 = [f"{1e3 * rounded[0]:.1f}", f"{mine / rounded[0]:.2f}"] if rounded else ["", ""]
        theirs_ = [f"{1e3 * peer:.1f}", f"{work / peer:.1f}", f"{peer / mine:.2f}"]
        table.add_row(str(rows), *(f"{figure:.1f}" for figure in figures), *int8, *theirs_)
    Console().print(table)


if __name__ == "__main__":
    main()
