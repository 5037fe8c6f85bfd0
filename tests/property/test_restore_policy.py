"""The choice between loading and computing, in simulated machines: never slower than the better of both by over 5 %.

The machine's true curves are drawn at random; the policy knows only what it has measured on it. Time is counted.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.restore.curve import Curve
from services.scheduler.restore.policy import Prefix, Progress, Way, choice, chunk
from services.scheduler.restore.rates import Rates

BLOCK = 32
STEP_BLOCKS = 8
LENGTHS = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
MARGIN = 1.05


@dataclass
class Machine:
    """True seconds: `token_s + context_s * context` a token, `latency_s + block_s` a block of each tier."""

    token_s: float
    context_s: float
    latency_s: tuple[float, float]
    block_s: tuple[float, float]
    compute_drag: float
    load_drag: float
    rates: Rates = field(default_factory=Rates)

    def compute(self, start: int, end: int) -> float:
        return (end - start) * (self.token_s + self.context_s * (start + end) / 2)

    def load(self, host: int, disk: int) -> float:
        """Both tiers at once; the host's threads copy what comes from disk, too."""
        parts = [(host + disk, 0), (disk, 1)]
        return max(self.latency_s[tier] + self.block_s[tier] * blocks if blocks else 0.0 for blocks, tier in parts)

    def learn(self, host: bool, disk: bool) -> None:
        """Cold prompts, and loads that nobody computed beside."""
        for _ in range(3):
            for blocks in LENGTHS:
                for first in range(0, blocks, STEP_BLOCKS):
                    start, end = first * BLOCK, min(first + STEP_BLOCKS, blocks) * BLOCK
                    self.rates.note_step(end - start, start, self.compute(start, end))
                if host:
                    self.rates.note_load(blocks, 0, self.load(blocks, 0))
                if disk:
                    self.rates.note_load(0, blocks, self.load(0, blocks))

    def restore(self, prefix: Prefix) -> float:
        """Seconds until a prefix is whole, by the policy; what it measures meanwhile it knows from then on."""
        way = choice(self.rates, prefix)
        if way == "compute":
            return self.compute(prefix.start, prefix.start + prefix.blocks * BLOCK)
        return Restoring(self, prefix, way).run()


@dataclass
class Restoring:
    """One prefix; `arrived`: true seconds of loading that are done."""

    machine: Machine
    prefix: Prefix
    way: Way
    now: float = 0.0
    arrived: float = 0.0
    low: int = 0
    held: int = 0
    loaded_at: float = 0.0
    beside_s: float = 0.0

    def __post_init__(self) -> None:
        self.held = self.prefix.blocks
        self.due = [self.machine.load(*self.prefix.tail(index)) for index in range(self.held + 1)]
        """Undisturbed seconds until all from a block on are loaded."""

    def run(self) -> float:
        machine, prefix = self.machine, self.prefix
        while self.held > self.low:
            tokens = prefix.start + self.low * BLOCK
            progress = Progress(self.low, self.held, tokens, tokens, self.now)
            count = chunk(machine.rates, prefix, progress, self.way, STEP_BLOCKS)
            if count:
                self.step(count)
            else:  # the next block arrives; that is when the engine is asked again
                wait = max(self.due[self.held - 1] - self.arrived, 0.0)
                self.now, self.arrived = self.now + wait, self.arrived + wait
                self.held -= 1
            while self.held > self.low and self.due[self.held - 1] <= self.arrived:
                self.held -= 1
        loaded = prefix.tail(self.low)
        if sum(loaded):
            machine.rates.note_load(*loaded, self.loaded_at or self.now, self.beside_s)
        return self.now

    def step(self, count: int) -> None:
        """Computes the next blocks while the load goes on behind them; both are slower as long as both go on."""
        machine, start = self.machine, self.prefix.start + self.low * BLOCK
        self.low += count
        work, begun = machine.compute(start, start + count * BLOCK), self.now
        left = max(self.due[self.low] - self.arrived, 0.0)
        together = min(work * machine.compute_drag, left * machine.load_drag)
        self.arrived += together / machine.load_drag
        self.now += together + (work - together / machine.compute_drag)
        self.beside_s += together
        machine.rates.note_step(count * BLOCK, start, self.now - begun, together)
        if left and together < work * machine.compute_drag:
            self.loaded_at = begun + together


seconds = st.floats(-6, -2).map(lambda power: 10.0**power)
drags = st.floats(1.0, 2.5)
machines = st.builds(
    Machine,
    token_s=seconds,
    context_s=st.floats(-11, -7).map(lambda power: 10.0**power),
    latency_s=st.tuples(seconds, seconds),
    block_s=st.tuples(st.floats(-4.5, -1).map(lambda p: 10.0**p), st.floats(-4, -0.5).map(lambda p: 10.0**p)),
    compute_drag=drags,
    load_drag=drags,
)


def prefixes(blocks: int, tiers: str, start: int) -> Prefix:
    disk = {"host": bytes(blocks), "disk": b"\1" * blocks, "both": (b"\0" * (blocks // 2)).rjust(blocks, b"\1")}
    return Prefix(start, BLOCK, disk[tiers])


@given(machine=machines, tiers=st.sampled_from(["host", "disk", "both"]), start=st.sampled_from([0, 32, 2048]))
def test_a_restore_is_never_slower_than_the_better_of_loading_and_computing(
    machine: Machine, tiers: str, start: int
) -> None:
    machine.learn(host=True, disk=True)
    for _ in range(6):  # how much they disturb each other can only be learnt from both at once
        for blocks in LENGTHS:
            machine.restore(prefixes(blocks, tiers, start))
    for blocks in LENGTHS:
        prefix = prefixes(blocks, tiers, start)
        alone = machine.load(*prefix.tail(0)), machine.compute(start, start + blocks * BLOCK)
        took = machine.restore(prefix)
        assert took <= MARGIN * min(alone), f"{blocks} blocks took {took / min(alone):.3f} of the better of {alone}"


@given(machine=machines)
def test_without_disturbing_each_other_both_at_once_are_nearly_as_quick_as_can_be(machine: Machine) -> None:
    machine.compute_drag = machine.load_drag = 1.0
    machine.learn(host=True, disk=True)
    prefix = prefixes(89, "disk", 0)
    load, compute = machine.load(0, 89), machine.compute(0, 89 * BLOCK)
    ideal = min(max(machine.load(0, 89 - m) if m < 89 else 0.0, machine.compute(0, m * BLOCK)) for m in range(90))
    if ideal < 0.8 * min(load, compute):
        assert Restoring(machine, prefix, "both").run() <= 1.25 * ideal


@pytest.mark.parametrize("slower", [5.0, 0.2])
def test_a_disk_that_changes_is_found_out(slower: float) -> None:
    machine = Machine(1e-3, 1e-8, (1e-3, 1e-3), (1e-3, 0.01), 1.0, 1.0)
    machine.learn(host=True, disk=True)
    machine.block_s = (1e-3, 0.01 * slower)
    for _ in range(6):
        for blocks in LENGTHS:
            machine.restore(prefixes(blocks, "disk", 0))
    for blocks in LENGTHS:
        alone = machine.load(0, blocks), machine.compute(0, blocks * BLOCK)
        assert machine.restore(prefixes(blocks, "disk", 0)) <= MARGIN * min(alone)


def test_what_was_never_measured_is_loaded_and_so_measured() -> None:
    machine = Machine(1e-3, 0.0, (1e-3, 1e-3), (1e-3, 1e-3), 1.0, 1.0)
    assert choice(machine.rates, prefixes(8, "disk", 0)) == "load"
    machine.learn(host=False, disk=False)
    assert choice(machine.rates, prefixes(8, "disk", 0)) == "load"
    machine.restore(prefixes(8, "disk", 0))
    assert machine.rates.load_s(0, 8) == pytest.approx(machine.load(0, 8))


def test_older_requests_make_loading_look_better() -> None:
    machine = Machine(1e-5, 0.0, (1e-3, 1e-3), (1e-2, 1e-2), 1.0, 1.0)
    machine.learn(host=True, disk=True)
    alone = Prefix(0, BLOCK, b"\1" * 20)
    assert choice(machine.rates, alone) == "compute"
    assert choice(machine.rates, Prefix(0, BLOCK, b"\1" * 20, ahead=100_000)) == "load"


@given(a=st.floats(1e-6, 1e3), b=st.floats(0, 1e3), xs=st.lists(st.integers(1, 10_000), min_size=30, max_size=60))
def test_a_curve_follows_a_straight_line(a: float, b: float, xs: list[int]) -> None:
    curve = Curve(through_origin=True)
    for x in xs * 5:
        curve.note(x, a + b * x)
    for x in xs:
        assert curve.at(x) == pytest.approx(a + b * x, rel=0.3)


@given(points=st.dictionaries(st.integers(0, 14), st.floats(1e-6, 1e3)), x=st.floats(0, 1e6))
def test_a_curve_is_never_negative_and_adds_up(points: dict[int, float], x: float) -> None:
    for origin in (True, False):
        curve = Curve(through_origin=origin, points=[(2.0**at, y) for at, y in points.items()])
        assert curve.at(x) >= 0
        assert curve.sum(0, x) >= 0
        assert curve.sum(0, x) + curve.sum(x, 2 * x) == pytest.approx(curve.sum(0, 2 * x), rel=0.2, abs=1e-9)


def test_rates_survive_a_file() -> None:
    machine = Machine(1e-3, 1e-7, (1e-3, 1e-3), (1e-3, 1e-2), 1.5, 1.5)
    machine.learn(host=True, disk=True)
    again = Rates.of(machine.rates.plain())
    assert again.plain() == machine.rates.plain()
    with pytest.raises(ValueError, match="nobody measured"):
        Rates.of(machine.rates.plain() | {"disk": [(1, -1)]})
