"""A GGUF file of each weight format through the runner: the bits of its dequantised F32 twin, packed or mapped."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from services.worker.model_runner import ModelRunner
from services.worker.page_store import PageStore
from shared.config import Config, KVConfig, ModelConfig
from shared.messages.base import pack_u32
from shared.messages.engine import Row, SampleSpec
from shared.model.gguf_header import KINDS
from shared.paths import Places
from tests.tiny_models import Tiny, dequantised, split_gguf, train_vocabulary, write_gguf

TINY = Tiny(hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=256)
VOCABULARY = train_vocabulary()
LIKE_Q4_K_M = {"v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K"}
GREEDY = SampleSpec()
BLOCKS = 4


def runner_of(file: Path, home: Path, backend: str = "cpu") -> ModelRunner:
    config = Config(
        model=ModelConfig(source=str(file), threads=2, backend=backend),
        kv=KVConfig(pool_bytes=16 << 20, block_tokens=16, dtype="fp32"),
    )
    return ModelRunner(config, Places(home))


def continued(runner: ModelRunner, prompt: list[int], tokens: int) -> tuple[list[int], bytes, np.ndarray]:
    """Greedy ids, all bits of KV and the last logits; the prompt in two chunks."""
    pool = PageStore(BLOCKS, runner.facts.block_bytes)
    table = pack_u32(list(range(BLOCKS)))
    ids, done = list(prompt), 0
    for end in (len(prompt) // 2, *range(len(prompt), len(prompt) + tokens)):
        (output,) = runner.step([Row(1, done, pack_u32(ids[done:end]), table, GREEDY)], pool).rows
        assert output.error is None
        assert output.logits is not None
        done = end
        if end == len(ids):
            ids.append(int(output.logits.argmax()))
    return ids[len(prompt) :], bytes(pool.memory), output.logits.copy()


def files(kind: str, kinds: Mapping[str, str], folder: Path) -> tuple[Path, Path]:
    """The model in `kind` and, of its dequantised weights, in F32."""
    tensors = TINY.tensors()
    return (
        write_gguf(folder / "m.gguf", TINY, tensors, kind=kind, kinds=kinds, vocabulary=VOCABULARY),
        write_gguf(folder / "twin.gguf", TINY, dequantised(TINY, tensors, kind, kinds), vocabulary=VOCABULARY),
    )


@pytest.mark.parametrize(("kind", "kinds"), [*((kind, {}) for kind in KINDS if kind != "F32"), ("Q4_K", LIKE_Q4_K_M)])
def test_each_format_gives_the_bits_of_its_f32_twin(kind: str, kinds: Mapping[str, str], tmp_path: Path) -> None:
    file, twin = files(kind, kinds, tmp_path)
    prompt = [(37 * n) % 400 for n in range(33)]
    ids, kv, logits = continued(runner_of(twin, tmp_path / "home"), prompt, 8)
    for _ in ("packed", "mapped"):
        found_ids, found_kv, found_logits = continued(runner_of(file, tmp_path / "home"), prompt, 8)
        assert found_ids == ids
        assert found_logits.tobytes() == logits.tobytes()
        assert found_kv == kv


@pytest.mark.parametrize(("kind", "kinds"), [("Q4_K", LIKE_Q4_K_M), ("Q2_K", {}), ("IQ4_NL", {})])
def test_the_reference_backend_reads_them_too(kind: str, kinds: Mapping[str, str], tmp_path: Path) -> None:
    file, _ = files(kind, kinds, tmp_path)
    prompt = [(11 * n) % 400 for n in range(20)]
    _, _, logits = continued(runner_of(file, tmp_path / "home"), prompt, 1)
    _, _, reference = continued(runner_of(file, tmp_path / "home", "reference"), prompt, 1)
    np.testing.assert_allclose(logits, reference, rtol=1e-4, atol=1e-4)


def test_shards_are_served_as_one_file_is(tmp_path: Path) -> None:
    file, _ = files("Q4_K", LIKE_Q4_K_M, tmp_path)
    prompt = [(7 * n) % 400 for n in range(20)]
    whole = runner_of(file, tmp_path / "home")
    split = runner_of(split_gguf(file, 3)[0], tmp_path / "home")
    assert split.facts.fingerprint == whole.facts.fingerprint
    assert continued(split, prompt, 4)[:2] == continued(whole, prompt, 4)[:2]
