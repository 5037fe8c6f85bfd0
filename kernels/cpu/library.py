"""The compiled kernels of this CPU, called through cffi without a wrapper in between.

The header csrc/perdure_cpu.h is what cffi is told, so there is one description of each function. Calls release the
interpreter's lock.
"""

import os
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import cffi

from kernels.cpu import build

ISA_VARIABLE = "PERDURE_CPU_ISA"
"""Environment variable that forces an instruction set (tests, comparisons)."""

FOLDER_VARIABLE = "PERDURE_CPU_LIBRARIES"
"""Environment variable that names another folder of libraries (`make sanitize`)."""

NEEDS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"},
}
"""Flags in /proc/cpuinfo without which an x86 library would die of an illegal instruction."""


class NoLibrary(Exception):
    """No compiled kernels fit this CPU, or they were not built; the message says which and what to do."""


def supported() -> tuple[str, ...]:
    """Instruction sets of ours that this CPU has, slowest first."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return build.isas()  # every 64-bit ARM has them
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    return tuple(isa for isa in build.isas() if NEEDS[isa] <= flags)


def chosen() -> str:
    """The instruction set to use: the one that PERDURE_CPU_ISA names, else the CPU's best; NoLibrary without any."""
    able = supported()
    forced = os.environ.get(ISA_VARIABLE)
    if forced and forced not in able:
        raise NoLibrary(f"{ISA_VARIABLE} is {forced!r}; this CPU has {', '.join(able) or 'none that is known'}")
    if not able:
        raise NoLibrary(f"no CPU kernels for this {platform.machine()} CPU: they need AVX2, FMA and F16C, or NEON")
    return forced or able[-1]


@cache
def declarations() -> Any:
    """The FFI object that knows all functions and structs of perdure_cpu.h."""
    ffi = cffi.FFI()
    text = (build.SOURCES / "perdure_cpu.h").read_text()
    ffi.cdef("\n".join(line for line in text.splitlines() if not line.startswith("#")))
    return ffi


@cache
def load(isa: str) -> Any:
    """The library of `isa`; NoLibrary when it is missing or was built of other sources."""
    path = build.library_path(isa, Path(os.environ.get(FOLDER_VARIABLE) or build.HERE))
    if not path.exists():
        raise NoLibrary(f"{path.name} is not built; `make setup` builds it and needs a C compiler")
    try:
        library = declarations().dlopen(str(path))
        built_of = declarations().string(library.pd_sources()).decode()
    except (OSError, AttributeError) as error:
        raise NoLibrary(f"{path.name} does not load: {error}; run `make setup`") from error
    if built_of != build.digest(isa):
        raise NoLibrary(f"{path.name} was built of other sources; run `make setup`")
    return library


def library() -> Any:
    """The library to use on this CPU, see `chosen`; raises NoLibrary."""
    return load(chosen())


def pointer(array: Any, kind: str) -> Any:
    """C pointer to the first element of a NumPy array or CPU tensor, which must outlive the call; None is NULL.

    `kind` is the pointer's type, such as `float *`.
    """
    ffi = declarations()
    if array is None:
        return ffi.NULL
    address: Callable[[], int] | None = getattr(array, "data_ptr", None)
    return ffi.cast(kind, address() if address else array.ctypes.data)
