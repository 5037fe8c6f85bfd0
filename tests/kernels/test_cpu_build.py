"""The CPU kernels are built when they can be, again when their sources change, and not loaded when they do not fit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build, library


def has_compiler() -> bool:
    try:
        return bool(build.compiler())
    except build.NoCompiler:
        return False


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C compiler here")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The smallest part of the sources that makes a library, copied so that a test may change it."""
    copy = tmp_path / "csrc"
    copy.mkdir()
    for path in (build.SOURCES / "about.c", *build.SOURCES.glob("*.h")):
        shutil.copy(path, copy)
    monkeypatch.setattr(build, "SOURCES", copy)
    return copy


def run_build(*arguments: str, cc: str | None = None) -> subprocess.CompletedProcess[str]:
    environ = os.environ if cc is None else {**os.environ, "CC": cc}
    command = [sys.executable, str(build.HERE / "build.py"), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@needs_compiler
@pytest.mark.skipif(not library.supported(), reason="this CPU has none of the instruction sets")
def test_set_up_has_built_the_library_of_this_cpu() -> None:
    for isa in library.supported():
        loaded = library.load(isa)
        assert library.declarations().string(loaded.pd_isa()).decode() == isa
    assert library.library() is library.load(library.chosen())


@needs_compiler
@pytest.mark.skipif(not build.isas(), reason="no instruction set of ours on this machine")
def test_set_up_has_built_every_instruction_set_of_this_machine() -> None:
    assert [isa for isa in build.isas() if not build.is_current(isa)] == []


@needs_compiler
@pytest.mark.skipif(not build.isas(), reason="no instruction set of ours on this machine")
def test_a_current_library_is_left_alone_and_another_built_again(sources: Path, tmp_path: Path) -> None:
    isa, out = build.isas()[0], tmp_path / "out"
    assert build.build_all([isa], out) == [out / f"_perdure_{isa}.so"]
    assert build.is_current(isa, out)
    before = build.library_path(isa, out).read_bytes(), build.library_path(isa, out).stat().st_ino
    build.build_all([isa], out)
    assert (build.library_path(isa, out).read_bytes(), build.library_path(isa, out).stat().st_ino) == before
    with (sources / "lanes.h").open("a") as file:
        file.write("/* changed */\n")
    assert not build.is_current(isa, out)
    build.build_all([isa], out)
    assert build.is_current(isa, out)
    assert [path.name for path in out.iterdir()] == [f"_perdure_{isa}.so"]


@needs_compiler
@pytest.mark.skipif(not library.supported(), reason="this CPU has none of the instruction sets")
def test_a_library_of_other_sources_is_not_loaded(sources: Path) -> None:
    with pytest.raises(library.NoLibrary, match="other sources"):
        library.load.__wrapped__(library.chosen())


@needs_compiler
@pytest.mark.skipif(not build.isas(), reason="no instruction set of ours on this machine")
def test_a_source_that_does_not_compile_is_said_and_leaves_nothing(sources: Path, tmp_path: Path) -> None:
    (sources / "broken.c").write_text("int broken(void) { return }\n")
    out = tmp_path / "out"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        build.build(build.isas()[0], out)
    assert "broken.c" in caught.value.stderr
    assert list(out.iterdir()) == []


def test_without_a_compiler_set_up_goes_on_with_a_notice(tmp_path: Path) -> None:
    done = run_build("--isa", "avx2", "--out", str(tmp_path), cc="no-such-compiler")
    assert done.returncode == 0
    assert "no-such-compiler" in done.stdout
    assert "reference backend" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_is_an_error(tmp_path: Path) -> None:
    done = run_build("--isa", "avx2", "--out", str(tmp_path), cc="false")
    assert done.returncode == 1
    assert "could not be built" in done.stderr


def test_forcing_an_instruction_set_that_the_cpu_lacks_names_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, "mmx")
    with pytest.raises(library.NoLibrary, match="'mmx'"):
        library.chosen()


def test_a_library_that_is_not_built_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "library_path", lambda isa, folder: tmp_path / f"_perdure_{isa}.so")
    with pytest.raises(library.NoLibrary, match=r"_perdure_neon\.so is not built"):
        library.load.__wrapped__("neon")


def test_a_sanitized_library_never_lies_where_libraries_are_served_from() -> None:
    done = run_build("--sanitize", "memory")
    assert done.returncode == 2
    assert "--sanitize needs --out" in done.stderr
