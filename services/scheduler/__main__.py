"""`python -m services.scheduler`."""

from services.scheduler.actor import Scheduler
from shared.actor import run


def main() -> None:
    """Its life."""
    run(Scheduler)


if __name__ == "__main__":
    main()
