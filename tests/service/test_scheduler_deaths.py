"""The scheduler as a process of its own, killed at its named steps; and a worker whose death is a proof."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import trio

from shared.messages.engine import Journaled
from shared.messages.front import Rejected
from shared.messages.hello import Bye
from shared.paths import Places
from shared.peers import PeerGone
from shared.testing import TestPeer, dialled, ended
from tests.service.scheduler_kit import FACTS, PlayedDetokenizer, PlayedWorker, a_submit, expected, staged, submit

ID = "a" * 32
PROMPT = [5, 6, 7, 8, 9]
TOKENS = 14


@contextmanager
def a_process(places: Places, incarnation: int, **hooks: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m services.scheduler`; killed at the end if it still runs."""
    environ = os.environ | {
        "PERDURE_HOME": str(places.home),
        "PERDURE_INCARNATION": str(incarnation),
        "PERDURE_CONFIG": os.devnull,
        "PERDURE_SCHEDULER__STORE_WAIT_S": "0",
        "PERDURE_SCHEDULER__BURST_S": "0",
        **{f"PERDURE_FAULTS__HOOKS__{name.upper()}": action for name, action in hooks.items()},
    }
    process = subprocess.Popen([sys.executable, "-m", "services.scheduler"], env=environ)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def counterparts(places: Places, life: int) -> AsyncIterator[tuple[TestPeer, PlayedWorker, PlayedDetokenizer]]:
    async with (
        dialled("tokenizer", "scheduler", places, incarnation=life) as (tokenizer, _),
        dialled("worker", "scheduler", places, incarnation=life) as worker,
        dialled("detokenizer", "scheduler", places, incarnation=life) as detokenizer,
    ):
        yield tokenizer, PlayedWorker(*worker), PlayedDetokenizer(*detokenizer)


async def live_until_death(places: Places, process: subprocess.Popen[bytes]) -> dict[str, list[int]]:
    """Submits, works and listens until the scheduler is gone: what was promised and told by then."""
    promised: list[int] = []
    async with counterparts(places, 1) as (tokenizer, worker, detokenizer):
        detokenizer.credit(1000)
        peer = await tokenizer.dial("scheduler").wait_up()

        async def work() -> None:
            try:
                await worker.introduce()
                await worker.run()
            except PeerGone:
                return

        async def listen() -> None:
            while True:
                await detokenizer.one()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            nursery.start_soon(listen)
            try:
                answer = await peer.ask(a_submit(ID, PROMPT, max_tokens=TOKENS), Journaled, deadline_s=10)
                promised.append(answer.prompt_tokens)
            except PeerGone:
                pass
            with trio.fail_after(10):
                await ended(process)
            nursery.cancel_scope.cancel()
    return {"promised": promised, "told": detokenizer.tokens_of(ID)}


CASES = [
    ("journal_before_accept", "exit", False, 0),
    ("journal_after_accept", "exit", True, 0),
    ("scheduler_before_step", "exit:3", True, 2),
    ("scheduler_after_step", "exit:3", True, 3),
    ("scheduler_after_step", "exit:6", True, 6),
]


@pytest.mark.parametrize(("step", "action", "known", "writes"), CASES)
async def test_dying_at_each_named_step_loses_and_doubles_nothing(
    places: Places, step: str, action: str, known: bool, writes: int
) -> None:
    """`writes`: of steps, by then; one covers a step, or two that came together."""
    with a_process(places, 1, **{step: action}) as process:
        before = await live_until_death(places, process)
        assert process.returncode == -9
    assert bool(before["promised"]) == (writes > 0)
    with a_process(places, 2):
        async with counterparts(places, 2) as (tokenizer, worker, detokenizer):
            detokenizer.credit(1000)
            peer = await tokenizer.dial("scheduler").wait_up()
            answer = await submit(peer, a_submit(ID, PROMPT, max_tokens=TOKENS))
            assert isinstance(answer, Journaled)
            assert answer.known is known
            await detokenizer.until(lambda: detokenizer.synced and ID in detokenizer.stories)
            journaled = detokenizer.tokens_of(ID)
            assert writes <= len(journaled) <= 2 * writes
            assert journaled == expected(PROMPT, len(journaled))
            assert before["told"] == journaled[: len(before["told"])]  # journal before emit
            await worker.introduce()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker.run)
                await detokenizer.finished(ID)
                nursery.cancel_scope.cancel()
    assert detokenizer.tokens_of(ID) == expected(PROMPT, TOKENS)


async def test_a_planned_stop_ends_with_code_0_and_leaves_no_socket(places: Places) -> None:
    with a_process(places, 1) as process:
        async with dialled("tokenizer", "scheduler", places) as (_, peer):
            await submit(peer, a_submit(ID, PROMPT))
        process.terminate()
        with trio.fail_after(10):
            assert await ended(process) == 0
    assert not (places.run / "scheduler.sock").exists()
    async with staged(places, incarnation=2) as stage:
        assert stage.scheduler.core.retained() == [ID]


async def test_a_second_scheduler_on_one_home_is_refused_and_the_first_goes_on(places: Places) -> None:
    with a_process(places, 1):
        async with dialled("tokenizer", "scheduler", places) as (_, peer):  # so the first holds the home
            with a_process(places, 2) as second, trio.fail_after(20):
                assert await ended(second) == 4
            assert isinstance(await submit(peer, a_submit(ID, PROMPT)), Journaled)


def _a_child() -> subprocess.Popen[bytes]:
    """Runs until it is killed or its standard input ends."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


@asynccontextmanager
async def a_worker_of_its_own_process(
    places: Places, incarnation: int
) -> AsyncIterator[tuple[PlayedWorker, subprocess.Popen[bytes]]]:
    """A played worker that claims a child's pid, so that killing the child is the proof of its exit."""
    child = _a_child()
    node = TestPeer("worker", places, incarnation=incarnation)
    node.pid = child.pid
    try:
        async with trio.open_nursery() as nursery:
            node.nursery = nursery
            peer = await node.dial("scheduler").wait_up()
            yield PlayedWorker(node, peer), child
            nursery.cancel_scope.cancel()
    finally:
        node.close()
        child.kill()
        child.communicate()


async def test_a_worker_s_pool_is_given_up_when_its_exit_is_proven_not_when_it_falls_silent(places: Places) -> None:
    async with staged(places) as stage:
        tokenizer, detokenizer = await stage.tokenizer(), await stage.detokenizer()
        core = stage.scheduler.core
        async with a_worker_of_its_own_process(places, 1) as (worker, child):
            await worker.introduce()
            await submit(tokenizer, a_submit(ID, PROMPT, max_tokens=6))
            for _ in range(3):
                await worker.step()
            await worker.plan()
            worker.peer.send(Bye())  # its connection is over, its process is not: a copy of it might still run
            await stage.until(lambda: not stage.scheduler.worker.ready)
            assert core.statistics().kv is not None
            assert core.statistics().counters["worker_losses"] == 0
            child.kill()
            await stage.until(lambda: core.statistics().kv is None)
            assert core.statistics().counters["worker_losses"] == 1
        again = await stage.worker(2)
        async with stage.working(again):
            await detokenizer.finished(ID)
        assert detokenizer.tokens_of(ID) == expected(PROMPT, 6)
        assert again.plans[0].rows[0].start == 0


async def test_without_a_worker_nothing_is_answered_wrongly_and_a_new_one_begins(places: Places) -> None:
    async with staged(places) as stage:
        tokenizer, detokenizer = await stage.tokenizer(), await stage.detokenizer()
        await submit(tokenizer, a_submit(ID, PROMPT))
        too_long = await submit(tokenizer, a_submit("b" * 32, [1] * (FACTS.blocks * FACTS.block_tokens + 1)))
        assert isinstance(too_long, Journaled)  # nobody knows the pool yet
        worker = await stage.worker()
        await stage.until(lambda: stage.scheduler.worker.ready)
        refused = await submit(tokenizer, a_submit("c" * 32, [1] * (FACTS.blocks * FACTS.block_tokens + 1)))
        assert isinstance(refused, Rejected)
        assert refused.code == "never_fits"
        async with stage.working(worker):
            await detokenizer.finished(ID, "b" * 32)
        assert detokenizer.stories["b" * 32].finish.reason == "error"
