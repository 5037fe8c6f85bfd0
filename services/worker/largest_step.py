"""Runs the largest step that the scheduler may plan and says what it takes (`mechanisms.md` 11, a profile run)."""

import time
from dataclasses import dataclass

import numpy as np

from kernels.batch import make_batch
from kernels.interface import Model
from kernels.paged import PagedKV
from shared.config import Config
from shared.kv import KVLayout
from shared.machine import forget_peak, resident_bytes

MEASURED_LAYERS = 2
DECODE_CONTEXT = 256
"""Context of the dummy's decodes; what they gather is bounded by the backend, not by their number."""

SHARE = 8
"""Of a largest step whose memory is known, so much less is run: its time is all that is asked."""


@dataclass(frozen=True)
class Trial:
    """Of the largest step through `MEASURED_LAYERS` layers: seconds, and bytes above what was resident before.

    `nbytes` None: nobody knows, as it was not to be measured or the kernel doesn't tell.
    """

    seconds: float
    nbytes: int | None


def try_largest_step(model: Model, layout: KVLayout, config: Config, context: int, *, measure: bool) -> Trial:
    """Runs it, or without `measure` a piece of it whose time is scaled.

    `max_running` rows and `step_tokens` tokens, the remainder as a chunk of the first row, which ends at the longest
    context that fits both model and pool. Two layers are run: buffers go from layer to layer, so the first shows the
    peak, while the last computes sampled tokens only. All tables name the one block of a pool of one, because only
    sizes matter here.
    """
    reach = min(context, config.kv.pool_bytes // layout.block_bytes * layout.block_tokens)
    part = 1 if measure else SHARE
    rows = max(1, min(config.scheduler.max_running, config.scheduler.step_tokens) // part)
    chunk = min(max(1, config.scheduler.step_tokens // part - (rows - 1)), reach)
    table = np.zeros(-(-reach // layout.block_tokens), dtype=np.int32)
    plan = [(reach - chunk, np.zeros(chunk, dtype=np.int32), table, True)]
    decode = min(DECODE_CONTEXT, reach) - 1
    plan += [(decode, np.zeros(1, dtype=np.int32), table, True)] * (rows - 1)
    kv = PagedKV(bytearray(layout.block_bytes), layout)
    model.step(make_batch(plan[-1:]), kv, layers=MEASURED_LAYERS)  # what only a first run allocates is not the step's
    told = measure and forget_peak()
    before, _ = resident_bytes() if told else (0, 0)
    begun = time.perf_counter()
    model.step(make_batch(plan), kv, layers=MEASURED_LAYERS)
    seconds = time.perf_counter() - begun
    _, peak = resident_bytes() if told else (0, 0)
    return Trial(seconds * part, max(0, peak - before) if told else None)
