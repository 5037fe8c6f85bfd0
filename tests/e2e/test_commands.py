"""The command line against a running stack, as a user types it."""

import json
import os
import re
import subprocess
import sys

import pytest
import trio

from ops.client import connected
from ops.stack import Stack
from shared.messages.front import Sampling
from tests.e2e.kit import DEADLINE_S, ask_all, oracle, prompt, settled, stack


async def perdure(made: Stack, *arguments: str, code: int = 0, text: str = "") -> str:
    """Runs the command line on the stack's home; its stdout. Any other exit code than `code` is an error."""
    done = await trio.run_process(
        [sys.executable, "-m", "ops.cli", *arguments],
        env=made.environ,
        stdin=text.encode(),
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout.decode() + (done.stderr.decode() if code else "")


async def test_status_restart_ledger_and_purge_on_a_running_stack() -> None:
    ids = prompt(3, 100)
    async with stack() as made:
        (first,) = await ask_all(made, [ids], 20)
        shown = await perdure(made, "status")
        for word in ("store", "scheduler", "worker", "tokenizer", "detokenizer", "ready", "device", "host", "disk"):
            assert word in shown
        assert "20 output tokens" in " ".join(shown.split())
        assert "!" not in shown  # nothing is amiss
        assert "save_committed" in await perdure(made, "status", "--all")
        facts = json.loads(await perdure(made, "status", "--json"))
        assert facts["scheduler"]["data"]["block_tokens"] == 16

        output = await perdure(made, "restart", "worker")
        assert re.search(r"worker: incarnation 1 -> 2", output)
        (second,) = await ask_all(made, [ids], 20)
        assert second.ids == first.ids == oracle(ids, 20)
        assert second.finish.usage.cached_by_tier["host"] == 96

        rows = [json.loads(line) for line in (await perdure(made, "ledger", "list", "--json")).splitlines()]
        assert {row["id"] for row in rows} <= {first.id, second.id}

        assert "device: " in await perdure(made, "cache", "purge")
        (third,) = await ask_all(made, [ids], 20)
        assert third.ids == first.ids
        assert third.finish.usage.cached_tokens == 0
        await settled(made)


async def test_restart_all_under_load_fails_no_request() -> None:
    prompts = [prompt(number, 60 + number) for number in range(6)]
    async with stack() as made:
        with trio.fail_after(2 * DEADLINE_S):
            async with connected(made.places, recovery_timeout_s=DEADLINE_S) as client, trio.open_nursery() as nursery:
                ended = []

                async def one(ids: list[int]) -> None:
                    sampling = Sampling(max_tokens=600, temperature=0.0, ignore_eos=True)
                    async with client.generate(ids=ids, sampling=sampling) as stream:
                        ended.append((ids, (await stream.result()).ids))

                for ids in prompts:
                    nursery.start_soon(one, ids)
                output = await perdure(made, "restart", "--all")
        assert output.count("incarnation 1 -> 2") == 5
        assert len(ended) == len(prompts)
        for ids, got in ended:
            assert got == oracle(ids, 600)
        await settled(made)


async def test_purge_without_a_stack_removes_arena_and_disk_tier() -> None:
    async with stack() as made:
        await ask_all(made, [prompt(1, 100)], 5)
        await made.stop()
        assert made.places.arena().exists()
        await perdure(made, "cache", "purge")
        assert not made.places.arena().exists()
        assert not made.places.store.exists()
        shown = await perdure(made, "status", code=4)
        assert "no stack runs" in shown
        await made.start()
        (result,) = await ask_all(made, [prompt(1, 100)], 5)
        assert result.finish.usage.cached_tokens == 0


async def test_i03_a_second_stack_on_one_home_is_refused_and_the_first_goes_on() -> None:
    async with stack() as made:
        refused = await perdure(made, "serve", code=4)
        assert "is taken by process" in refused
        (result,) = await ask_all(made, [prompt(2, 50)], 10)
        assert result.ids == oracle(prompt(2, 50), 10)


async def test_two_homes_never_meet() -> None:
    async with stack() as one, stack() as other:
        ids = prompt(5, 80)
        (first,) = await ask_all(one, [ids], 10)
        (second,) = await ask_all(other, [ids], 10)
        assert first.ids == second.ids
        assert second.finish.usage.cached_tokens == 0
        assert one.places.run != other.places.run


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"PERDURE_KV__POOL_BITES": "1"}, "did you mean pool_bytes"),
        ({"PERDURE_STORE__HOST_BYTES": "many"}, "is no size"),
    ],
)
def test_serve_says_what_is_wrong_with_the_configuration(settings: dict[str, str], words: str) -> None:
    with Stack(settings, share_models=False) as made:
        done = subprocess.run(
            [sys.executable, "-m", "ops.cli", "serve"], env=made.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert words in done.stderr
        assert not os.listdir(made.places.home) if made.places.home.exists() else True
