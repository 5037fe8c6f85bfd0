"""cos and sin of every position, computed once in float64: one definition of the rotation for all backends."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RopeTables:
    """`cos`, `sin`: float32 [positions, dims / 2]. Pair i of a head is (i, i + dims / 2)."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]

    @property
    def dims(self) -> int:
        """Leading elements of a head that are rotated."""
        return 2 * int(self.cos.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of both tables."""
        return int(self.cos.nbytes + self.sin.nbytes)


def rope_tables(inverse_frequencies: NDArray[np.float64], positions: int) -> RopeTables:
    """Tables of positions 0..positions-1 from [dims / 2] radians a position.

    Filled in pieces: float64 angles of a 128k context would take three times the tables' own memory.
    """
    pairs = len(inverse_frequencies)
    cos, sin = (np.empty((positions, pairs), np.float32) for _ in range(2))
    for start in range(0, positions, 4096):
        stop = min(start + 4096, positions)
        angles = np.arange(start, stop, dtype=np.float64)[:, None] * inverse_frequencies
        cos[start:stop] = np.cos(angles)
        sin[start:stop] = np.sin(angles)
    return RopeTables(cos, sin)
