"""`python -m services.worker`: the worker of one home."""

import os

from services.worker.actor import Worker
from shared.actor import run

if __name__ == "__main__":
    # Before torch is imported: OpenMP threads that spin between steps would take a core from the other services.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    run(Worker)
