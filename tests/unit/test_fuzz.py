"""The fuzzer: it finds what is planted, its inputs can be made again, and a short run of it finds nothing."""

import subprocess
import sys
from random import Random

import pytest

from ops.fuzz import child
from ops.fuzz.__main__ import ROOT, fuzz
from ops.fuzz.target import joined, parted


def test_every_kind_of_fault_is_found_with_the_input_that_shows_it() -> None:
    report = fuzz(seed=3, most=6, modules=["tests.planted_faults"])
    found = {name: (kind, data) for name, kind, _, data in report.findings}
    assert set(found) == {"raises", "stands", "swells", "dies"}
    assert all(data == b"fault" for _, data in found.values())
    assert found["raises"][0].startswith("KeyError")
    assert found["stands"][0].startswith("TooSlow")
    assert found["swells"][0].startswith("MemoryError")
    assert "signal 11" in found["dies"][0]
    assert {name: done for name, (done, _) in report.runs.items()} == dict.fromkeys([*found, "refuses"], 6)
    assert report.runs["refuses"][1] == 0


def test_a_short_run_over_all_decoders_finds_nothing() -> None:
    report = fuzz(seed=1, most=40)
    assert [(name, kind) for name, kind, _, _ in report.findings] == []
    assert all(done == 40 for done, _ in report.runs.values())
    assert all(taken for _, taken in report.runs.values()), "a target that takes nothing tests nothing"


@pytest.mark.parametrize("target", child.targets(), ids=lambda target: target.name)
def test_an_input_can_be_made_again_from_its_number(target: child.Target) -> None:
    numbers = child.inputs(target, seed=5)
    made = {number: data for number, data in (next(numbers) for _ in range(30))}
    for number in (29, 3, 17):
        assert child.input_of(target, 5, number) == made[number]
    assert len(set(made.values())) > 15


def test_the_command_says_what_it_did_and_repeats_one_input(tmp_path: object) -> None:
    command = [sys.executable, "-m", "ops.fuzz", "--target", "meta"]
    done = subprocess.run([*command, "--executions", "9"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "9 executions over 1 targets, seed 1: 0 found" in done.stdout


def test_parts_come_apart_again() -> None:
    rng = Random(1)
    parts = [rng.randbytes(rng.randrange(40)) for _ in range(5)]
    assert parted(joined(parts), 5) == parts
    assert parted(joined(parts)[:3], 2) == [b"", b""]
