"""Circumstances of a request, and a small set of them that contains every pair; pure."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations, groupby, product

LOADS = (1, 8, 32)
CHUNKS = (32, 256, 0)
"""Tokens a step; 0: so many that every prompt is one chunk."""
TIERS = ("cold", "device", "host", "disk", "killed")
"""Where the prompt's KV comes from: nowhere, the pool, the arena after a planned stop, the disk alone, whatever a
`kill -9` of everything left."""


@dataclass(frozen=True, order=True)
class Machine:
    """What a stack is started with. `isa` "": what the CPU does best."""

    chunk: int
    threads: int
    isa: str


@dataclass(frozen=True, order=True)
class Cell:
    """`load`: requests at the same time."""

    machine: Machine
    tier: str
    load: int

    def __str__(self) -> str:
        chunk = self.machine.chunk or "whole"
        isa = self.machine.isa or "best"
        return f"{self.tier}, load {self.load}, chunk {chunk}, {self.machine.threads} threads, {isa}"


Pair = tuple[tuple[int, object], tuple[int, object]]


def every(threads: Sequence[int], isas: Sequence[str]) -> list[Cell]:
    """The full cross."""
    machines = [Machine(*facts) for facts in product(CHUNKS, threads, isas)]
    return [Cell(machine, tier, load) for machine in machines for tier in TIERS for load in LOADS]


def pairs(cell: Cell) -> frozenset[Pair]:
    """Every two circumstances that come together in a cell."""
    facts = list(enumerate((*astuple(cell.machine), cell.tier, cell.load)))
    return frozenset(combinations(facts, 2))


def covering(threads: Sequence[int], isas: Sequence[str]) -> list[Cell]:
    """Cells that contain every pair of the full cross: always the one with most pairs that are still missing."""
    cells = every(threads, isas)
    missing = set().union(*map(pairs, cells))
    chosen: list[Cell] = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs(cell) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def by_machine(cells: Iterable[Cell]) -> list[tuple[Machine, list[Cell]]]:
    """Cells of one stack together, in the order in which it can bring them about: cold, device, then what restarts."""
    ordered = sorted(cells, key=lambda cell: (cell.machine, TIERS.index(cell.tier), cell.load))
    return [(machine, list(group)) for machine, group in groupby(ordered, key=lambda cell: cell.machine)]
