"""The real model for tests: fetched once per machine, through the very code that users' machines run."""

import functools
import os
from pathlib import Path

from ops.models import pull

NAME = "smollm2-135m-instruct"


def smollm2_dir() -> Path:
    """Models directory that all test runs share: PERDURE_TEST_MODELS, else in the user's cache."""
    given = os.environ.get("PERDURE_TEST_MODELS")
    return Path(given) if given else Path.home() / ".cache" / "perdure-tests" / "models"


@functools.cache
def smollm2_path() -> Path:
    """The SmolLM2 GGUF file; a stack of a test takes it as `model.source`, or NAME with `model.dir = smollm2_dir()`."""
    return pull(NAME, smollm2_dir())
