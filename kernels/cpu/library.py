"""The compiled kernels of this CPU, called through cffi without a wrapper in between.

The header csrc/perdure_cpu.h is what cffi is told, so there is one description of each function. Calls release the
interpreter's lock.
"""

import contextlib
import hashlib
import importlib.util
import os
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


LINE = 64
"""Bytes of a cache line."""


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
    """The FFI object that knows all functions and structs of perdure_cpu.h.

    Parsing C takes cffi a tenth of a second, a fifth of a worker's start; so what it understood is kept beside the
    libraries as a module, named by the header's digest.
    """
    header = (build.SOURCES / "perdure_cpu.h").read_text()
    text = "\n".join(line for line in header.splitlines() if not line.startswith("#"))
    path = build.HERE / f"_declarations_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    if not path.exists():
        try:
            _understand(text, path)
        except OSError:  # a folder that we may not write: parsed at each start
            return _parsed(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ffi


def _parsed(text: str) -> Any:
    import cffi  # with its parser half as costly as the parsing

    ffi = cffi.FFI()
    ffi.cdef(text)
    return ffi


def _understand(text: str, path: Path) -> None:
    """Parses declarations into a module at `path`, and removes those of other headers."""
    ffi = _parsed(text)
    ffi.set_source(path.stem, None)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with contextlib.redirect_stdout(None):  # it says what it generates
            ffi.emit_python_code(str(beside))
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)
    for old in path.parent.glob("_declarations_*.py"):
        if old != path:
            old.unlink(missing_ok=True)


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


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """uint8 [nbytes] that begins at a cache line; its content is undefined."""
    room = np.empty(nbytes + LINE, np.uint8)
    start = -room.ctypes.data % LINE
    return room[start : start + nbytes]


def pointer(array: Any, kind: str) -> Any:
    """C pointer to the first element of a NumPy array or CPU tensor, which must outlive the call; None is NULL.

    `kind` is the pointer's type, such as `float *`.
    """
    ffi = declarations()
    if array is None:
        return ffi.NULL
    address: Callable[[], int] | None = getattr(array, "data_ptr", None)
    return ffi.cast(kind, address() if address else array.ctypes.data)
