"""Recorded plans through the same runner in one process: what the services add. `python -m ops.bench.replay FILE`.

Prints seconds of all steps but the first as JSON (the first pays for warming up, on both sides).
"""

import json
import sys
import time
from pathlib import Path

from services.worker.loading import load_runner
from services.worker.openmp import settle_openmp
from services.worker.page_store import PageStore
from services.worker.recorder import recorded
from services.worker.steps import Steps
from shared.config import load_config
from shared.faults import Faults
from shared.paths import Places, default_home


def main() -> None:
    """Replays every plan of the file, in order, as fast as the runner goes."""
    settle_openmp()
    config = load_config()
    runner = load_runner(config, Places(default_home()), lambda what, share: None)
    pool = PageStore(runner.facts.blocks, runner.facts.block_bytes)
    pool.blocks[:] = 0
    steps = Steps(runner, pool, Faults(config.faults))
    plans = list(recorded(Path(sys.argv[1])))
    skip = int(sys.argv[2])
    for plan in plans[:skip]:
        steps.execute(plan, lambda: True)
    begun = time.perf_counter()
    for plan in plans[skip:]:
        steps.execute(plan, lambda: True)
    print(json.dumps({"seconds": time.perf_counter() - begun, "plans": len(plans) - skip}))


if __name__ == "__main__":
    main()
