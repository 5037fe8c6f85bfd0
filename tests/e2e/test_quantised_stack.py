"""Prompts through the whole stack, on a model as people have them: K-quants of two kinds, in several files."""

import random
from pathlib import Path

from tests.e2e.kit import BLOCK, Watched, client_of
from tests.e2e.test_cases_model import answer, at_once, hits, ids_of, served
from tests.tiny_models import Tiny, dequantised, split_gguf, train_vocabulary, write_gguf

TINY = Tiny(hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=256, max_context=1024)
KINDS = {"v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K"}


async def test_k_quants_in_shards_answer_as_their_fp32_twin_cold_cached_and_at_once(tmp_path: Path) -> None:
    tensors, vocabulary = TINY.tensors(), train_vocabulary()
    file = write_gguf(tmp_path / "m.gguf", TINY, tensors, kind="Q4_K", kinds=KINDS, vocabulary=vocabulary)
    twin = write_gguf(tmp_path / "twin.gguf", TINY, dequantised(TINY, tensors, "Q4_K", KINDS), vocabulary=vocabulary)
    rng = random.Random(4)
    stem = ids_of(rng, 4 * BLOCK)
    prompts = [stem + ids_of(rng, 5 + 9 * n) for n in range(5)]
    with Watched(served(twin)) as made:
        await made.start()
        async with client_of(made) as client:
            expected = [await answer(client, prompt, 16, no_read=True) for prompt in prompts]
    with Watched(served(split_gguf(file, 2)[1])) as made:
        await made.start()
        async with client_of(made) as client:
            cold = [await answer(client, prompt, 16, no_read=True) for prompt in prompts]
            cached = await at_once(client, prompts, 16)
        assert not made.complaints()
    assert all(hits(result) >= 4 * BLOCK for result in cached)
    for wanted, *found in zip(expected, cold, cached, strict=True):
        for result in found:
            assert (result.ids, result.text, result.logprobs) == (wanted.ids, wanted.text, wanted.logprobs)
