"""What the benchmark reads: start-up times from a log, a disk's rate from sparse files, plots from a run's JSON."""

import json
import os
from pathlib import Path

import pytest

from ops.bench.direct_reads import PIECE, _data, direct_rate
from ops.bench.plots import plots
from ops.bench.startup import worker_starts


def test_a_workers_start_is_from_its_supervisor_to_its_ready() -> None:
    lines = [
        {"role": "supervise", "service": "store", "event": "started", "timestamp": "2026-01-01T00:00:01.000000Z"},
        {"role": "supervise", "service": "worker", "event": "started", "timestamp": "2026-01-01T00:00:02.000000Z"},
        {"role": "store", "event": "ready", "timestamp": "2026-01-01T00:00:02.100000Z"},
        {"role": "worker", "event": "ready", "seconds": 0.4, "timestamp": "2026-01-01T00:00:02.500000Z"},
        {"role": "supervise", "service": "worker", "event": "started", "timestamp": "2026-01-01T00:00:09.000000Z"},
        {"role": "worker", "event": "ready", "seconds": 0.2, "timestamp": "2026-01-01T00:00:09.250000Z"},
    ]
    log = "12:00:00 system | {not json}\n" + "\n".join(f"12:00:00 x.1 | {json.dumps(line)}" for line in lines)
    assert worker_starts(log) == pytest.approx([0.5, 0.25])


def test_only_what_is_written_is_read(tmp_path: Path) -> None:
    sparse = tmp_path / "a.seg"
    with sparse.open("wb") as file:
        file.truncate(16 * PIECE)
        os.pwrite(file.fileno(), os.urandom(2 * PIECE), 4 * PIECE)
    with sparse.open("rb") as file:
        assert _data(file.fileno()) == [4 * PIECE, 5 * PIECE]
    assert direct_rate(tmp_path) > 0


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nothing to read"):
        direct_rate(tmp_path)


def test_plots_are_drawn_of_what_a_run_has(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    spread = {"median": 1.0, "low": 0.9, "high": 1.1, "runs": 5}
    figures = {
        "compared": {"ours": spread, "theirs": spread, "ratio": 1.0, "bar": "<= 1"},
        "alone": {"ours": spread, "theirs": None, "ratio": 1.0, "bar": "none"},
    }
    engines = {"ours": spread, "other": spread}
    run = {
        "facts": {"commit": "abc", "cores": 2},
        "figures": figures,
        "steps": {"decode 1": {"kernels: products": 0.01, "engine: plan": 0.001}},
        "rows": {"cold": {"unit": "s", "more_is_better": False, "engines": engines}},
    }
    path = tmp_path / "bench-abc.json"
    path.write_text(json.dumps(run))
    assert [each.name for each in plots(path)] == ["figures-abc.png", "steps-abc.png", "peers-abc.png"]
    assert all(each.read_bytes().startswith(b"\x89PNG") for each in plots(path))
    path.write_text(json.dumps(run | {"figures": {}, "steps": None, "rows": {}}))
    assert plots(path) == []
