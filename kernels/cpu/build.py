"""Compiles csrc into one shared library for each instruction set: `kernels/cpu/build.py [--isa NAME] [--out DIR]`.

Needs a C compiler (`CC`, else cc, gcc or clang) and nothing of this project, so that set-up can run it before anything
is installed. A library carries the digest of the sources and flags it was built of: one that fits is left alone, and
library.py refuses one that does not. It is written beside its place and renamed, so nobody ever loads half a file.
"""

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"

FLAGS: Mapping[str, tuple[str, ...]] = {
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-DPD_ISA_AVX2"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c", "-DPD_ISA_AVX512"),
    "neon": ("-DPD_ISA_NEON",),
}
"""What the compiler is told for each instruction set."""

COMMON = ("-std=c11", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")

EXACT = ("-ffp-contract=off", "-fno-fast-math")
"""No fused operation that the source does not spell out: a compiler's choice must not change a bit."""

MACHINES = {
    "x86_64": ("avx2", "avx512"),
    "amd64": ("avx2", "avx512"),
    "aarch64": ("neon",),
    "arm64": ("neon",),
}
"""Instruction sets worth building on a machine, slowest first."""


SANITIZED: Mapping[str, tuple[str, ...]] = {
    "memory": (
        "-O1",
        "-g",
        "-fno-omit-frame-pointer",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
    ),
    "thread": ("-O1", "-g", "-fsanitize=thread"),
}
"""What --sanitize adds: memory errors and undefined behaviour, or races, end in a report and an exit code."""


class NoCompiler(Exception):
    """There is no C compiler here."""


def isas(machine: str | None = None) -> tuple[str, ...]:
    """Instruction sets known for `machine` (this one), slowest first."""
    return MACHINES.get((machine or platform.machine()).lower(), ())


def compiler() -> list[str]:
    """Command of the C compiler; raises NoCompiler."""
    if chosen := shlex.split(os.environ.get("CC", "")):
        if shutil.which(chosen[0]) is None:
            raise NoCompiler(f"CC names {chosen[0]}, which is not on the path")
        return chosen
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise NoCompiler("neither cc, gcc nor clang is on the path")


def digest(isa: str) -> str:
    """Names sources and flags; part of the library, where `is_current` and pd_sources() find it."""
    seen = hashlib.sha256(repr((COMMON, EXACT, FLAGS[isa])).encode())
    for path in sorted(SOURCES.iterdir()):
        seen.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return f"perdure-cpu-{isa}-{seen.hexdigest()[:32]}"


def library_path(isa: str, folder: Path = HERE) -> Path:
    """Where the library of `isa` lies."""
    return folder / f"_perdure_{isa}.so"


def is_current(isa: str, folder: Path = HERE) -> bool:
    """Whether the library of `isa` is there and was built of the sources as they are now."""
    try:
        return digest(isa).encode() in library_path(isa, folder).read_bytes()
    except OSError:
        return False


def build(isa: str, folder: Path = HERE, extra: Sequence[str] = ()) -> Path:
    """Compiles the library of `isa` into `folder`, `extra` flags last.

    NoCompiler, or CalledProcessError whose stderr is the compiler's.
    """
    cc = compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".perdure_", dir=folder) as temporary:
        library = Path(temporary) / "library.so"
        flags = [*COMMON, *EXACT, *FLAGS[isa], f'-DPD_SOURCES="{digest(isa)}"', *extra]

        def compiled(source: Path) -> str:
            made = str(Path(temporary) / f"{source.stem}.o")
            _run([*cc, *flags, "-c", "-o", made, str(source)])
            return made

        # The longest first, so that no core is left with it at the end
        sources = sorted(SOURCES.glob("*.c"), key=lambda path: (path.name != "products.c", path.name))
        with ThreadPoolExecutor(os.cpu_count()) as several:
            objects = list(several.map(compiled, sources))
        _run([*cc, *flags, "-shared", "-o", str(library), *objects])
        os.replace(library, library_path(isa, folder))
    return library_path(isa, folder)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)


def build_all(names: Sequence[str], folder: Path = HERE, extra: Sequence[str] = ()) -> list[Path]:
    """Those of `names` that are not current, built; the others' paths too."""
    return [library_path(isa, folder) if is_current(isa, folder) else build(isa, folder, extra) for isa in names]


def main() -> int:
    """0 when all is built, also without a compiler (with a notice: other backends remain); else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", action="append", choices=sorted(FLAGS), help="default: all that this machine may have")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--sanitize", choices=sorted(SANITIZED), help="for tests under gcc's sanitizers; needs --out")
    arguments = parser.parse_args()
    if arguments.sanitize and arguments.out.resolve() == HERE:
        parser.error("--sanitize needs --out: a library that is served from must not be a sanitized one")
    try:
        build_all(arguments.isa or isas(), arguments.out, SANITIZED.get(arguments.sanitize, ()))
    except NoCompiler as error:
        print(f"The CPU kernels are not built, {error}; models will run on the slower reference backend.")
    except subprocess.CalledProcessError as error:
        print(f"{shlex.join(error.cmd)}\n{error.stderr}\nThe CPU kernels could not be built.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
