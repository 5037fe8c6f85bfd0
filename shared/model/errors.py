"""Errors about models; apart from the rest so that who only reports them imports nothing else."""

MAX_TEXT = 600
"""Characters of an error: names in damaged files may be as long as they like."""


class ModelError(Exception):
    """Something about a model is wrong; the text is one line for the person who asked for it."""

    def __init__(self, text: str) -> None:
        line = " ".join(text.split("\n"))
        line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line[:MAX_TEXT])
        super().__init__(line + ("..." if len(text) > MAX_TEXT else ""))


class BadModel(ModelError, ValueError):
    """A model can't be used; the text names the file, what is wrong in it, and what is known instead."""


class ModelMissing(BadModel):
    """There is no such model on this machine (yet)."""
