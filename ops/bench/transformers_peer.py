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
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from shared.model.spec import ModelSource, open_model

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def build(source: ModelSource) -> Any:
    """A LlamaForCausalLM with the source's weights in fp32."""
    spec = source.spec
    settings: dict[str, Any] = {"attn_implementation": "sdpa"}
    config = LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_context,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=spec.tied,
        **settings,
    )
    model: Any = LlamaForCausalLM(config)
    model.eval()
    weights = {renamed(name): torch.from_numpy(tensor.fp32()) for name, tensor in source.tensors().items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def renamed(name: str) -> str:
    """Our canonical name -> the name in transformers."""
    if name == "embed":
        return "model.embed_tokens.weight"
    if name in ("norm", "lm_head"):
        return "model.norm.weight" if name == "norm" else "lm_head.weight"
    _, layer, tensor = name.split(".")
    return f"model.layers.{layer}.{NAMES[tensor]}.weight"


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
