"""Which runner serves `model.source`. Imports kernels only for a model that needs them."""

from collections.abc import Callable

from services.worker.runner import Runner
from services.worker.toy_runner import ToyRunner
from shared.config import Config
from shared.paths import Places

TOY = "toy:"
Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0 to 1."""


def load_runner(config: Config, places: Places, progress: Progress) -> Runner:
    """Loads the configured model; blocking, for the compute lane. ConfigError (a ValueError) when it is refused."""
    if config.model.source.startswith(TOY):
        return ToyRunner(config)
    progress("loading the kernels", 0.0)
    from services.worker.model_runner import ModelRunner

    return ModelRunner(config, places, progress)
