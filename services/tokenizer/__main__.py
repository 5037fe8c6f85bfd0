"""Starts the tokenizer."""

from services.tokenizer.actor import Tokenizer
from shared.actor import run

if __name__ == "__main__":
    run(Tokenizer)
