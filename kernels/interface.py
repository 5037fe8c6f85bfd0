"""What the worker asks of a backend: take a model's program, then run steps. A backend is replaced as a whole.

    load    once: packs the program's weights in the format it computes in
    step    feeds a ragged batch: all its tokens' KV into the pool, logits of those that sample

Activations are fp32. KV is rounded once, when it is written; attention always reads K and V from the pool, also those
of the tokens being fed. A request's result must not depend on what else is in the batch, on how its prompt was cut
into chunks, or on what came from the cache: on an `exact` backend bit for bit, else to the backend's tolerance.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kernels.batch import Batch
from kernels.paged import PagedKV
from kernels.program import Program
from kernels.sampling import Sampler

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (ops loaded, ops in all)."""


class Unfit(Exception):
    """This backend can't serve here; the text says what is missing, as half a sentence."""


@dataclass(frozen=True)
class Weights:
    """Where packed weights may be kept, and the 32-byte digest of what they are made from."""

    directory: Path
    digest: bytes


@dataclass(frozen=True)
class Forward:
    """`logits`: fp32 [S, vocab] of the sampled tokens, in a buffer that the next step may overwrite.

    `health`: fp32 [T], finite as long as everything that was written to the pool for that token is finite.
    """

    logits: NDArray[np.float32]
    health: NDArray[np.float32]


@dataclass(frozen=True)
class Footprint:
    """Bytes of memory: `weights` once loaded, `step` for the buffers of a step. `exact`: no estimate."""

    weights: int
    step: int
    exact: bool = False


class Model(Protocol):
    """A loaded program. Not thread-safe: it owns work buffers; use it from the thread that loaded it."""

    @property
    def sample(self) -> Sampler:
        """Draws from logits; see kernels/sampling.py."""

    def step(self, batch: Batch, kv: PagedKV, *, layers: int | None = None) -> Forward:
        """Feeds a batch and writes its KV into the pool. `layers`: see `Program.shortened` (a sizing run)."""


class Backend(Protocol):
    """One way to compute."""

    @property
    def name(self) -> str:
        """`reference`, `cpu` or `triton`."""

    @property
    def exact(self) -> bool:
        """Whether results are equal bit for bit whatever the batch, the chunks and the cache."""

    @property
    def numerics(self) -> str:
        """Changes whenever rounding may change; part of the KV fingerprint."""

    def footprint(self, program: Program, tokens: int, rows: int, context: int) -> Footprint:
        """For steps of `tokens` tokens and `rows` sequences up to `context` tokens long; no less than the truth."""

    @property
    def kv_dtype(self) -> str:
        """What KV is kept in unless the user says otherwise: a key of `shared.kv.DTYPE_BYTES`."""

    def load(self, program: Program, kept: Weights | None, progress: Progress) -> Model:
        """Packs the weights, or maps what was packed before; blocking, seconds for a large model."""
