"""Activations of 8 bits through the whole runner: equal bits however a request is served, and KV of their own."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.model_runner import ModelRunner
from services.worker.page_store import PageStore
from shared.config import Config, ConfigError, KVConfig, ModelConfig
from shared.messages.base import pack_u32
from shared.messages.engine import Row, SampleSpec
from shared.paths import Places
from tests.tiny_models import Tiny, write_gguf

KINDS = ("Q4_1", "Q8_0")
TINY = Tiny(tied=True)
BLOCK = 16
LENGTHS = (5, 40, 130)
GREEDY = SampleSpec()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8")
    for kind in (*KINDS, "F16"):
        write_gguf(folder / f"{kind}.gguf", TINY, TINY.tensors(), kind=kind)
    return folder


def runner_of(folder: Path, kind: str, activations: str = "int8", threads: int = 1) -> ModelRunner:
    source = str(folder / f"{kind}.gguf")
    model = ModelConfig(source=source, threads=threads, backend="cpu", activations=activations)
    return ModelRunner(
        Config(model=model, kv=KVConfig(pool_bytes=1 << 20, block_tokens=BLOCK)), Places(folder / "home")
    )


class Served:
    """Prompts fed to a runner, whose pool is poisoned: ids, the bits of the last logits, the KV, of each prompt."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        self.runner, self.random = runner, random.Random(seed)
        self.pool = PageStore(runner.facts.blocks, runner.facts.block_bytes)
        for block in range(self.pool.nblocks):
            self.pool.poison(block)
        self.free = self.random.sample(range(self.pool.nblocks), self.pool.nblocks)
        self.prompts = [list(np.random.default_rng(n).integers(0, TINY.vocab, n)) for n in LENGTHS]
        self.tables = [[self.free.pop() for _ in range(-(-n // BLOCK))] for n in LENGTHS]
        self.done = [0] * len(LENGTHS)
        self.logits: list[list[bytes]] = [[b""] * n for n in LENGTHS]

    def rows(self, chunks: tuple[int, ...]) -> Iterator[tuple[int, Row]]:
        """The next step: of some prompts the next few tokens, drawn from `chunks`."""
        for key, ids in enumerate(self.prompts):
            start = self.done[key]
            count = min(self.random.choice(chunks), len(ids) - start)
            if count:
                self.done[key] = start + count
                part = pack_u32(ids[start : start + count])
                yield key, Row(key, start, part, pack_u32(self.tables[key]), GREEDY)

    def serve(self, chunks: tuple[int, ...]) -> "Served":
        """To the end of all prompts."""
        while any(self.done[key] < n for key, n in enumerate(LENGTHS)):
            if step := list(self.rows(chunks)):
                outputs = self.runner.step([row for _, row in step], self.pool).rows
                for (key, _), output in zip(step, outputs, strict=True):
                    assert output.logits is not None
                    self.logits[key][self.done[key] - 1] = output.logits.tobytes()
        return self

    def kv(self, key: int) -> bytes:
        """Of a prompt's full blocks."""
        full = self.tables[key][: LENGTHS[key] // BLOCK]
        return b"".join(bytes(self.pool.blocks[block]) for block in full)


@pytest.mark.parametrize("kind", KINDS)
@given(threads=st.integers(1, 3), seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bit_depends_on_chunks_company_blocks_or_threads(folder: Path, kind: str, threads: int, seed: int) -> None:
    each = Served(runner_of(folder, kind), 1).serve((1,))  # logits at every token
    other = Served(runner_of(folder, kind, threads=threads), seed).serve((0, 1, 1, 3, 16, 50, 200))
    for key in range(len(LENGTHS)):
        known = [(mine, theirs) for mine, theirs in zip(other.logits[key], each.logits[key], strict=True) if mine]
        assert known
        assert all(mine == theirs for mine, theirs in known)
        assert other.kv(key) == each.kv(key)


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_near_those_of_fp32_and_not_the_same(folder: Path, kind: str) -> None:
    exact, rounded = (Served(runner_of(folder, kind, one), 1).serve((200,)) for one in ("fp32", "int8"))
    for mine, theirs in zip(rounded.logits, exact.logits, strict=True):
        a, b = np.frombuffer(mine[-1], np.float32), np.frombuffer(theirs[-1], np.float32)
        off = np.abs(a - b).max()
        assert 0 < off < 0.1 * np.abs(b).max()


def test_their_kv_never_counts_as_that_of_fp32(folder: Path) -> None:
    one, other = (runner_of(folder, "Q8_0", activations) for activations in ("fp32", "int8"))
    assert one.facts.fingerprint != other.facts.fingerprint
    assert one.facts.fingerprint == runner_of(folder, "Q8_0", "fp32").facts.fingerprint
    assert (one.ready.numerics, other.ready.numerics) == ("cpu-1", "cpu-1/int8-1")
    assert other.exact


def test_a_file_that_has_no_use_for_them_is_refused_in_words(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"takes weights in .*Q4_0, Q4_1.*; this file's are F16: take fp32, or"):
        runner_of(folder, "F16")
