"""Architecture name -> family. What is not here is refused before its weights are read."""

from services.worker.models.decoder import LayerType
from services.worker.models.llama import LlamaLayer
from services.worker.models.qwen3 import Qwen3Layer

FAMILIES: dict[str, LayerType] = {"llama": LlamaLayer, "qwen3": Qwen3Layer}
