"""`python -m services.tokenizer`."""

from services.tokenizer.actor import Tokenizer
from shared.actor import run


def main() -> None:
    """Its life."""
    run(Tokenizer)


if __name__ == "__main__":
    main()
