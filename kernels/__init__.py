"""Kernels: one interface (interface.py), backends that implement it, and what they share (batch, paged, rope).

Owns arithmetic and the layout of a block's bytes; never decides what is computed, and holds no KV.
"""

from kernels.interface import Backend
from shared.config import ConfigError


def choose_backend(name: str, threads: int) -> Backend:
    """The backend called `name`, on `threads` compute threads; ConfigError for an unknown one."""
    if name == "reference":
        from kernels.reference.backend import Reference

        return Reference(threads)
    raise ConfigError(f"model.backend {name!r} is unknown; known are reference")
