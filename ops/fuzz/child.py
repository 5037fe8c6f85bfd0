"""The process that runs targets under limits: address space, processor time an input, file size. It may die.

Before each input it writes to the slot (a small mapped file that its parent reads) which one it is; the input itself
can be made again from seed, target and number. Findings that Python sees go to stdout, a line of JSON each.
"""

import importlib
import json
import mmap
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from types import FrameType

from ops.fuzz.target import Target

MODULES = tuple(f"ops.fuzz.{name}" for name in ("wire", "journal", "store", "models", "templates", "home", "keys"))
SLOT = struct.Struct("<IQQQ")
"""Index of the target, number of the input, executions of this target, those of them that were taken."""

MOST_FINDINGS = 5
"""Kinds of finding after which a target is given up: it is broken, more inputs say no more."""
_TMP = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class TooSlow(BaseException):
    """One input took more processor time than its target allows."""


def targets(modules: Sequence[str] = MODULES) -> list[Target]:
    """All of them, in order."""
    return [target for module in modules for target in importlib.import_module(module).TARGETS]


def inputs(target: Target, seed: int, first: int = 0) -> Iterator[tuple[int, bytes]]:
    """(number, input) without end: the seeds as they are, then bent ones."""
    seeds = target.seeds(Random(f"{seed}/{target.name}"))
    number = first
    while True:
        if number < len(seeds):
            yield number, seeds[number]
        else:
            rng = Random(f"{seed}/{target.name}/{number}")
            yield number, target.bend(rng.choice(seeds), rng, seeds)
        number += 1


def input_of(target: Target, seed: int, number: int) -> bytes:
    """The same input again."""
    return next(inputs(target, seed, number))[1]


def run_one(target: Target, data: bytes) -> bool:
    """Whether it was taken; what it raises is a finding. TooSlow after the target's processor time."""
    place = Path(tempfile.mkdtemp(prefix="perdure-fuzz-", dir=_TMP))
    signal.setitimer(signal.ITIMER_PROF, target.cpu_s)
    try:
        return target.check(data, place)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        shutil.rmtree(place, ignore_errors=True)


def limit(memory: int) -> None:
    """What we have mapped, and `memory` bytes more; files of at most 64 MiB; no core files."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + memory, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def unlimit() -> None:
    """Room again, for the imports of the next target."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _too_slow(_: int, __: FrameType | None) -> None:
    raise TooSlow


def arm() -> None:
    """From now on a spent timer raises TooSlow."""
    signal.signal(signal.SIGPROF, _too_slow)


def where(error: BaseException) -> str:
    """What tells one finding from another: the error's type and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/ops/fuzz/" not in frame.filename] or list(frames)
    last = ours[-1]
    return f"{type(error).__name__} in {Path(last.filename).name}:{last.name}:{last.lineno}"


def fuzz(target: Target, index: int, slot: mmap.mmap, seed: int, first: int, ends: float, most: int) -> None:
    """One target until the clock says `ends` (monotonic seconds), or after `most` inputs (0: no such end)."""
    done, taken = (SLOT.unpack_from(slot)[2:]) if first else (0, 0)
    seen: set[str] = set()
    run_one(target, input_of(target, seed, 0))  # what it imports at its first call is not the input's memory
    limit(target.memory)
    for number, data in inputs(target, seed, first):
        if (most and number >= most) or (not most and time.monotonic() >= ends) or len(seen) >= MOST_FINDINGS:
            break
        SLOT.pack_into(slot, 0, index, number, done, taken)
        try:
            taken += run_one(target, data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            kind = where(error)
            if kind not in seen:
                seen.add(kind)
                said = "".join(traceback.format_exception(error))[-4000:]
                print(json.dumps({"target": target.name, "number": number, "kind": kind, "said": said}), flush=True)
        done += 1
    SLOT.pack_into(slot, 0, index, (1 << 64) - 1, done, taken)
    unlimit()


def main(job: dict[str, float | int | str | list[str]]) -> None:
    """`job`: modules, names, slot, seed, first (input of the first target to begin with), seconds (each), most."""
    arm()
    modules, names = job["modules"], job["names"]
    assert isinstance(modules, list)
    assert isinstance(names, list)
    every = {target.name: target for target in targets(modules)}
    order = list(every)
    fd = os.open(str(job["slot"]), os.O_RDWR)
    slot = mmap.mmap(fd, SLOT.size)
    os.close(fd)
    first = int(str(job["first"]))
    for name in names:
        ends = time.monotonic() + float(str(job["seconds"]))
        fuzz(every[name], order.index(name), slot, int(str(job["seed"])), first, ends, int(str(job["most"])))
        print(json.dumps({"target": name, "end": list(SLOT.unpack_from(slot)[2:])}), flush=True)
        first = 0


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
