"""The crew of threads: phases are ordered, idle threads sleep, misuse is refused; `crew_trial.c` is the program."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.cpu import build

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in build.MACHINES, reason="no kernels for this machine's CPU"
)

HERE = Path(__file__).parent


def compiled(folder: Path, kind: str = "plain") -> Path:
    flags = [flag for flag in (*build.COMMON, *build.EXACT) if flag != "-fPIC"]
    program = folder / f"crew_trial_{kind}"
    command = [*build.compiler(), *flags, *build.SANITIZED.get(kind, ()), f"-I{build.SOURCES}", "-o", str(program)]
    subprocess.run([*command, str(HERE / "crew_trial.c"), str(build.SOURCES / "crew.c")], check=True)
    return program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        build.compiler()
    except build.NoCompiler:
        pytest.skip("no C compiler here")
    return tmp_path_factory.mktemp("crew")


@pytest.fixture(scope="module")
def trial(folder: Path) -> Path:
    return compiled(folder)


@pytest.fixture
def busy_neighbours() -> Iterator[None]:
    """A process on each core that never sleeps."""
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    yield
    for neighbour in neighbours:
        neighbour.kill()
        neighbour.wait()


def holds(program: Path, name: str, *numbers: int) -> None:
    command = [program, name, *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_ten_thousand_regions_in_order(trial: Path, threads: int) -> None:
    holds(trial, "phases", threads, 10_000, 1)


def test_many_barriers_of_one_region(trial: Path) -> None:
    holds(trial, "phases", 2, 5, 20_000)


def test_more_threads_than_cores(trial: Path) -> None:
    holds(trial, "phases", 4 * (os.cpu_count() or 1) + 1, 100, 10)


@pytest.mark.usefixtures("busy_neighbours")
def test_beside_busy_neighbours(trial: Path) -> None:
    holds(trial, "phases", os.cpu_count() or 1, 500, 10)


@pytest.mark.parametrize("kind", sorted(build.SANITIZED))
def test_nothing_for_the_sanitizers_to_find(folder: Path, kind: str) -> None:
    try:
        program = compiled(folder, kind)
    except subprocess.CalledProcessError:
        pytest.skip(f"the compiler has no {kind} sanitizer")
    holds(program, "phases", 3, 200, 5)
    holds(program, "busy", 2)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("name", ["forked", "busy", "floats", "idle", "sizes"])
def test_trial(trial: Path, name: str, threads: int) -> None:
    """`forked`: a child is refused. `busy`: one region at a time. `floats`: every thread rounds to nearest and keeps
    denormals, and the caller's mode comes back. `idle`: threads sleep between regions and end with the crew.
    """
    holds(trial, name, threads)
