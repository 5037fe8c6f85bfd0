"""Kernels: one interface (interface.py), programs that say what is computed (program.py), backends that run them.

Owns arithmetic and the layout of a block's bytes; never decides what is computed, and holds no KV.
"""

from dataclasses import dataclass

from kernels.interface import Backend, Unfit
from shared.config import ConfigError

BACKENDS = ("auto", "cpu", "reference")
ACTIVATIONS = ("fp32", "int8")


@dataclass(frozen=True)
class Choice:
    """A backend; `warning`: one line when it is not the one that was to be, else ""."""

    backend: Backend
    warning: str = ""


def choose_backend(
    name: str, threads: int, *, head_dim: int, block_tokens: int = 0, activations: str = "fp32"
) -> Choice:
    """The backend called `name`, on `threads` compute threads; `auto`: the fastest one that this machine can run.

    `head_dim` and `block_tokens` (0: the default length) of the KV to come. `activations`: one of ACTIVATIONS; who asks
    for int8 asks for the one backend that has it. ConfigError for an unknown name, and for `cpu` or int8 where it can't
    be had.
    """
    if name not in BACKENDS:
        raise ConfigError(f"model.backend {name!r} is unknown; known are {', '.join(BACKENDS)}")
    if activations not in ACTIVATIONS:
        raise ConfigError(f"model.activations {activations!r} is unknown; known are {', '.join(ACTIVATIONS)}")
    int8 = activations == "int8"
    if int8 and name == "reference":
        raise ConfigError("model.activations is int8, which the reference backend does not compute: take cpu")
    warning = ""
    if name != "reference":
        from kernels.cpu.backend import Cpu

        try:
            return Choice(Cpu(threads, head_dim=head_dim, block_tokens=block_tokens, int8=int8))
        except Unfit as error:
            if name == "cpu" or int8:
                asked = "model.backend is cpu" if name == "cpu" else "model.activations is int8, for the cpu backend"
                raise ConfigError(f"{asked}, but {error}") from error
            warning = f"{error}; serving on the reference backend, which is slower and not exact"
    from kernels.reference.backend import Reference

    return Choice(Reference(threads), warning)
