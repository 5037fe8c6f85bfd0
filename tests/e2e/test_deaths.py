"""`kill -9` at each named step and of everything: one test a row of "what if X dies here".

The hooks pass N-1 times and die at the N-th, in every life of the service, so most rows die several times. The toy
model makes a single wrong, stale or torn block change the answer.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from ops.client import connected, new_id
from shared.messages.front import Sampling
from shared.peers import wait_exit
from tests.e2e.kit import DEADLINE_S, Watched, ask_all, hooks, ledger_rows, oracle, prompt, settled, stack

TOKENS = 40
PROMPTS = [prompt(number, 100 + 7 * number) for number in range(4)]
WANTED = [oracle(ids, TOKENS) for ids in PROMPTS]
OTHERS = [prompt(number, 100) for number in (4, 5)]

STEPS = {
    "tokenizer_before_submit": "exit:2",
    "tokenizer_after_journaled": "exit:2",
    "journal_before_accept": "exit:3",
    "journal_after_accept": "exit:3",
    "scheduler_before_step": "exit:12",
    "scheduler_after_step": "exit:12",
    "worker_in_step": "exit:12",
    "worker_in_save": "exit:9",
    "worker_in_load": "exit:10",  # more than one prompt has: else no life would get past it
    "store_after_granted": "exit:3",
    "store_after_commit_arrives": "exit:3",
    "store_before_data": "exit:2",
    "store_after_data": "exit:2",
    "store_commit_index": "exit:2",
    "store_after_index": "exit:2",
    "detokenizer_in_progress": "exit:15",
}


@pytest.mark.parametrize("step", STEPS)
async def test_death_at_a_step_loses_and_changes_nothing(step: str) -> None:
    async with stack(**hooks(**{step: STEPS[step]})) as made:
        first = lives(made, step)
        for _ in range(2):  # cold, then with whatever was saved meanwhile
            results = await ask_all(made, PROMPTS, TOKENS)
            assert [result.ids for result in results] == WANTED
        await settled(made)
        if step == "worker_in_load":  # the pool holds everything: a load needs an empty one
            made.kill("worker")
            await made.wait_serving()
            first = lives(made, step)
            for ids, wanted in zip(PROMPTS, WANTED, strict=True):
                (result,) = await ask_all(made, [ids], TOKENS)
                assert result.ids == wanted
        results = await ask_all(made, OTHERS, TOKENS)  # new blocks, after the others have reached the disk
        assert [result.ids for result in results] == [oracle(ids, TOKENS) for ids in OTHERS]
        await settled(made)
        await nothing_is_out(made)
        assert lives(made, step) > first, "nobody died"


async def nothing_is_out(made: Watched) -> None:
    """Every grant, lease and read of the store comes to its end, whoever died."""
    with trio.fail_after(DEADLINE_S):
        while True:
            store = (await made.snapshots())["store"]
            if store is not None and "tiers" in store.data:
                host = store.data["tiers"]["host"]
                if not (host["granted"] or host["staging"] or store.data["leases"]):
                    return
            await trio.sleep(0.05)  # a poll of status, bounded by the test's deadline


def lives(made: Watched, step: str) -> int:
    """How often the service that the step belongs to has been started."""
    service = "scheduler" if step.startswith("journal") else step.partition("_")[0]
    return int((made.places.incarnations / service).read_text())


SERVICES = ["tokenizer", "scheduler", "worker", "detokenizer", "store"]


@pytest.mark.parametrize("service", SERVICES)
async def test_i01_i07_a_service_killed_in_mid_answer_costs_no_token(service: str) -> None:
    async with stack() as made:
        results = []
        with trio.fail_after(DEADLINE_S):
            async with connected(made.places, recovery_timeout_s=DEADLINE_S) as client:
                sampling = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)
                async with client.generate(ids=PROMPTS[1], sampling=sampling) as stream:
                    ids: list[int] = []
                    killed = False
                    async for chunk in stream:
                        assert chunk.start == len(ids)
                        ids += memoryview(chunk.ids).cast("I")
                        if len(ids) >= 20 and not killed:
                            made.kill(service)
                            killed = True
                    assert killed
                    results.append(tuple(ids))
        assert results == [oracle(PROMPTS[1], 200)]
        await made.wait_serving()
        await settled(made)


async def test_everything_killed_at_once_goes_on_where_it_was() -> None:
    async with stack() as made:
        with trio.fail_after(DEADLINE_S):
            async with connected(made.places, recovery_timeout_s=DEADLINE_S) as client:
                sampling = Sampling(max_tokens=300, temperature=0.0, ignore_eos=True)
                async with client.generate(ids=PROMPTS[2], sampling=sampling) as stream:
                    ids: list[int] = []
                    killed = False
                    async for chunk in stream:
                        ids += memoryview(chunk.ids).cast("I")
                        if len(ids) >= 30 and not killed:
                            made.kill_all()
                            made.launch()
                            killed = True
                    usage = chunk.finish.usage if chunk.finish else None
        assert killed
        assert tuple(ids) == oracle(PROMPTS[2], 300)
        assert usage is not None
        assert usage.completion_tokens == 300
        await settled(made)


async def test_p11_p27_ten_hard_kills_leave_one_arena_and_a_warm_cache() -> None:
    async with stack() as made:
        await ask_all(made, PROMPTS, TOKENS)
        await settled(made)
        for _ in range(10):
            made.kill_all()
            await made.start()
        shm = [path.name for path in made.places.arena().parent.glob(f"perdure-{made.places.home_hash}*")]
        assert len(shm) == 1
        results = await ask_all(made, PROMPTS, TOKENS)
        assert [result.ids for result in results] == WANTED
        for result in results:
            assert result.finish.usage.cached_by_tier["host"] > 0


async def test_p11_w07_after_a_reboot_the_disk_tier_serves() -> None:
    async with stack() as made:
        await ask_all(made, PROMPTS, TOKENS)
        await settled(made)
        await made.stop()
        made.remove_arena()
        await made.start()
        results = await ask_all(made, PROMPTS, TOKENS)
        assert [result.ids for result in results] == WANTED
        for result in results:
            assert result.finish.usage.cached_by_tier["disk"] > 0
            assert result.finish.usage.cached_tokens <= result.finish.usage.prompt_tokens - 1


async def test_honcho_killed_leaves_no_orphan() -> None:
    async with stack() as made:
        pids = made.running()
        assert len(pids) == 10
        assert made.process is not None
        made.process.kill()
        made.process.wait()
        with trio.fail_after(20):
            for pid in pids:
                await wait_exit(pid)
        made.process = None
        await made.start()


STARTER = """
import json, trio
from ops.cli.logs import quiet_logs
from ops.stack import Stack
from tests.e2e.kit import TOY
quiet_logs()
stack = Stack(TOY, share_models=False)
trio.run(stack.start)
places = [stack.base, stack.places.run, stack.places.arena()]
print(json.dumps([[stack.process.pid, *stack.running()], list(map(str, places))]), flush=True)
trio.run(trio.sleep_forever)
"""


@contextmanager
def starter() -> Iterator[tuple["subprocess.Popen[bytes]", list[int]]]:
    """A program that has started a stack for itself; pids of honcho, services and supervisors."""
    process = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE)
    assert process.stdout is not None
    places: list[str] = []
    try:
        pids, places = json.loads(process.stdout.readline())
        yield process, pids
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        for place in places:
            Path(place).unlink(missing_ok=True) if place.endswith("-arena") else shutil.rmtree(place)


@pytest.mark.parametrize("paused", [False, True])
async def test_a_stack_ends_with_the_program_that_started_it_for_itself(paused: bool) -> None:
    """A killed test or benchmark can't stop what it has started; also when it had stopped honcho and services."""
    with starter() as (process, pids):
        assert len(pids) == 11
        if paused:
            for pid in pids[:4]:
                os.kill(pid, signal.SIGSTOP)
        process.kill()
        with trio.fail_after(DEADLINE_S):
            for pid in pids:
                await wait_exit(pid)


async def test_i08_ctrl_c_leaves_no_process_socket_or_temporary_file() -> None:
    async with stack() as made:
        await ask_all(made, PROMPTS, TOKENS)
        await made.stop(signal.SIGINT)
        assert not made.running()
        assert not list(made.places.run.glob("*.sock"))
        assert not [path for path in made.places.home.rglob("*") if path.suffix in (".tmp", ".part")]
        assert made.places.arena().exists()


CLIENT = """
import sys, trio
from pathlib import Path
from ops.client import connected
from shared.messages.base import pack_u32
from shared.messages.front import Generate, Sampling
from shared.paths import Places
async def main():
    request = Generate(id=sys.argv[2], ids=pack_u32(range(50)), detached=sys.argv[3] == "detached",
                       sampling=Sampling(max_tokens=2000, temperature=0.0, ignore_eos=True))
    async with connected(Places(Path(sys.argv[1]))) as client:
        async with client.generate(request) as stream:
            async for chunk in stream:
                print(chunk.end, flush=True)
trio.run(main)
"""


@pytest.mark.parametrize("kind", ["attached", "detached"])
async def test_a_killed_client_ends_its_request_after_the_grace_unless_detached(kind: str) -> None:
    async with stack(PERDURE_SCHEDULER__GRACE_S="0.2") as made:
        name = new_id()
        command = [sys.executable, "-c", CLIENT, str(made.places.home), name, kind]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: ASYNC220
        assert process.stdout is not None
        while not (await trio.to_thread.run_sync(process.stdout.readline)).strip().isdigit():
            continue  # the client's log comes before its tokens
        process.kill()
        process.communicate()
        await settled(made)
        with trio.fail_after(DEADLINE_S):
            rows = await ledger_rows(made, 1)
        assert rows[0]["finish_reason"] == ("length" if kind == "detached" else "cancelled")
        if kind == "detached":
            assert rows[0]["completion_tokens"] == 2000
