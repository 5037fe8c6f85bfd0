"""Errors about models; apart from the rest so that who only reports them imports nothing else."""


class ModelError(Exception):
    """Something about a model is wrong; the text is one line for the person who asked for it."""


class BadModel(ModelError, ValueError):
    """A model can't be used; the text names the file, what is wrong in it, and what is known instead."""


class ModelMissing(BadModel):
    """There is no such model on this machine (yet)."""
