"""`python -m services.worker`: the worker of one home."""

from services.worker.actor import Worker
from services.worker.openmp import settle_openmp
from shared.actor import run

if __name__ == "__main__":
    settle_openmp()
    run(Worker)
