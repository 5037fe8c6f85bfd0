"""Kernels: one interface (interface.py), programs that say what is computed (program.py), backends that run them.

Owns arithmetic and the layout of a block's bytes; never decides what is computed, and holds no KV.
"""

from dataclasses import dataclass

from kernels.interface import Backend, Unfit
from shared.config import ConfigError

BACKENDS = ("auto", "cpu", "reference")


@dataclass(frozen=True)
class Choice:
    """A backend; `warning`: one line when it is not the one that was to be, else ""."""

    backend: Backend
    warning: str = ""


def choose_backend(name: str, threads: int, *, head_dim: int, block_tokens: int = 0) -> Choice:
    """The backend called `name`, on `threads` compute threads; `auto`: the fastest one that this machine can run.

    `head_dim` and `block_tokens` (0: the default length) of the KV to come. ConfigError for an unknown name, and for
    `cpu` where it can't be had.
    """
    if name not in BACKENDS:
        raise ConfigError(f"model.backend {name!r} is unknown; known are {', '.join(BACKENDS)}")
    warning = ""
    if name != "reference":
        from kernels.cpu.backend import Cpu

        try:
            return Choice(Cpu(threads, head_dim=head_dim, block_tokens=block_tokens))
        except Unfit as error:
            if name == "cpu":
                raise ConfigError(f"model.backend is cpu, but {error}") from error
            warning = f"{error}; serving on the reference backend, which is slower and not exact"
    from kernels.reference.backend import Reference

    return Choice(Reference(threads), warning)
