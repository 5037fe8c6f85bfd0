"""`kill -9` of each service in mid-answer, with real arithmetic: a tiny random Llama, five deaths on one stack.

The toy model's tests are strict; here logits are recomputed after a death in other batches and chunks, so equality
follows `ops/equality.py`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from ops.client import Client, Result, new_id
from ops.equality import compare
from ops.stream import joined
from shared.messages.base import pack_u32
from shared.messages.front import Generate, Sampling
from tests.e2e.kit import BLOCK, PATIENT, Watched, client_of, hooks, prompt, reckoned, settled
from tests.tiny_models import Tiny, train_vocabulary, write_directory

SERVICES = ("worker", "scheduler", "store", "detokenizer", "tokenizer")
TOKENS = 200
SAMPLING = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
PROMPTS = {service: prompt(number, 100 + number) for number, service in enumerate(SERVICES)}
TINY = Tiny(max_context=512)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    path: Path = tmp_path_factory.mktemp("model") / "tiny"
    settings = PATIENT | {
        "PERDURE_MODEL__SOURCE": str(write_directory(path, TINY, TINY.tensors(5), vocabulary=train_vocabulary())),
        "PERDURE_MODEL__THREADS": "1",
        "PERDURE_KV__BLOCK_TOKENS": str(BLOCK),
        "PERDURE_KV__POOL_BYTES": "64 MiB",
        "PERDURE_STORE__HOST_BYTES": "64 MiB",
        "PERDURE_STORE__DISK_BYTES": "256 MiB",
    }
    # An answer lasts a second, so that it has a middle.
    with Watched(settings | hooks(worker_in_step="delay:0.005")) as made:
        trio.run(made.start)
        yield made
        trio.run(reckoned, made)


@pytest.fixture(scope="module")
def undisturbed(stack: Watched) -> dict[str, Result]:
    """The answers of the same stack while nobody dies; the cache keeps nothing of them."""
    found: dict[str, Result] = {}

    async def one(client: Client, service: str) -> None:
        ids = pack_u32(PROMPTS[service])
        request = Generate(id=new_id(), ids=ids, sampling=SAMPLING, no_read=True, no_store=True)
        async with client.generate(request) as stream:
            found[service] = await stream.result()

    async def ask() -> None:
        async with client_of(stack) as client:
            for service in SERVICES:
                await one(client, service)

    trio.run(ask)
    assert all(len(set(result.ids)) > TOKENS // 10 for result in found.values())  # or an error would hardly show
    return found


def life(stack: Watched, service: str) -> int:
    return int((stack.places.incarnations / service).read_text())


@pytest.mark.parametrize("service", SERVICES)
async def test_i01_i07_a_service_killed_in_mid_answer_of_a_real_model_costs_no_token(
    stack: Watched, undisturbed: dict[str, Result], service: str
) -> None:
    before = life(stack, service)
    chunks = []
    killed = False
    async with client_of(stack) as client, client.generate(ids=PROMPTS[service], sampling=SAMPLING) as stream:
        async for chunk in stream:
            assert chunk.start == (chunks[-1].end if chunks else 0)
            chunks.append(chunk)
            if chunk.end >= 20 and not killed:
                assert chunk.end < TOKENS
                stack.kill(service)
                killed = True
    result = joined(stream.id, chunks)
    assert killed
    assert result.logprobs is not None
    assert len(result.ids) == len(result.logprobs) == TOKENS
    same = compare(undisturbed[service], result)
    print(f"{service}: {same}")
    assert same.equal, same
    await stack.wait_serving()
    await settled(stack)
    assert life(stack, service) == before + 1
