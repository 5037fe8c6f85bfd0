"""Prompts of the measurements: real text of the project's own, of an exact length, never the same twice."""

from pathlib import Path

from ops.prompts import passage
from shared.model.spec import open_model

CHARACTERS_A_TOKEN = 6
"""More than any of our texts has, so that a passage is long enough before it is cut."""


class Prompts:
    """Of one model's tokenizer."""

    def __init__(self, source: str, seed: int = 1000) -> None:
        self._tokenizer = open_model(source, Path()).tokenizer()
        self._seed = seed

    def encode(self, text: str) -> list[int]:
        """Ids without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
        return str(self._tokenizer.decode(ids))

    def fresh(self, tokens: int) -> list[int]:
        """A prompt that no request had before, of exactly `tokens` tokens."""
        self._seed += 1
        return self.encode(passage(self._seed, tokens * CHARACTERS_A_TOKEN))[:tokens]
