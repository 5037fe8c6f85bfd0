"""What computes a step: the seam between the worker's shell and a model. This module imports no torch.

`ModelRunner` (model_runner.py) runs a real model, `ToyRunner` (toy_runner.py) the integer test model. A runner
computes; it never decides: which rows, blocks and samples is the scheduler's plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.reference.sampler import sample_each
from kernels.sampling import Sampler
from services.worker.page_store import PageStore
from shared.messages.engine import KVFacts, Row, WorkerReady


@dataclass(frozen=True)
class RowOutput:
    """Outcome of one row: at most one of the three is set; none for a chunk that samples nothing.

    `logits`: float32 [vocab] of the row's last position, for the sampler. It may be a view of a buffer that the
    next step overwrites, so draw from it before that. `token`: an id that the model itself fixed (toy).
    `error`: why this request, and only it, has to end.
    """

    logits: NDArray[np.float32] | None = None
    token: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class StepOutput:
    """Outcomes in the order of the step's rows. `sample`: draws from their logits, before the next step."""

    rows: tuple[RowOutput, ...] = field(default=())
    sample: Sampler = sample_each


class Runner(Protocol):
    """A loaded model. `ready` is what the worker tells the scheduler; `facts` is its `kv` part.

    `facts.blocks` and `facts.block_bytes` are the sizes of the PageStore that `step` wants to be given.
    """

    @property
    def ready(self) -> WorkerReady:
        """Model, limits and KV facts."""

    @property
    def facts(self) -> KVFacts:
        """`ready.kv`."""

    @property
    def largest_step_s(self) -> float:
        """Seconds that a step of the most tokens may take, as estimated at load; 0 when it is no time at all."""

    @property
    def exact(self) -> bool:
        """Whether results are equal bit for bit whatever the batch, the chunks and the cache; else to a tolerance."""

    def step(self, rows: Sequence[Row], pool: PageStore) -> StepOutput:
        """Feeds all rows in one pass, writes their KV into `pool`; blocking, always in the same thread.

        ValueError when a row contradicts itself or the pool (a table too short, a block or token id out of range);
        it is raised before anything is written.
        """
