"""`python -m services.store`."""

from services.store.actor import Store
from shared.actor import run


def main() -> None:
    """Its life."""
    run(Store)


if __name__ == "__main__":
    main()
