"""What a decode step costs beside the model: time and bytes of scheduler and worker, without the sockets between.

The parts are the real ones, in one process: the engine takes a result and makes the next plan, the journal writes the
step, both messages are encoded and decoded, the worker completes the plan and draws, the detokenizer's news is made.
The model draws the same token for everybody in no time. Each part counts with the median of its steps, so that a step
which lost its core for a moment says nothing.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from ops.bench.figures import Figures
from ops.bench.measure import Spread
from services.scheduler.engine import Engine
from services.scheduler.events import Advanced, Journal
from services.scheduler.journal import Journal as JournalFile
from services.scheduler.settings import Settings
from services.worker.page_store import PageStore
from services.worker.runner import RowOutput, Runner, StepOutput
from services.worker.steps import Steps
from shared.config import FaultsConfig
from shared.faults import Faults
from shared.messages import Head, Message, decode, encode
from shared.messages.base import pack_u32
from shared.messages.engine import KVFacts, Plan, Result, Row, SampleSpec, Submit, WorkerReady

T = TypeVar("T")

STREAMS = (1, 8, 32)
CONTEXTS = (128, 6_000)
STEPS = 256
BLOCK = 32
VOCAB = 49_152
BAR_US = 300.0

READY = WorkerReady(
    model="none",
    architecture="none",
    vocab=VOCAB,
    max_context=1 << 14,
    backend="none",
    numerics="none",
    kv=KVFacts(bytes(32), BLOCK, 64, 1 << 13, "fp32", 1, 1, 8),
    limits={},
)


class OneToken:
    """A runner that draws token 7 for every row that samples."""

    ready = READY
    facts = READY.kv
    largest_step_s = 0.0
    exact = True

    def step(self, rows: Sequence[Row], pool: PageStore) -> StepOutput:
        """Computes nothing."""
        return StepOutput(tuple(RowOutput(token=7 if row.sample is not None else None) for row in rows))


class StepPath:
    """One engine and one worker with running streams.

    `spent`: seconds of each part in the present step; `sent`: bytes by message since the beginning.
    """

    def __init__(self, runner: Runner, pool: PageStore, prompts: Sequence[Sequence[int]], directory: Path) -> None:
        self.spent: dict[str, float] = {}
        self.sent: dict[str, int] = {}
        ready = runner.ready
        settings = Settings(step_tokens=ready.limits.get("step_tokens", 1 << 20), prefix_cache=False)
        self._engine = Engine(settings, bytes(32))
        self._worker = Steps(runner, pool, Faults(FaultsConfig()))
        self._journal = JournalFile(directory)
        self._journal.recover()
        self._told: dict[str, int] = {}
        self._engine.worker_up(0.0, 1, ready.kv, ready.max_context)
        for number, ids in enumerate(prompts):
            self._engine.submit(0.0, _submit(f"{number:032x}", pack_u32(list(ids))), number)
        self._out = self._after([])

    def step(self) -> None:
        """One plan is carried out, its result taken, the next plan sent."""
        self.spent = {}
        plan = self._out.pop(0)
        result = self._part("worker", lambda: self._worker.execute(plan, lambda: True))
        assert result is not None
        arrived = self._across("result", result)
        assert isinstance(arrived, Result)
        self._part("engine: result", lambda: self._engine.result(1.0, arrived))
        self._out = self._after(self._out)

    def _after(self, out: list[Plan]) -> list[Plan]:
        """The plans that are out once the engine has been asked and its effects are carried out."""
        made = self._part("engine: plan", lambda: list(iter(lambda: self._engine.next_plan(1.0), None)))
        effects = self._engine.take_effects()
        records = [effect.record for effect in effects if isinstance(effect, Journal)]
        if records:
            self._part("journal", lambda: self._journal.append(records))
        for plan in made:
            arrived = self._across("plan", plan)
            assert isinstance(arrived, Plan)
            out.append(arrived)
        for effect in effects:
            if isinstance(effect, Advanced):
                self._tell(effect.id)
        return out

    def _tell(self, id: str) -> None:
        progress = self._part("news", lambda: self._engine.progress(id, self._told.get(id, 0)))
        assert progress is not None
        self._told[id] = progress.start + len(progress.ids) // 4
        self._part("news", lambda: self._count("news", encode(Head(), progress)))

    def _across(self, name: str, message: Message) -> Message:
        frames = self._part(f"{name}: encode", lambda: encode(Head(), message))
        self._count(name, frames)
        return self._part(f"{name}: decode", lambda: decode(frames)[1])

    def _count(self, name: str, frames: list[bytes]) -> None:
        self.sent[name] = self.sent.get(name, 0) + sum(map(len, frames))

    def _part(self, name: str, work: Callable[[], T]) -> T:
        begun = time.perf_counter()
        done = work()
        self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begun
        return done


def random_prompts(streams: int, tokens: int, vocab: int = VOCAB) -> list[list[int]]:
    """Token ids that mean nothing, the same at each call."""
    random = np.random.default_rng(streams)
    return [random.integers(0, vocab, tokens).tolist() for _ in range(streams)]


def _submit(id: str, ids: bytes) -> Submit:
    sample = SampleSpec()
    return Submit(
        id=id, digest=bytes(32), principal="", ids=ids, max_tokens=4096, sample=sample, seeded=True, stop_ids=(2,)
    )


def measure(streams: int, context: int) -> tuple[dict[str, float], dict[str, float]]:
    """(microseconds by part, bytes by message) of one decode step."""
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as base:
        prompts = random_prompts(streams, context)
        path = StepPath(OneToken(), PageStore(READY.kv.blocks, READY.kv.block_bytes), prompts, Path(base))
        for _ in range(8):
            path.step()
        path.sent = {}
        spent: dict[str, list[float]] = {}
        for _ in range(STEPS):
            path.step()
            for name, seconds in path.spent.items():
                spent.setdefault(name, []).append(1e6 * seconds)
    micros = {name: statistics.median(each) for name, each in spent.items()}
    return micros, {name: nbytes / STEPS for name, nbytes in path.sent.items()}


def messages(rounds: int, book: Figures) -> None:
    """The section: every number of streams at every context, `rounds` times."""
    for streams in STREAMS:
        for context in CONTEXTS:
            runs = [measure(streams, context) for _ in range(rounds)]
            where = f"a decode step of {streams} at {context:,}"
            total = Spread.of([sum(micros.values()) for micros, _ in runs])
            bar = f"<= 1 of {BAR_US:.0f} us" if streams == 8 else "none"
            book.note(f"{where}: us of messages", total, None, total.median / BAR_US, bar)
            for name in runs[0][0]:
                part = Spread.of([micros[name] for micros, _ in runs])
                book.note(f"{where}: us of {name}", part, None, part.median / total.median, "none: share")
            for name in runs[0][1]:
                nbytes = Spread.of([sent[name] for _, sent in runs])
                book.note(f"{where}: bytes of {name}", nbytes, None, nbytes.median, "none")
