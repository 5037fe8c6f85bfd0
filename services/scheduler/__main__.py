"""Starts the scheduler."""

from services.scheduler.actor import Scheduler
from shared.actor import run

if __name__ == "__main__":
    run(Scheduler)
