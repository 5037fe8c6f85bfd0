"""`transformers` as the alternative, in a process of its own: `python -m ops.bench.transformers_peer SOURCE THREADS`.

Same weights (dequantised to fp32), its fastest attention (sdpa), its cache on, logits of the last position only.
Requests and answers are JSON lines on stdin and stdout.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from ops.bench.reference_model import build
from shared.model.spec import open_model


class Peer:
    """One loaded model; a cache per call."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.inference_mode()
    def run(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Greedy: seconds to the first token, seconds of the `tokens - 1` after it, and the ids."""
        cache = DynamicCache(config=self.model.config)
        begun = time.perf_counter()
        step = torch.tensor([ids])
        drawn: list[int] = []
        first = 0.0
        for _ in range(tokens):
            logits = self.model(input_ids=step, cache=cache, use_cache=True, logits_to_keep=1).logits
            drawn.append(int(logits[0, -1].argmax()))
            step = torch.tensor([[drawn[-1]]])
            first = first or time.perf_counter() - begun
        return {"ttft_s": first, "decode_s": time.perf_counter() - begun - first, "ids": drawn}


def main() -> None:
    """Serves requests until stdin ends."""
    torch.set_num_threads(int(sys.argv[2]))
    peer = Peer(build(open_model(sys.argv[1], Path("."))))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(peer.run(request["ids"], request["tokens"])), flush=True)


if __name__ == "__main__":
    main()
