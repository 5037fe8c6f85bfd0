"""Models that Perdure knows by name: where they come from, fetching them once, and checking what lies there."""

from ops.models.download import PullError, model_path, present, pull, verify
from ops.models.registry import MODELS, KnownModel, known

__all__ = ["MODELS", "KnownModel", "PullError", "known", "model_path", "present", "pull", "verify"]
