"""How soon everything is there: a worker from its start to ready, the same after `kill -9`, a stack to its first token.

Beside each stands a bare `import torch` of the same round, which a naive start would pay for. The worker's times are
those of the log: from the supervisor's `started` to the worker's `ready`.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from ops.bench.measure import Spread, timed
from ops.client import connected
from ops.stack import Stack

MORE_READY_S, MORE_TOKEN_S, RESTART_S = 0.5, 1.5, 0.6

Fresh = Callable[[int], list[int]]
Note = Callable[[str, Spread, Spread | None, float, str], None]


def worker_starts(log: str) -> list[float]:
    """Seconds from `started` to `ready` of each worker of a stack's log."""
    found, begun = [], 0.0
    for text in re.findall(r"\{.*\}", log):
        try:
            line: dict[str, Any] = json.loads(text)
        except ValueError:  # a line of something else
            continue
        if line.get("event") == "started" and line.get("service") == "worker":
            begun = _moment(line)
        elif line.get("event") == "ready" and line.get("role") == "worker" and begun:
            found.append(_moment(line) - begun)
            begun = 0.0
    return found


def _moment(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp()


def import_torch() -> float:
    """Seconds of a process that does nothing else."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begun


async def startup(settings: dict[str, str], fresh: Fresh, note: Note, rounds: int) -> None:
    """On a stack of its own, whose first start, which may have weights to pack, is not counted."""
    bare, ready, again, token = list[float](), list[float](), list[float](), list[float]()
    with Stack(settings) as stack:
        await stack.start()
        for _ in range(rounds):
            await stack.stop()
            bare.append(import_torch())
            begun = time.perf_counter()
            stack.launch()
            async with connected(stack.places) as client:
                first = await timed(client, fresh(16), 1)
                token.append(time.perf_counter() - begun - (first.total_s - first.ttft_s))
            await stack.wait_serving()
            ready.append(worker_starts(stack.log_path.read_text())[-1])
            stack.kill("worker")
            await stack.wait_serving()
            again.append(worker_starts(stack.log_path.read_text())[-1])
    torch = Spread.of(bare)
    for name, values, more in (
        ("worker, start to ready", ready, MORE_READY_S),
        ("serve to first token", token, MORE_TOKEN_S),
    ):
        ours = Spread.of(values)
        bar = f"<= alternative + {more}"
        note(f"{name}, s (alternative: a bare import of torch)", ours, torch, ours.median - torch.median, bar)
    ours = Spread.of(again)
    note("worker after kill -9, start to ready, s", ours, None, ours.median, f"<= {RESTART_S}")
