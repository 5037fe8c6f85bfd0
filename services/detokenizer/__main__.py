"""`python -m services.detokenizer`."""

from services.detokenizer.actor import Detokenizer
from shared.actor import run


def main() -> None:
    """Its life."""
    run(Detokenizer)


if __name__ == "__main__":
    main()
