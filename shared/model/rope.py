"""Rotary embedding facts of a model, and its frequencies in float64 (one definition for every file format)."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_DIMS = 1 << 16


@dataclass(frozen=True)
class Rope:
    """`theta ** (-2i / dims)` is the base frequency of pair i; each is divided by `factors[i]` (empty: by 1).

    Pairs are (i, i + dims/2) of a head, as Hugging Face lays them out; GGUF's interleaved rows are un-permuted when
    they are read. `kind` says where the factors come from: `default` (none), `llama3` (computed from the config's
    four numbers) or `factors` (a GGUF's own tensor).
    """

    theta: float
    dims: int
    kind: str = "default"
    factors: tuple[float, ...] = ()

    def inverse_frequencies(self) -> npt.NDArray[np.float64]:
        """[dims / 2] radians a position, computed in float64."""
        base = self.theta ** (-np.arange(0, self.dims, 2, dtype=np.float64) / self.dims)
        return base / np.array(self.factors, dtype=np.float64) if self.factors else base


def llama3_factors(
    theta: float, dims: int, *, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> tuple[float, ...]:
    """Divisors of Llama 3's scaling: long waves are stretched by `factor`, short ones kept, a ramp between.

    Source: the `llama3` rope type of the models' reference implementation. ValueError for numbers without a meaning.
    """
    if not (0 < theta < math.inf and 0 < dims <= MAX_DIMS):
        raise ValueError(f"rope theta {theta} over {dims} dimensions makes no sense")
    if factor <= 0 or original_context <= 0 or low_freq_factor <= 0 or high_freq_factor <= low_freq_factor:
        raise ValueError(
            f"llama3 rope scaling of factor {factor}, low {low_freq_factor}, high {high_freq_factor}, "
            f"original context {original_context} makes no sense"
        )
    out = []
    for i in range(0, dims, 2):
        wavelength = 2 * math.pi * theta ** (i / dims)
        if wavelength < original_context / high_freq_factor:
            out.append(1.0)
        elif wavelength > original_context / low_freq_factor:
            out.append(float(factor))
        else:
            smooth = (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
            out.append(1.0 / ((1 - smooth) / factor + smooth))
    return tuple(out)
