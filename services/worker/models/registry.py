"""Architecture name -> family. What is not here is refused before its weights are read."""

from collections.abc import Callable

from services.worker.models.layers import LayerBuilder
from services.worker.models.llama import llama
from services.worker.models.qwen3 import qwen3

Family = Callable[[LayerBuilder], None]
"""Adds one layer of a model to its program."""

FAMILIES: dict[str, Family] = {"llama": llama, "qwen3": qwen3}
