"""Starts the detokenizer."""

from services.detokenizer.actor import Detokenizer
from shared.actor import run

if __name__ == "__main__":
    run(Detokenizer)
