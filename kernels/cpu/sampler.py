"""Sampling by the C kernels, all rows of a step in one call on the crew; implements `kernels.sampling.Sampler`."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.crew import Crew, KernelError
from kernels.cpu.library import declarations, pointer
from kernels.sampling import BIAS_LEAVES_NONE, NOT_FINITE, Draw, Drawn, bias_beyond, uniform


class CpuSampler:
    """Owns the scratch of each thread; use it from the thread that owns the crew."""

    def __init__(self, library: Any, crew: Crew, vocab: int) -> None:
        self._library, self._crew, self._vocab = library, crew, vocab
        self._scratch = np.empty(library.pd_sample_scratch(vocab) * crew.threads, np.uint8)

    def __call__(self, draws: Sequence[Draw]) -> list[Drawn]:
        """See `Sampler`."""
        if not draws:
            return []
        ffi = declarations()
        logits, ld = _matrix(draws)
        asked = ffi.new("pd_sampling[]", len(draws))
        keep: list[Any] = []
        for entry, draw in zip(asked, draws, strict=True):
            spec = draw.spec
            entry.temperature, entry.top_k, entry.top_p, entry.min_p = (
                spec.temperature, spec.top_k, spec.top_p, spec.min_p,
            )  # fmt: skip
            if spec.temperature > 0.0:
                entry.point = uniform(spec.seed, spec.choice, draw.position)
            entry.forced, entry.alternatives, entry.biases = draw.forced, spec.logprobs, len(spec.bias)
            if spec.bias:
                entry.bias_ids = ffi.new("int32_t[]", [token for token, _ in spec.bias])
                entry.bias = ffi.new("double[]", [addend for _, addend in spec.bias])
                keep += [entry.bias_ids, entry.bias]
        width = max(0, *(draw.spec.logprobs for draw in draws))
        drawn = ffi.new("pd_drawn[]", len(draws))
        ids, top = np.empty((len(draws), width), np.int32), np.empty((len(draws), width))
        code = self._library.pd_crew_sample(
            self._crew.c, pointer(logits, "float *"), ld, len(draws), self._vocab, asked, drawn,
            pointer(ids, "int32_t *"), pointer(top, "double *"), width, pointer(self._scratch, "void *"),
        )  # fmt: skip
        if code:
            raise KernelError(f"sampling: {ffi.string(self._library.pd_error_text(code)).decode()}")
        return [
            self._outcome(draw, found, ids[row], top[row])
            for row, (draw, found) in enumerate(zip(draws, drawn, strict=True))
        ]

    def _outcome(self, draw: Draw, found: Any, ids: NDArray[np.int32], top: NDArray[np.float64]) -> Drawn:
        if found.token < 0:
            return Drawn(error=self._error(draw, found.token))
        if draw.spec.logprobs < 0:
            return Drawn(found.token)
        best = min(draw.spec.logprobs, self._vocab)
        return Drawn(found.token, found.logprob, tuple(zip(ids[:best].tolist(), top[:best].tolist(), strict=True)))

    def _error(self, draw: Draw, code: int) -> str:
        library = self._library
        if code == library.PD_BIAS_OUT_OF_VOCABULARY:
            beyond = next(token for token, _ in draw.spec.bias if not 0 <= token < self._vocab)
            return bias_beyond(beyond, self._vocab)
        if code == library.PD_FORCED_OUT_OF_VOCABULARY:
            return f"token {draw.forced} is forced; the vocabulary has {self._vocab}"
        return {library.PD_LOGITS_NOT_FINITE: NOT_FINITE, library.PD_BIAS_NOT_FINITE: BIAS_LEAVES_NONE}[code]


def _matrix(draws: Sequence[Draw]) -> tuple[NDArray[np.float32], int]:
    """(rows, floats from one to the next): the rows where they lie when they do so evenly, else copied together."""
    places = [draw.logits.ctypes.data for draw in draws]
    steps = {b - a for a, b in pairwise(places)}
    even = len(steps) <= 1 and all(step > 0 for step in steps)
    if even and all(draw.logits.flags.c_contiguous for draw in draws):
        return draws[0].logits, (steps.pop() // 4 if steps else len(draws[0].logits))
    whole = np.stack([draw.logits for draw in draws])
    return whole, whole.shape[1]
