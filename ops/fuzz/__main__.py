"""`make fuzz [SECONDS=60] [SEED=1]`, or `python -m ops.fuzz --help`: bent inputs for every decoder, within bounds.

    parent ── job ──► child: one target after the other, under limits ── findings ──► results/fuzz-TARGET-*.bin
       └── watches the slot: a child that dies or stands still is a finding of the input that it names, and the next
           child goes on behind it

Exit code 1 when anything was found. A finding is shown with the command that repeats it.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ops.fuzz import child
from ops.fuzz.target import Target

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 60.0
"""How long one input may take on the clock, whatever the processor does."""
_POLL_S = 0.1
_NONE = (1 << 64) - 1


@dataclass
class Report:
    """Executions and inputs taken by target, and what was found: (target, kind, text, input)."""

    runs: dict[str, tuple[int, int]] = field(default_factory=dict)
    findings: list[tuple[str, str, str, bytes]] = field(default_factory=list)


def fuzz(
    names: Sequence[str] = (),
    *,
    seconds: float = 60.0,
    seed: int = 1,
    most: int = 0,
    modules: Sequence[str] = child.MODULES,
) -> Report:
    """Each of the named targets (all when none is) for its share of `seconds`, or for `most` inputs if not 0."""
    known = {target.name: target for target in child.targets(modules)}
    report = Report()
    first = 0
    rest = list(names or known)
    share = seconds / max(1, len(rest))
    deaths = 0
    with tempfile.TemporaryDirectory() as place:
        slot_path = Path(place) / "slot"
        slot_path.write_bytes(bytes(child.SLOT.size))
        while rest:
            job = {
                "modules": list(modules),
                "names": rest,
                "slot": str(slot_path),
                "seed": seed,
                "first": first,
                "seconds": share,
                "most": most,
            }
            why, finished = _run_child(job, report, known, seed)
            if finished:
                rest, first, deaths = rest[finished:], 0, 0
            if not why:
                break
            index, number, done, taken = _slot(slot_path)
            slot_path.write_bytes(child.SLOT.pack(index, number, done + 1, taken))
            name = rest[0]
            data = b"" if number == _NONE else child.input_of(known[name], seed, number)
            report.findings.append((name, why, f"input {number} ended the process: {why}", data))
            report.runs[name] = (done + 1, taken)
            first, deaths = number + 1, deaths + 1
            if deaths == child.MOST_FINDINGS or number == _NONE:
                rest, first, deaths = rest[1:], 0, 0
    return report


def _run_child(job: dict[str, object], report: Report, known: dict[str, Target], seed: int) -> tuple[str, int]:
    """("" or how the child ended badly, how many targets it finished)."""
    command = [sys.executable, "-m", "ops.fuzz.child", json.dumps(job)]
    finished = 0
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=complaints)
        try:
            why = _watch(process, Path(str(job["slot"])))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        said.seek(0)
        complaints.seek(0)
        for line in said:
            if not line.startswith("{"):
                continue
            news = json.loads(line)
            if "end" in news:
                report.runs[news["target"]] = (news["end"][0], news["end"][1])
                finished += 1
            else:
                data = child.input_of(known[news["target"]], seed, news["number"])
                report.findings.append((news["target"], news["kind"], news["said"], data))
        if why:
            why += "".join(f"; {line.strip()}" for line in complaints.read().splitlines()[-1:])
    return why, finished


def _slot(path: Path) -> tuple[int, int, int, int]:
    index, number, done, taken = child.SLOT.unpack(path.read_bytes())
    return index, number, done, taken


def _watch(process: "subprocess.Popen[bytes]", slot: Path) -> str:
    """Until it ends: "" when well, else why; a child that stands still at one input is killed."""
    before, since = _slot(slot), time.monotonic()
    while True:
        try:
            code = process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            now = _slot(slot)
            if now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > HANG_S:
                process.kill()
                process.wait()
                return f"stood still for {HANG_S:.0f} s"
            continue
        return "" if code == 0 else f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def show(report: Report, seed: int) -> None:
    """Executions of each target; each finding with its input and how to repeat it."""
    for name, (done, taken) in report.runs.items():
        print(f"{name:16} {done:9,} executions, {taken:9,} of them taken")
    results = ROOT / "results"
    for name, kind, text, data in report.findings:
        results.mkdir(exist_ok=True)
        path = results / f"fuzz-{name}-{hashlib.sha256(data).hexdigest()[:12]}.bin"
        path.write_bytes(data)
        print(f"\nFOUND in {name}: {kind}\n{text}")
        print(f"input, {len(data)} bytes: {data[:512].hex()}{'...' if len(data) > 512 else ''}")
        print(f"repeat: {sys.executable} -m ops.fuzz --target {name} --input {path.relative_to(ROOT)}")
    total = sum(done for done, _ in report.runs.values())
    print(f"{total:,} executions over {len(report.runs)} targets, seed {seed}: {len(report.findings)} found")


def repeat(target: Target, data: bytes) -> int:
    """Runs one input here, under the limits, with its traceback; the exit code."""
    child.arm()
    child.run_one(target, child.input_of(target, 0, 0))
    child.limit(target.memory)
    print("taken" if child.run_one(target, data) else "refused, as documented")
    return 0


def main() -> int:
    """The exit code: 0 nothing found, 1 something."""
    every = {target.name: target for target in child.targets()}
    parser = argparse.ArgumentParser(prog="python -m ops.fuzz", description="Bent inputs for every decoder.")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--executions", type=int, default=0, help="inputs of each target, instead of a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--target", action="append", default=[], choices=list(every), help="only this one; may be repeated"
    )
    parser.add_argument("--input", type=Path, help="run this one input of --target, here, and show what happens")
    arguments = parser.parse_args()
    chosen = arguments.target or list(every)
    if arguments.input is not None:
        if len(chosen) != 1:
            parser.error("--input needs one --target")
        return repeat(every[chosen[0]], arguments.input.read_bytes())
    most = arguments.executions
    report = fuzz(chosen, seconds=arguments.seconds, seed=arguments.seed, most=most)
    show(report, arguments.seed)
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
