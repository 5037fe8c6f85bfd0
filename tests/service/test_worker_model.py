"""The worker with a tiny random Llama: real kernels, sampler and pool behind the real socket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio

from services.worker.actor import Worker
from shared.config import Config, KVConfig, ModelConfig
from shared.messages.base import unpack_u32
from shared.messages.engine import Copy, SampleSpec
from shared.messages.hello import Snapshot, Status
from shared.paths import Places
from shared.peers import DeadlinePassed, PeerGone
from shared.testing import TestPeer, running
from tests.hf_tiny import VOCAB, TinyModel, make_tiny
from tests.service.played_plans import GREEDY, Playing, Scheduler, launch, make_arena, meet, row

BLOCKS = 40
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4
BLOCK = 16 * TOKEN_BYTES


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny("llama-tied", tmp_path_factory.mktemp("models"))


@asynccontextmanager
async def played(places: Places, tiny: TinyModel, **kv: object) -> AsyncIterator[tuple[Playing, Worker]]:
    settings = {"pool_bytes": BLOCKS * BLOCK, "block_tokens": 16, "dtype": "fp32"} | kv
    config = Config(
        model=ModelConfig(source=str(tiny.path), threads=1),
        kv=KVConfig(**settings),  # type: ignore[arg-type]
    )
    arena = make_arena(places.home / "arena", 16 * BLOCK)
    async with running(Scheduler, places) as mailbox, running(Worker, places, config) as worker:
        yield await meet(mailbox, arena, 1), worker


def reference(tiny: TinyModel, prompt: list[int], n: int) -> list[int]:
    """Greedy ids, each from a forward pass over everything before it."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(tiny.logits(ids)[-1].argmax()))
    return ids[len(prompt) :]


async def test_w25_chunks_and_restored_blocks_give_the_reference_ids(places: Places, tiny: TinyModel) -> None:
    prompt = [(37 * i) % VOCAB for i in range(45)]
    expected = reference(tiny, prompt, 12)
    async with played(places, tiny) as (scheduler, worker):
        assert (scheduler.ready.kv.blocks, scheduler.ready.kv.block_bytes) == (BLOCKS, BLOCK)
        assert await scheduler.generate(prompt, 12, [9, 0, 30, 4], chunk=45) == expected
        assert await scheduler.generate(prompt, 12, [5, 6, 7, 8], chunk=7) == expected
        ok, sums = await scheduler.copied(True, Copy(9, 0), Copy(0, 3 * BLOCK))
        assert ok == [1, 1]
        for block in range(10, 14):
            worker._pool.poison(block)  # the last of them stays so: nothing reads what was never written
        assert (await scheduler.copied(False, Copy(12, 0, sums[0]), Copy(11, 3 * BLOCK, sums[1])))[0] == [1, 1]
        assert await scheduler.generate(prompt, 12, [12, 11, 10, 13], chunk=45, cached=32) == expected


@pytest.mark.parametrize("size", [1, 15, 16, 17, 32])
async def test_w04_all_but_the_last_token_cached(places: Places, tiny: TinyModel, size: int) -> None:
    prompt = [(3 * i + 1) % VOCAB for i in range(size)]
    async with played(places, tiny) as (scheduler, _):
        expected = await scheduler.generate(prompt, 4, [7, 1, 20], chunk=99)
        assert expected == reference(tiny, prompt, 4)
        for _ in range(2):
            assert await scheduler.generate(prompt, 4, [7, 1, 20], chunk=99, cached=size - 1) == expected


async def test_a_sampled_row_draws_the_same_alone_and_among_others(places: Places, tiny: TinyModel) -> None:
    prompt = [(11 * i) % VOCAB for i in range(20)]
    spec = SampleSpec(temperature=0.9, top_k=40, top_p=0.95, seed=4, logprobs=2)
    async with played(places, tiny) as (scheduler, _):
        alone = await scheduler.generate(prompt, 8, [0, 1], chunk=20, sample=spec)
        assert alone == await scheduler.generate(prompt, 8, [2, 3], chunk=3, sample=spec)
        other = await scheduler.generate(prompt, 8, [0, 1], chunk=20, sample=SampleSpec(temperature=0.9, seed=5))
        assert alone != other
        others = [row(10 + i, 0, [i, i + 1, i + 2], [10 + i]) for i in range(5)]
        scheduler.plan(*others, row(1, 0, prompt, [4, 5], spec))
        mine = (await scheduler.result()).rows[-1]
        assert mine.token == alone[0]
        assert mine.logprob is not None
        exact = np.log(np.exp(tiny.logits(prompt)[-1].double().numpy()))
        exact -= np.log(np.exp(exact).sum())
        assert mine.logprob.chosen == pytest.approx(exact[mine.token], abs=1e-4)
        assert list(unpack_u32(mine.logprob.top_ids)) == np.argsort(-exact, kind="stable")[:2].tolist()


async def test_kv_that_is_not_finite_ends_its_own_row_alone(places: Places, tiny: TinyModel) -> None:
    prompt = [(11 * i) % VOCAB for i in range(20)]
    async with played(places, tiny) as (scheduler, worker):
        expected = await scheduler.generate(prompt, 1, [0, 1], chunk=20)
        worker._pool.poison(5)
        scheduler.plan(row(1, 16, prompt[16:], [5, 6]), row(2, 0, prompt, [2, 3]))
        bad, good = (await scheduler.result()).rows
        assert bad.token == -1
        assert bad.error is not None
        assert "not finite" in bad.error
        assert (good.token, good.error) == (expected[0], None)
        assert await scheduler.step(row(3, 0, prompt, [8, 9], GREEDY)) == expected


async def test_a_block_of_16_bits_is_half_as_long_and_goes_on_after_a_load(places: Places, tiny: TinyModel) -> None:
    prompt = [(29 * i) % VOCAB for i in range(33)]
    async with played(places, tiny, dtype="fp16") as (scheduler, _):
        assert scheduler.ready.kv.block_bytes == BLOCK // 2
        expected = await scheduler.generate(prompt, 8, [0, 1, 2], chunk=33)
        _, sums = await scheduler.copied(True, Copy(0, 0), Copy(1, BLOCK // 2))
        assert (await scheduler.copied(False, Copy(20, 0, sums[0]), Copy(21, BLOCK // 2, sums[1])))[0] == [1, 1]
        assert await scheduler.generate(prompt, 8, [20, 21, 22], chunk=33, cached=32) == expected


async def test_status_answers_while_the_model_loads(places: Places, tiny: TinyModel) -> None:
    """The process imports torch meanwhile, which takes longer than an answer."""
    settings = {"MODEL__SOURCE": str(tiny.path), "MODEL__BACKEND": "reference", "KV__POOL_BYTES": str(BLOCKS * BLOCK)}
    process = launch(places, **{f"PERDURE_{name}": value for name, value in settings.items()})
    node = TestPeer("admin", places, engine="admin")
    seen: list[Snapshot] = []
    try:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                node.nursery = nursery
                link = node.dial("worker")
                while not seen or not seen[-1].ready:
                    peer = await link.wait_up()
                    try:
                        seen.append(await peer.ask(Status(), Snapshot, deadline_s=5))
                    except (PeerGone, DeadlinePassed):
                        continue
                nursery.cancel_scope.cancel()
        assert not seen[0].ready
        assert seen[0].data["loading"] in ("loading the kernels", "opening the model")
        assert seen[-1].data["loading"] == "ready"
        assert seen[-1].data["architecture"] == "llama"
        process.terminate()
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        node.close()
