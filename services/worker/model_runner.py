"""Runs a real model: opens and loads it, sizes the pool by a step of the largest size, feeds the scheduler's rows."""

from collections.abc import Callable, Sequence

import numpy as np
import structlog
from numpy.typing import NDArray

from kernels import choose_backend
from kernels.batch import make_batch
from kernels.interface import Weights
from kernels.paged import PagedKV
from services.worker.largest_step import MEASURED_LAYERS, try_largest_step
from services.worker.models.decoder import decoder
from services.worker.page_store import PageStore
from services.worker.profile import Demand, check_settings, size_pool
from services.worker.runner import RowOutput, StepOutput
from shared.config import Config
from shared.identity import fingerprint
from shared.machine import available_memory, usable_cores
from shared.messages.engine import KVFacts, Row, WorkerReady
from shared.model.spec import open_model
from shared.paths import Places

PACKED = "packed"
"""Folder, beside the models, of weights as a backend computes with them."""

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0 to 1."""


class ModelRunner:
    """A loaded model; implements `runner.Runner`. Use it from the thread that made it.

    Raises ConfigError (a ValueError) or BadModel with one line for whatever can't be served.
    """

    def __init__(self, config: Config, places: Places, progress: Progress = lambda what, share: None) -> None:
        self._log = structlog.get_logger()
        check_settings(config)
        progress("opening the model", 0.0)
        source = open_model(config.model.source, places.models(config.model.dir))
        spec = source.spec
        context = min(config.model.max_context or spec.max_context, spec.max_context)
        program = decoder(spec, source.tensors(), context)
        threads = config.model.threads or usable_cores()
        choice = choose_backend(
            config.model.backend,
            threads,
            head_dim=spec.head_dim,
            block_tokens=config.kv.block_tokens,
            activations=config.model.activations,
        )
        if choice.warning:
            self._log.warning("backend", reason=choice.warning)
        backend = choice.backend
        dtype = backend.kv_dtype if config.kv.dtype == "auto" else config.kv.dtype
        self._layout = layout = spec.kv_layout(dtype, config.kv.block_tokens)
        limits = config.scheduler
        foot = backend.footprint(program, limits.step_tokens, limits.max_running, context)
        size_pool(config, layout, Demand(foot.weights, foot.step), available_memory())  # a hopeless start ends here
        kept = Weights(places.models(config.model.dir) / PACKED, source.digest())
        self.model = backend.load(program, kept, lambda done, total: progress("loading weights", done / total))
        progress("sizing the pool", 0.0)
        trial = try_largest_step(self.model, layout, config, context, measure=not foot.exact)
        self._largest_step_s = trial.seconds / MEASURED_LAYERS * spec.layers
        demand = Demand(foot.weights, foot.step if trial.nbytes is None else trial.nbytes, loaded=True)
        size = size_pool(config, layout, demand, available_memory())
        if size.warning:
            self._log.warning("pool_clamped", reason=size.warning)
        self._view: tuple[PageStore, PagedKV] | None = None
        self._exact = backend.exact
        self._ready = WorkerReady(
            model=spec.name,
            architecture=spec.architecture,
            vocab=spec.vocab,
            max_context=context,
            backend=backend.name,
            numerics=backend.numerics,
            kv=KVFacts(
                fingerprint=fingerprint(
                    spec.fingerprint_fields()
                    | {
                        "weights": kept.digest,
                        "numerics": backend.numerics,
                        "kv_dtype": layout.dtype,
                        "block_tokens": layout.block_tokens,
                        "layout": layout.name,
                    }
                ),
                block_tokens=layout.block_tokens,
                block_bytes=layout.block_bytes,
                blocks=size.blocks,
                kv_dtype=layout.dtype,
                layers=spec.layers,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                token_s=self._largest_step_s / limits.step_tokens,
            ),
            limits={"rows": config.scheduler.max_running, "step_tokens": config.scheduler.step_tokens},
        )

    @property
    def ready(self) -> WorkerReady:
        """Model, limits and KV facts."""
        return self._ready

    @property
    def facts(self) -> KVFacts:
        """`ready.kv`."""
        return self._ready.kv

    @property
    def largest_step_s(self) -> float:
        """By the layers of it that ran when the pool was sized."""
        return self._largest_step_s

    @property
    def exact(self) -> bool:
        """The backend's."""
        return self._exact

    def _paged(self, pool: PageStore) -> PagedKV:
        if self._view is None or self._view[0] is not pool:
            self._view = (pool, PagedKV(pool.memory, self._layout))
        return self._view[1]

    def step(self, rows: Sequence[Row], pool: PageStore) -> StepOutput:
        """Feeds all rows, already `checked`, as one ragged batch; see `Runner.step`."""
        batch = make_batch([(row.start, _ids(row.ids), _ids(row.blocks), row.sample is not None) for row in rows])
        result = self.model.step(batch, self._paged(pool))
        healthy = _finite_spans(result.health, [span.first for span in batch.spans])
        logits = iter(result.logits)
        outputs: list[RowOutput] = []
        for row, span, finite in zip(rows, batch.spans, healthy, strict=True):
            mine = next(logits) if row.sample is not None else None
            if finite:
                outputs.append(RowOutput(logits=mine))
            else:
                outputs.append(RowOutput(error=self._not_finite(row.key, span.start, span.end)))
        return StepOutput(tuple(outputs), self.model.sample)

    def _not_finite(self, key: int, start: int, end: int) -> str:
        hint = "; fp16 ends at 65,504, kv.dtype bf16 or fp32 reach further" if self._layout.dtype == "fp16" else ""
        return f"request {key}: KV of positions [{start}, {end}) is not finite in {self._layout.dtype}{hint}"


def _ids(packed: bytes) -> NDArray[np.int32]:
    """Packed u32, all of them checked to be far below 2^31 -> int32 [n], the same bytes."""
    return np.frombuffer(packed, "<i4")


def _finite_spans(health: NDArray[np.float32], firsts: Sequence[int]) -> list[bool]:
    """Whether each span's tokens are all healthy; `firsts`: index of each span's first token."""
    return [bool(x) for x in np.isfinite(np.add.reduceat(health, firsts))]
