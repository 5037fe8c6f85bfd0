"""`python -m services.worker`: the worker of one home."""

import os

from services.worker.actor import Worker
from shared.actor import run

if __name__ == "__main__":
    # Before torch is imported. OpenMP threads that spin at a barrier while another process needs their core made a
    # decode step of SmolLM2 10 times slower (two cores, load 10; 2-3 times with a spin of 1,000).
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    run(Worker)
