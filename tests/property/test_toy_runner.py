"""The toy model over real blocks: however its rows are cut and wherever its blocks lie, it is the oracle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.page_store import PageStore
from services.worker.rows import BadRow
from services.worker.toy_runner import ToyRunner
from shared.config import Config, ConfigError, FaultsConfig, KVConfig, ModelConfig
from shared.messages.base import pack_u32
from shared.messages.engine import Row, SampleSpec
from shared.model.toy import toy_generate

SEED = 7
GREEDY = SampleSpec()


def make(block_tokens: int = 16, blocks: int = 40) -> tuple[ToyRunner, PageStore]:
    kv = KVConfig(pool_bytes=blocks * 64 * block_tokens, block_tokens=block_tokens)
    runner = ToyRunner(Config(model=ModelConfig(source=f"toy:{SEED}"), kv=kv))
    pool = PageStore(runner.facts.blocks, runner.facts.block_bytes)
    for block in range(pool.nblocks):
        pool.poison(block)  # what is read must have been written
    return runner, pool


def row(key: int, start: int, ids: list[int], blocks: list[int], sample: SampleSpec | None = GREEDY) -> Row:
    return Row(key, start, pack_u32(ids), pack_u32(blocks), sample)


def generate(
    runner: ToyRunner, pool: PageStore, prompt: list[int], n: int, blocks: list[int], cuts: list[int], cached: int = 0
) -> list[int]:
    """Prefill in chunks that end at `cuts`, then decode one by one."""
    out: list[int] = []
    start = cached
    for cut in [*sorted({cut for cut in cuts if cached < cut < len(prompt)}), len(prompt)]:
        last = cut == len(prompt)
        (done,) = runner.step([row(1, start, prompt[start:cut], blocks, GREEDY if last else None)], pool).rows
        assert (done.token is not None) == last
        start = cut
    assert done.token is not None
    out.append(done.token)
    while len(out) < n:
        position = len(prompt) + len(out) - 1
        (done,) = runner.step([row(1, position, [out[-1]], blocks)], pool).rows
        assert done.token is not None
        out.append(done.token)
    return out


@given(
    st.lists(st.integers(0, 511), min_size=1, max_size=90),
    st.lists(st.integers(1, 89), max_size=6),
    st.sampled_from([1, 4, 16, 32]),
    st.permutations(range(40)),
)
def test_any_chunks_in_any_scattered_blocks_give_what_the_oracle_gives(
    prompt: list[int], cuts: list[int], block_tokens: int, order: list[int]
) -> None:
    """W25, W32: chunks resume at any position, block ids are in no order."""
    runner, pool = make(block_tokens, blocks=200)
    need = -(-(len(prompt) + 8) // block_tokens)
    blocks = [order[i % 40] + 40 * (i // 40) for i in range(need)]
    assert generate(runner, pool, prompt, 8, blocks, cuts) == toy_generate(SEED, prompt, 8)


@given(st.lists(st.lists(st.integers(0, 511), min_size=1, max_size=40), min_size=2, max_size=6), st.randoms())
def test_a_ragged_batch_draws_what_each_row_draws_alone(prompts: list[list[int]], random: object) -> None:
    runner, pool = make(16, blocks=40)
    order = list(range(pool.nblocks))
    random.shuffle(order)  # type: ignore[attr-defined]
    tables = [[order.pop() for _ in range(-(-len(prompt) // 16))] for prompt in prompts]
    rows = [row(i, 0, prompt, table) for i, (prompt, table) in enumerate(zip(prompts, tables, strict=True))]
    drawn = [output.token for output in runner.step(rows, pool).rows]
    assert drawn == [toy_generate(SEED, prompt, 1)[0] for prompt in prompts]


@pytest.mark.parametrize("size", [1, 15, 16, 17, 32])
def test_w04_a_prompt_cached_but_for_its_last_token_goes_on_as_if_it_was_not(size: int) -> None:
    """Prompts of 1, B-1, B, B+1, 2B tokens: all but the last token's KV is there already, thrice."""
    runner, pool = make()
    prompt = [(7 * i) % 512 for i in range(size)]
    expected = toy_generate(SEED, prompt, 5)
    assert generate(runner, pool, prompt, 5, [3, 9, 1], []) == expected
    for _ in range(2):
        assert generate(runner, pool, prompt, 5, [3, 9, 1], [], cached=size - 1) == expected


def test_every_byte_of_every_cached_block_matters() -> None:
    runner, pool = make()
    prompt = list(range(48))
    blocks = [5, 2, 8, 0]
    (right,) = generate(runner, pool, prompt, 1, blocks, [])
    before = pool.blocks.copy()
    rng = np.random.default_rng(0)
    for block in blocks[:3]:
        for offset in rng.integers(0, 1024, 24).tolist():
            pool.blocks[:] = before
            pool.blocks[block, offset] ^= 1
            (token,) = generate(runner, pool, prompt, 1, blocks, [], cached=47)
            wrong = pool.blocks[block, offset] != before[block, offset]  # the last token rewrites its own slot
            assert (token != right) == wrong, (block, offset)


def test_one_block_written_by_another_prefix_changes_the_tokens() -> None:
    runner, pool = make()
    prompt = list(range(48))
    right = generate(runner, pool, prompt, 4, [5, 2, 8, 0], [])
    generate(runner, pool, [9] * 48, 1, [6, 7, 10, 11], [])
    assert generate(runner, pool, prompt, 4, [5, 7, 8, 0], [], cached=47) != right


def bad_rows() -> list[tuple[str, Row]]:
    return [
        ("feeds at least one token", row(1, 0, [], [0])),
        ("not 1 at -1", row(1, -1, [5], [0])),
        ("do not cover 17 positions", row(1, 16, [5], [0])),
        ("block 40 is outside the pool of 40", row(1, 0, [5], [40])),
        ("token 512 is outside the vocabulary of 512", row(1, 0, [512], [0])),
        ("beyond the context of 4096", row(1, 4096, [5], [0] * 257)),
        ("torn", Row(1, 0, b"\0\0\0", pack_u32([0]), GREEDY)),
        ("torn", Row(1, 0, pack_u32([5]), b"\0\0\0\0\0", GREEDY)),
    ]


@pytest.mark.parametrize(("reason", "bad"), bad_rows(), ids=[reason for reason, _ in bad_rows()])
def test_a_row_that_contradicts_itself_or_the_pool_is_refused_before_anything_is_written(reason: str, bad: Row) -> None:
    runner, pool = make()
    before = pool.blocks.copy()
    with pytest.raises(BadRow, match=reason):
        runner.step([row(2, 0, [1, 2, 3], [1]), bad], pool)
    assert (pool.blocks == before).all()


def test_the_configuration_decides_block_length_context_and_pool() -> None:
    config = Config(
        model=ModelConfig(source="toy:3", max_context=99),
        kv=KVConfig(pool_bytes=1 << 20, block_tokens=32),
        faults=FaultsConfig(max_pool_blocks=8),
    )
    ready = ToyRunner(config).ready
    assert (ready.kv.blocks, ready.kv.block_tokens, ready.kv.block_bytes, ready.max_context) == (8, 32, 2048, 99)
    assert ToyRunner(Config(model=ModelConfig(source="toy:3"))).facts.block_tokens == 16
    other = ToyRunner(Config(model=ModelConfig(source="toy:4")))
    assert other.facts.fingerprint != ToyRunner(Config(model=ModelConfig(source="toy:3"))).facts.fingerprint
    with pytest.raises(ConfigError, match="toy:<seed>"):
        ToyRunner(Config(model=ModelConfig(source="toy:x")))
    with pytest.raises(ConfigError, match="holds no block of 1024 bytes"):
        ToyRunner(Config(model=ModelConfig(source="toy:1"), kv=KVConfig(pool_bytes=1000)))
