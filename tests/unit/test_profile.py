"""Sizing of the pool: refusals with numbers before the weights load, clamps with one warning, what a step takes."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.cpu.backend import Cpu
from kernels.reference.backend import Reference
from services.worker import model_runner
from services.worker.model_runner import ModelRunner
from services.worker.models.decoder import decoder
from services.worker.profile import RESERVE_LEAST, Demand, size_pool
from shared.config import Config, ConfigError, FaultsConfig, KVConfig, ModelConfig
from shared.kv import KVLayout
from shared.machine import available_memory, memory_headroom, paid_cores, usable_cores
from shared.model.spec import open_model
from shared.paths import Places
from tests.hf_tiny import TinyModel, make_tiny

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim_k=8, head_dim_v=8, dtype="fp32", block_tokens=16)
BLOCK = LAYOUT.block_bytes
GIB = 1 << 30
DEMAND = Demand(weights=2 * GIB, step=1 * GIB)


def config(pool_bytes: int, **faults: int) -> Config:
    return Config(kv=KVConfig(pool_bytes=pool_bytes), faults=FaultsConfig(**faults))


def test_a_pool_that_fits_gets_what_was_asked_for_in_whole_blocks() -> None:
    size = size_pool(config(10 * BLOCK + 5), LAYOUT, DEMAND, 100 * GIB)
    assert (size.blocks, size.warning) == (10, "")
    assert size_pool(config(BLOCK), LAYOUT, DEMAND, 100 * GIB).blocks == 1


@pytest.mark.parametrize("asked", [0, 1, BLOCK - 1])
def test_z01_a_budget_below_one_block_is_refused_with_both_numbers(asked: int) -> None:
    with pytest.raises(ConfigError, match=f"kv.pool_bytes is {asked:,};.*takes {BLOCK:,} bytes"):
        size_pool(config(asked), LAYOUT, DEMAND, 100 * GIB)


def test_z01_a_budget_beyond_memory_is_clamped_with_one_warning() -> None:
    size = size_pool(config(1000 * GIB), LAYOUT, DEMAND, 10 * GIB)
    left = 10 * GIB - 3 * GIB - GIB // 2  # weights and step, reserve
    assert left - BLOCK < size.blocks * BLOCK <= left
    assert f"{1000 * GIB:,}" in size.warning
    assert f"{size.blocks * BLOCK:,}" in size.warning


def test_z01_no_memory_for_one_block_is_refused_with_what_is_free_and_needed() -> None:
    free = 3 * GIB + RESERVE_LEAST + BLOCK // 2
    with pytest.raises(
        ConfigError, match=f"{free:,} bytes of memory are free, weights take {2 * GIB:,}.*needs {BLOCK:,}"
    ):
        size_pool(config(GIB), LAYOUT, DEMAND, free)


def test_a_model_larger_than_memory_is_refused_with_both_numbers() -> None:
    weights = f"{2 * GIB:,}"
    for free in (GIB, 2 * GIB - 1):
        with pytest.raises(
            ConfigError, match=rf"larger than memory: its weights take {weights} bytes .* {free:,} bytes"
        ):
            size_pool(config(BLOCK), LAYOUT, Demand(2 * GIB, 0), free)
    assert size_pool(config(BLOCK), LAYOUT, Demand(2 * GIB, 0), 2 * GIB + 2 * RESERVE_LEAST).blocks == 1


def test_loaded_weights_are_not_counted_twice() -> None:
    loaded = replace(DEMAND, loaded=True)
    assert size_pool(config(GIB), LAYOUT, loaded, 3 * GIB).blocks == GIB // BLOCK
    with pytest.raises(ConfigError, match="no memory for KV"):
        size_pool(config(GIB), LAYOUT, DEMAND, 3 * GIB)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Config(kv=KVConfig(dtype="fp8")), "kv.dtype 'fp8' is unknown; known are auto, fp32, fp16, bf16"),
        (Config(kv=KVConfig(block_tokens=24)), "kv.block_tokens is 24; write a power of two up to 128"),
        (Config(kv=KVConfig(block_tokens=-16)), "kv.block_tokens is -16;"),
        (Config(kv=KVConfig(block_tokens=256)), "kv.block_tokens is 256;"),
        (Config(model=ModelConfig(max_context=-1)), "model.max_context is -1;"),
        (Config(model=ModelConfig(threads=-2)), "model.threads is -2;"),
    ],
)
def test_settings_that_mean_nothing_are_refused_first(wrong: Config, said: str, places: Places) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        ModelRunner(wrong, places)


def test_the_fault_hook_caps_the_pool() -> None:
    assert size_pool(config(GIB, max_pool_blocks=7), LAYOUT, DEMAND, 100 * GIB).blocks == 7


# --- through the runner


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny("llama-tied", tmp_path_factory.mktemp("models"))


def runner_config(tiny: TinyModel, backend: str = "auto", **kv: int) -> Config:
    model = ModelConfig(source=str(tiny.path), threads=1, backend=backend)
    return Config(model=model, kv=KVConfig(block_tokens=16, **kv))


@pytest.mark.parametrize("asked", [0, 1])
def test_z01_the_runner_refuses_before_any_weight_is_loaded(
    tiny: TinyModel, places: Places, monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    monkeypatch.setattr(Cpu, "load", lambda *args, **kw: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match="one block of this model's KV"):
        ModelRunner(runner_config(tiny, pool_bytes=asked), places)
    monkeypatch.setattr(model_runner, "available_memory", lambda: 1 << 20)
    with pytest.raises(ConfigError, match="no memory for KV"):
        ModelRunner(runner_config(tiny, pool_bytes=GIB), places)
    monkeypatch.setattr(model_runner, "available_memory", lambda: 1 << 19)
    with pytest.raises(
        ConfigError, match=r"larger than memory: its weights take [\d,]+ bytes .* 524,288 bytes are free"
    ):
        ModelRunner(runner_config(tiny, pool_bytes=GIB), places)


def test_z01_one_block_serves_and_a_thousandfold_of_memory_is_clamped(tiny: TinyModel, places: Places) -> None:
    one = ModelRunner(runner_config(tiny, pool_bytes=3 * 2 * 2 * 16 * 2 * 16), places)
    assert one.facts.blocks == 1
    huge = ModelRunner(runner_config(tiny, pool_bytes=1000 * available_memory()), places)
    assert 0 < huge.facts.blocks * huge.facts.block_bytes < available_memory()


@pytest.fixture
def demands(monkeypatch: pytest.MonkeyPatch) -> list[Demand]:
    """What a runner asks the pool to be sized by, before and after it has loaded."""
    found: list[Demand] = []

    def spy(config: Config, layout: KVLayout, demand: Demand, free: int) -> object:
        found.append(demand)
        return size_pool(config, layout, demand, free)

    monkeypatch.setattr(model_runner, "size_pool", spy)
    return found


def test_what_the_largest_step_takes_is_measured(tiny: TinyModel, places: Places, demands: list[Demand]) -> None:
    runner = ModelRunner(runner_config(tiny, "reference", pool_bytes=GIB), places)
    before, after = demands
    assert not before.loaded
    assert after.loaded
    tokens, vocab, rows = 512, runner.ready.vocab, 64
    assert 0 <= after.step < 100 * 4 * (tokens * 88 + rows * vocab)
    expected = sum(tensor.numel() for tensor in tiny.reference.state_dict().values())
    assert before.weights >= 4 * expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv.dtype", "bf16"),
        ("kv.block_tokens", 32),
        ("model.backend", "reference"),
        ("weights", 1),
        ("kind", "llama-mha"),
    ],
)
def test_the_fingerprint_changes_with_all_that_changes_kv(
    tiny: TinyModel, places: Places, tmp_path: Path, field: str, value: object
) -> None:
    plain = runner_config(tiny, pool_bytes=1 << 20)
    assert ModelRunner(plain, places).facts.fingerprint == ModelRunner(plain, places).facts.fingerprint
    section, _, key = field.partition(".")
    if section == "kv":
        other = Config(model=plain.model, kv=KVConfig(**{"pool_bytes": 1 << 20, "block_tokens": 16, key: value}))
    elif section == "model":
        other = runner_config(tiny, str(value), pool_bytes=1 << 20)
    else:
        seed = 1 if field == "weights" else 0
        kind = str(value) if field == "kind" else "llama-tied"
        model = make_tiny(kind, tmp_path, seed)
        other = Config(model=ModelConfig(source=str(model.path), threads=1), kv=plain.kv)
    assert ModelRunner(other, places).facts.fingerprint != ModelRunner(plain, places).facts.fingerprint


@pytest.mark.parametrize(("backend", "same"), [("cpu", True), ("reference", False)])
def test_threads_are_part_of_the_fingerprint_where_they_change_bits(
    tiny: TinyModel, places: Places, backend: str, same: bool
) -> None:
    one = runner_config(tiny, backend, pool_bytes=1 << 20)
    two = replace_threads(one, 2)
    assert (ModelRunner(one, places).facts.fingerprint == ModelRunner(two, places).facts.fingerprint) is same


def replace_threads(config: Config, threads: int) -> Config:
    model = ModelConfig(source=config.model.source, backend=config.model.backend, threads=threads)
    return Config(model=model, kv=config.kv)


def test_what_a_step_takes_on_an_exact_backend_is_known_beforehand(
    tiny: TinyModel, places: Places, demands: list[Demand]
) -> None:
    runner = ModelRunner(runner_config(tiny, "cpu", pool_bytes=GIB), places)
    before, after = demands
    assert (before.step, before.weights) == (after.step, after.weights)
    assert runner.largest_step_s > 0


# --- what the machine has


def cgroup(root: Path, **files: str) -> Path:
    root.mkdir()
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text)
    return root


def test_memory_is_bounded_by_the_tightest_cgroup_and_page_cache_counts_as_free(tmp_path: Path) -> None:
    v2 = cgroup(
        tmp_path / "v2",
        memory__max="1000000\n",
        memory__current="900000\n",
        memory__stat="anon 5\ninactive_file 300000\n",
    )
    v1 = cgroup(
        tmp_path / "v1",
        memory__limit_in_bytes="500000\n",
        memory__usage_in_bytes="100001\n",
        memory__stat="total_inactive_file 7\n",
    )
    unlimited = cgroup(tmp_path / "none", memory__max="max\n", memory__current="5\n")
    full = cgroup(tmp_path / "full", memory__max="100\n", memory__current="105\n")
    assert memory_headroom([v2]) == 400000
    assert memory_headroom([unlimited, v1, v2]) == 400000
    assert memory_headroom([v1]) == 400006
    assert memory_headroom([v2, full]) == 0
    assert memory_headroom([unlimited]) is None
    assert 1 << 20 < available_memory() < 1 << 50


def test_cores_are_what_the_quota_pays_for_but_at_least_one(tmp_path: Path) -> None:
    half = cgroup(tmp_path / "half", cpu__max="50000 100000\n")
    three = cgroup(tmp_path / "three", cpu__cfs_quota_us="300000\n", cpu__cfs_period_us="100000\n")
    free = cgroup(tmp_path / "free", cpu__max="max 100000\n")
    unset = cgroup(tmp_path / "unset", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert paid_cores([free, unset], 8) == 8
    assert paid_cores([free, three], 8) == 3
    assert paid_cores([half], 8) == 1
    assert paid_cores([three], 2) == 2
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


def test_estimate_covers_the_weights_twice_only_where_they_are_tied(places: Places, tmp_path: Path) -> None:
    footprints = []
    for kind in ("llama-tied", "llama3-untied"):
        source = open_model(str(make_tiny(kind, tmp_path).path), places.models())
        program = decoder(source.spec, source.tensors(), source.spec.max_context)
        footprints.append(Reference(threads=1).footprint(program, 64, 8, 512))
    tied, untied = footprints
    assert tied == untied  # a head of its own takes what the second form of the embedding takes
