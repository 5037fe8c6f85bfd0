"""Cases where logits matter, on a real stack with a tiny random Llama: cache on against cache off, and other weights.

The oracle is the same model with the cache disabled and one request at a time. Equality follows `ops/equality.py`.
"""

import random
import signal
import string
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from ops.client import Client, Result, new_id
from ops.equality import compare
from ops.stream import joined
from shared.messages.base import pack_u32
from shared.messages.front import Generate, Sampling
from tests.e2e.kit import BLOCK, PATIENT, Watched, client_of, reckoned, settled, watching
from tests.tiny_models import Tiny, train_vocabulary, write_directory

TINY = Tiny(max_context=2048)
MIB = 1 << 20


def served(path: Path, **settings: str) -> dict[str, str]:
    """Settings of a stack that serves a directory."""
    sizes = {
        "PERDURE_MODEL__SOURCE": str(path),
        "PERDURE_MODEL__THREADS": "1",
        "PERDURE_KV__BLOCK_TOKENS": str(BLOCK),
        "PERDURE_KV__POOL_BYTES": str(64 * MIB),
        "PERDURE_STORE__HOST_BYTES": str(64 * MIB),
        "PERDURE_STORE__DISK_BYTES": str(256 * MIB),
    }
    return PATIENT | sizes | settings


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one name, sizes and files; they differ in one matrix of one layer."""
    base, vocabulary = tmp_path_factory.mktemp("models"), train_vocabulary()
    tensors = TINY.tensors(1)
    changed = "model.layers.1.mlp.up_proj.weight"
    other = tensors | {changed: tensors[changed][::-1].copy()}
    return {
        name: write_directory(base / name / "tiny", TINY, weights, vocabulary=vocabulary)
        for name, weights in (("a", tensors), ("b", other))
    }


@pytest.fixture(scope="module")
def cached(models: dict[str, Path]) -> Iterator[Watched]:
    with Watched(served(models["a"])) as made:
        trio.run(made.start)
        yield made
        trio.run(reckoned, made)
        assert not made.complaints()


# --- requests -----------------------------------------------------------------------------------------------------


def texts() -> list[str]:
    """16 random prompts of 512 characters."""
    rng = random.Random(1)
    return ["".join(rng.choices(string.ascii_letters + "    .,\n", k=512)) for _ in range(16)]


def ids_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(400) for _ in range(count)]


def tails() -> list[list[int]]:
    """33 prompts with a common prefix of 3 blocks and tails of 1 to 33 tokens."""
    rng = random.Random(2)
    stem = ids_of(rng, 3 * BLOCK)
    return [stem + ids_of(rng, length) for length in range(1, 34)]


def mixed() -> list[list[int]]:
    """10 prompts of 30 to 120 tokens."""
    rng = random.Random(25)
    return [ids_of(rng, 30 + 10 * number) for number in range(10)]


async def answer(client: Client, given: str | Sequence[int], tokens: int, *, no_read: bool = False) -> Result:
    """A greedy request with two logprobs a token, which the rule of equality needs."""
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=2)
    prompt = given if isinstance(given, str) else None
    ids = None if isinstance(given, str) else pack_u32(list(given))
    async with client.generate(
        Generate(id=new_id(), prompt=prompt, ids=ids, sampling=sampling, no_read=no_read)
    ) as stream:
        return await stream.result()


async def at_once(client: Client, given: Sequence[str | Sequence[int]], tokens: int) -> list[Result]:
    results: dict[int, Result] = {}

    async def one(index: int) -> None:
        results[index] = await answer(client, given[index], tokens)

    async with trio.open_nursery() as nursery:
        for index in range(len(given)):
            nursery.start_soon(one, index)
    return [results[index] for index in range(len(given))]


def check_alike(wanted: Sequence[Result], got: Sequence[Result]) -> None:
    """All equal by the rule; near ties are shown, and at most 0.5 % of the requests."""
    compared = [compare(one, other) for one, other in zip(wanted, got, strict=True)]
    differing = [str(one) for one in compared if one.first_difference is not None]
    assert all(one.equal for one in compared), differing
    print(f"{len(compared)} requests, near ties: {differing}")
    assert len(differing) <= 0.005 * len(compared), differing


def hits(result: Result) -> int:
    return result.finish.usage.cached_tokens


# --- the oracle ---------------------------------------------------------------------------------------------------


@dataclass
class Oracle:
    """Results without any cache, one request at a time; the texts in a second pass, all at once, too."""

    texts: list[list[Result]] = field(default_factory=list)
    tails: list[Result] = field(default_factory=list)
    mixed: list[Result] = field(default_factory=list)


@pytest.fixture(scope="module")
def oracle(models: dict[str, Path]) -> Oracle:
    made_of = Oracle()

    async def ask_all(made: Watched) -> None:
        await made.start()
        async with client_of(made) as client:
            made_of.texts.append([await answer(client, text, 64) for text in texts()])
            made_of.texts.append(await at_once(client, texts(), 64))
            made_of.tails = [await answer(client, ids, 8) for ids in tails()]
            made_of.mixed = [await answer(client, ids, 40) for ids in mixed()]
        pool = (await settled(made))["pool"]
        assert (pool["cached"], pool["locked"]) == (0, 0)

    with Watched(served(models["a"], PERDURE_KV__PREFIX_CACHE="false")) as made:
        trio.run(ask_all, made)
    return made_of


# --- cases --------------------------------------------------------------------------------------------------------


async def test_w01_two_passes_with_the_cache_equal_two_without(cached: Watched, oracle: Oracle) -> None:
    async with client_of(cached) as client:
        passes = [await at_once(client, texts(), 64) for _ in range(2)]
    for results in (oracle.texts[1], *passes):
        check_alike(oracle.texts[0], results)
    assert all(hits(result) == 0 for results in oracle.texts for result in results)
    assert all(hits(result) >= 10 * BLOCK for result in passes[1])


async def test_w02_tails_of_every_length_behind_a_cached_prefix_equal_cold_ones(
    cached: Watched, oracle: Oracle
) -> None:
    async with client_of(cached) as client:
        await answer(client, tails()[0], 1)
        results = [await answer(client, ids, 8) for ids in tails()]
    check_alike(oracle.tails, results)
    assert all(hits(result) >= 3 * BLOCK for result in results)


@pytest.fixture(scope="module")
def retracting(models: dict[str, Path]) -> Iterator[Watched]:
    with Watched(served(models["a"], PERDURE_SCHEDULER__STEP_TOKENS="16", PERDURE_FAULTS__RETRACT_EVERY="3")) as made:
        trio.run(made.start)
        yield made
        trio.run(reckoned, made)
        assert not made.complaints()


@pytest.fixture
async def retracted(retracting: Watched) -> AsyncIterator[Watched]:
    async with watching(retracting) as look:
        before = await look.counter("retracted_by_force")
        yield retracting
        await settled(retracting)
        assert await look.counter("retracted_by_force") >= before + 10


async def test_w25_frequent_retraction_with_small_chunks_changes_nothing(retracted: Watched, oracle: Oracle) -> None:
    async with client_of(retracted) as client:
        check_alike(oracle.mixed, await at_once(client, mixed(), 40))


async def test_w26_a_retracted_request_has_one_logprob_a_token_and_repeats_no_delta(
    retracted: Watched, oracle: Oracle
) -> None:
    sampling = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=2)

    async def one(client: Client, ids: list[int], wanted: Result) -> None:
        async with client.generate(ids=ids, sampling=sampling) as stream:
            chunks = [chunk async for chunk in stream]
        async with client.follow(stream.id) as again:
            whole = await again.result()
        assert [chunk.start for chunk in chunks] == [0, *(chunk.end for chunk in chunks[:-1])]
        for result in (joined(stream.id, chunks), whole):
            assert result.logprobs is not None
            assert len(result.logprobs) == len(result.ids) == result.finish.usage.completion_tokens == 40
            assert result.finish.usage.prompt_tokens == len(ids)
            assert hits(result) < len(ids)
        assert whole.logprobs == joined(stream.id, chunks).logprobs
        check_alike([wanted], [whole])
        assert wanted.logprobs is not None
        values = [logprob.chosen for logprob in whole.logprobs or ()]
        assert values == pytest.approx([logprob.chosen for logprob in wanted.logprobs], abs=1e-3)

    async with client_of(retracted) as client, trio.open_nursery() as nursery:
        for ids, wanted in zip(mixed(), oracle.mixed, strict=True):
            nursery.start_soon(one, client, ids, wanted)


async def test_w12_w13_other_weights_or_another_kv_dtype_of_the_same_name_hit_nothing(
    cached: Watched, models: dict[str, Path]
) -> None:
    """The last test on this stack: it is stopped and started on the same home with other settings."""
    ids = ids_of(random.Random(12), 100)
    seen: dict[str, list[Result]] = {}
    for life, path, dtype in (("a", "a", "fp16"), ("b", "b", "fp16"), ("bf16", "a", "bf16"), ("again", "a", "fp16")):
        if life != "a":
            await settled(cached)
            await cached.stop()
            cached.settings |= {"PERDURE_MODEL__SOURCE": str(models[path]), "PERDURE_KV__DTYPE": dtype}
            await cached.start()
        async with client_of(cached) as client:
            reads = [await answer(client, ids, 32) for _ in range(2)]
            uncached = await answer(client, ids, 32, no_read=True)
        check_alike([uncached] * 2, reads)
        seen[life] = reads
    found = {life: [hits(result) for result in results] for life, results in seen.items()}
    all_of_it = 99 // BLOCK * BLOCK
    assert found == {life: [0, all_of_it] for life in ("a", "b", "bf16")} | {"again": [all_of_it] * 2}
    assert seen["again"][0].finish.usage.cached_by_tier["host"] == all_of_it
    check_alike(seen["a"], seen["again"])
    assert seen["a"][0].ids != seen["b"][0].ids  # or nobody would have noticed a wrong hit


async def test_i08_a_stop_with_100_mb_to_flush_leaves_no_process_and_loses_no_block(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Blocks of 128 KiB; a disk that takes a second for each of 13 batches of 8 MiB, so that the grace is too short."""
    wide = Tiny(heads=8, kv_heads=8, head_dim=64, max_context=1024)
    path = write_directory(tmp_path_factory.mktemp("wide") / "wide", wide, wide.tensors(3))
    rng = random.Random(8)
    prompts = [ids_of(rng, 52 * BLOCK + 1) for _ in range(16)]
    sizes = {"PERDURE_STORE__HOST_BYTES": str(160 * MIB), "PERDURE_KV__POOL_BYTES": str(160 * MIB)}
    slow = {"PERDURE_FAULTS__HOOKS__STORE_BEFORE_DATA": "delay:1", "PERDURE_SUPERVISE__GRACE_S": "10"}
    with Watched(served(path, **sizes, **slow)) as made:
        await made.start()
        async with client_of(made) as client:
            before = await at_once(client, prompts, 1)
        await settled(made)
        async with watching(made, "store") as look:
            assert (await look())["tiers"]["host"]["dirty"] > 200
        await made.stop(signal.SIGTERM)
        log = made.log_path.read_text()
        assert "drain_left_dirty" in log
        assert '"code": -9' not in log  # none had to be killed
        await made.start()
        async with client_of(made) as client:
            after = await at_once(client, prompts, 1)
        check_alike(before, after)
        assert [hits(result) for result in after] == [52 * BLOCK] * 16
        await settled(made)
        await made.stop(signal.SIGINT)
        assert not made.running()
        assert '"code": -9' not in made.log_path.read_text()
        homes = [made.places.home, made.places.run]
        assert not [file for home in homes for file in home.rglob("*") if file.suffix in (".tmp", ".part", ".sock")]
        await reckoned(made)
        assert not made.complaints()
