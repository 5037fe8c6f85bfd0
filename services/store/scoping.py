"""Scopes over many roots at once."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.scope import Scope


def covered(scope: Scope, roots: NDArray[Any]) -> NDArray[np.bool_]:
    """Which of `roots`, 32 bytes each (void or [n, 32]), a scope covers: [n]."""
    rows = np.ascontiguousarray(roots).view(np.uint8).reshape(-1, 32)
    if not scope.mask:
        return np.ones(len(rows), bool)
    mask = np.frombuffer(scope.mask, np.uint8)
    same: NDArray[np.bool_] = ((rows ^ np.frombuffer(scope.pattern, np.uint8)) & mask == 0).all(axis=1)
    return same
