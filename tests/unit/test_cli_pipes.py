"""Commands whose reader goes away: no traceback, and the code that other tools end with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.cli.pipes import READER_GONE, quiet_when_nobody_reads


def run(home: Path, *arguments: str, stdout: int) -> "subprocess.CompletedProcess[bytes]":
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    return subprocess.run(
        [sys.executable, "-m", "ops.cli", *arguments],
        env=environ | {"PERDURE_HOME": str(home)},
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("--version",), ("doctor",), ("doctor", "--json"), ("models", "list"), ("generate", "--help")],
    ids=" ".join,
)
def test_a_command_that_nobody_reads_ends_without_a_word(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(tmp_path, *arguments, stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (READER_GONE, b"")


def test_a_command_that_is_read_ends_as_ever(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"fault" in done.stdout


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        ExceptionGroup("", [BrokenPipeError(32, "x"), ValueError("x")]),
        ConnectionResetError(104, "x"),
        KeyboardInterrupt(),
        SystemExit(3),
    ],
    ids=repr,
)
def test_other_errors_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, quiet_when_nobody_reads():
        raise error
    assert caught.value is error
