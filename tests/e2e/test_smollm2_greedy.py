"""SmolLM2 against the reference implementation: 20 prompts of 10 to 2,000 tokens, 64 greedy ids each.

The reference is asked by teacher forcing: one pass over prompt + our ids gives its choice at every position, and all
its choices equal ours if and only if its own greedy run gives the same ids. That takes a minute instead of ten.
"""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from ops.bench.reference_model import build
from ops.prompts import corpus
from services.worker.model_runner import ModelRunner
from services.worker.page_store import PageStore
from shared.config import Config, KVConfig, ModelConfig
from shared.messages.base import pack_u32
from shared.messages.engine import Row, SampleSpec
from shared.model.prompt import encode
from shared.model.spec import ModelSource, open_model
from shared.paths import Places
from tests.models import smollm2_path

LENGTHS = (10, 12, 15, 17, 20, 25, 31, 32, 33, 48, 64, 90, 128, 180, 256, 400, 512, 800, 1300, 2000)
NEW = 64
CHUNK = 512
GREEDY = SampleSpec()


def prompts(source: ModelSource) -> list[list[int]]:
    ids = encode(source.tokenizer(), source.spec, "\n\n".join(corpus()))
    rng = random.Random(20)
    starts = [rng.randrange(len(ids) - length) for length in LENGTHS]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


def generate(runner: ModelRunner, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy ids of all prompts: prefilled in chunks, decoded together, block tables scattered over a poisoned pool."""
    pool = PageStore(runner.facts.blocks, runner.facts.block_bytes)
    for block in range(pool.nblocks):
        pool.poison(block)
    free = random.Random(1).sample(range(pool.nblocks), pool.nblocks)
    block_tokens = runner.facts.block_tokens
    tables = [pack_u32([free.pop() for _ in range(-(-(len(p) + NEW) // block_tokens))]) for p in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]

    def feed(keys: list[int], starts: list[int], ids: list[list[int]], *, sample: bool = True) -> None:
        rows = [
            Row(key, start, pack_u32(part), tables[key], GREEDY if sample else None)
            for key, start, part in zip(keys, starts, ids, strict=True)
        ]
        for key, output in zip(keys, runner.step(rows, pool).rows, strict=True):
            assert output.error is None
            if sample:
                assert output.logits is not None
                outputs[key].append(int(np.argmax(output.logits)))

    for key, prompt in enumerate(prompts):
        for start in range(0, len(prompt), CHUNK):
            part = prompt[start : start + CHUNK]
            feed([key], [start], [part], sample=start + len(part) == len(prompt))
    keys = list(range(len(prompts)))
    for done in range(1, NEW):
        feed(keys, [len(p) + done - 1 for p in prompts], [[out[-1]] for out in outputs])
    return outputs


@pytest.mark.slow
def test_20_prompts_give_the_64_greedy_ids_of_the_reference(tmp_path: Path) -> None:
    path = smollm2_path()
    config = Config(model=ModelConfig(source=str(path), threads=2), kv=KVConfig(pool_bytes=500 << 20, dtype="fp32"))
    places = Places(tmp_path)
    source = open_model(str(path), places.models())
    asked = prompts(source)
    ours = generate(ModelRunner(config, places), asked)
    reference = build(source)
    for prompt, ids in zip(asked, ours, strict=True):
        assert len(ids) == NEW
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + ids[:-1]]), logits_to_keep=NEW).logits[0]
        choices = logits.argmax(-1).tolist()
        top = logits.topk(2).values
        gaps = (top[:, 0] - top[:, 1]).tolist()
        assert ids == choices, f"prompt of {len(prompt)}; the reference's leads over its second choice: {gaps}"
