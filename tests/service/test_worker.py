"""The worker over real sockets, with the test playing the scheduler, and a real file as the arena."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from services.worker.actor import MAX_PLANS, Worker
from shared.config import Config, FaultsConfig, KVConfig, ModelConfig
from shared.messages.engine import Copy, Idle, Plan, Quiesce, Result
from shared.messages.hello import Snapshot, Status
from shared.model.toy import toy_generate
from shared.paths import Places
from shared.testing import dialled, running
from tests.service.played_plans import FRONT, Playing, Scheduler, key_of, launch, make_arena, meet, row

SEED = 7
BLOCK = 1024
BLOCKS = 40
ARENA = 64 * BLOCK
TOY = {"PERDURE_MODEL__SOURCE": f"toy:{SEED}", "PERDURE_KV__POOL_BYTES": str(BLOCKS * BLOCK)}


def config(**faults: object) -> Config:
    return Config(
        model=ModelConfig(source=f"toy:{SEED}"),
        kv=KVConfig(pool_bytes=BLOCKS * BLOCK),
        faults=FaultsConfig(**faults),  # type: ignore[arg-type]
    )


@asynccontextmanager
async def played(places: Places, **faults: object) -> AsyncIterator[Playing]:
    arena = make_arena(places.home / "arena", ARENA)
    async with running(Scheduler, places) as mailbox, running(Worker, places, config(**faults)):
        yield await meet(mailbox, arena, 1)


async def test_it_says_what_it_is_and_serves_steps_that_equal_the_oracle(places: Places) -> None:
    async with played(places) as scheduler:
        ready = scheduler.ready
        assert (ready.model, ready.vocab, ready.max_context) == ("toy:7", 512, 4096)
        assert (ready.kv.blocks, ready.kv.block_bytes, ready.kv.block_tokens) == (BLOCKS, BLOCK, 16)
        assert len(ready.kv.fingerprint) == 32
        prompt = list(range(100, 140))
        blocks = [9, 3, 27, 0]
        assert await scheduler.generate(prompt, 20, blocks, chunk=64) == toy_generate(SEED, prompt, 20)


@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 39])
async def test_w25_chunked_prefill_equals_whole_prefill_equals_oracle(places: Places, chunk: int) -> None:
    async with played(places) as scheduler:
        prompt = [(31 * i) % 512 for i in range(40)]
        expected = toy_generate(SEED, prompt, 12)
        assert await scheduler.generate(prompt, 12, [5, 4, 3, 2], chunk=40) == expected
        assert await scheduler.generate(prompt, 12, [30, 8, 31, 7], chunk=chunk) == expected


async def test_w25_a_retracted_request_goes_on_in_other_blocks_as_if_nothing_had_been(places: Places) -> None:
    """The worker's half: every 3 tokens all KV is lost; prompt and output are fed again in chunks of 16."""
    async with played(places) as scheduler:
        prompt = [(5 * i) % 512 for i in range(50)]
        expected = toy_generate(SEED, prompt, 40)
        out: list[int] = []
        lives = 0
        while len(out) < 40:
            blocks = [(lives * 7 + i) % BLOCKS for i in range(6)]
            out += await scheduler.generate(prompt + out, min(3, 40 - len(out)), blocks, chunk=16)
            lives += 1
        assert out == expected


@pytest.mark.parametrize("size", [1, 15, 16, 17, 32])
async def test_w04_all_but_the_last_token_cached(places: Places, size: int) -> None:
    async with played(places) as scheduler:
        prompt = [(3 * i + 1) % 512 for i in range(size)]
        expected = toy_generate(SEED, prompt, 6)
        assert await scheduler.generate(prompt, 6, [7, 1, 20], chunk=99) == expected
        for _ in range(2):
            assert await scheduler.generate(prompt, 6, [7, 1, 20], chunk=99, cached=size - 1) == expected


async def test_a10_a_request_that_outgrows_its_blocks_ends_alone_and_the_next_is_fine(places: Places) -> None:
    """The worker's half: a row whose table no longer covers its positions is an error of that row."""
    async with played(places) as scheduler:
        prompt = [4] * 96
        blocks = list(range(6))
        scheduler.plan(row(1, 0, [*prompt, 5], blocks), row(2, 0, [1, 2, 3], [8]))
        first, second = (await scheduler.result()).rows
        assert first.error is not None
        assert "6 blocks of 16 tokens do not cover 97 positions" in first.error
        assert second.token == toy_generate(SEED, [1, 2, 3], 1)[0]
        assert await scheduler.generate(prompt, 1, blocks, chunk=96) == toy_generate(SEED, prompt, 1)


async def test_plans_made_ahead_draw_the_same_and_a_stop_id_drops_what_was_planned_behind_it(places: Places) -> None:
    async with played(places) as scheduler:
        prompt = [(7 * i) % 512 for i in range(40)]
        expected = toy_generate(SEED, prompt, 20)
        assert await scheduler.generate_ahead(prompt, 20, [4, 2, 9, 1]) == (expected, 0)
        stop = expected[7]
        until = expected[: expected.index(stop) + 1]
        found, dropped = await scheduler.generate_ahead(prompt, 20, [4, 2, 9, 1], stop_ids=(stop, 5000))
        assert found[: len(until)] == until
        assert dropped == 20 - len(until)


async def test_saved_blocks_are_loaded_into_other_blocks_and_go_on_equally(places: Places) -> None:
    async with played(places) as scheduler:
        prompt = [(11 * i) % 512 for i in range(48)]
        expected = toy_generate(SEED, prompt, 8)
        assert await scheduler.generate(prompt, 8, [0, 1, 2, 3], chunk=48) == expected
        ok, sums = await scheduler.copied(True, Copy(0, 50 * BLOCK), Copy(1, 7 * BLOCK), Copy(2, 8 * BLOCK))
        assert ok == [1, 1, 1]
        loads = [Copy(20, 50 * BLOCK, sums[0]), Copy(11, 7 * BLOCK, sums[1]), Copy(30, 8 * BLOCK, sums[2])]
        assert await scheduler.copied(False, *loads) == ([1, 1, 1], sums)
        assert await scheduler.generate(prompt, 8, [20, 11, 30, 31], chunk=48, cached=47) == expected


async def test_corrupted_arena_bytes_are_a_miss_and_a_recompute_gives_the_right_tokens(places: Places) -> None:
    async with played(places) as scheduler:
        prompt = [(13 * i) % 512 for i in range(33)]
        expected = toy_generate(SEED, prompt, 8)
        assert await scheduler.generate(prompt, 8, [0, 1, 2], chunk=33) == expected
        _, sums = await scheduler.copied(True, Copy(0, 0), Copy(1, BLOCK))
        with scheduler.arena.open("r+b") as file:
            file.seek(FRONT + BLOCK + 77)
            file.write(b"\xaa")
        ok, seen = await scheduler.copied(False, Copy(10, 0, sums[0]), Copy(11, BLOCK, sums[1]))
        assert ok == [1, 0]
        assert seen == [sums[0], 0]
        assert await scheduler.generate(prompt, 8, [10, 11, 12], chunk=33, cached=16) == expected


async def test_a_new_arena_file_is_used_once_its_key_is_told_and_never_under_the_old_one(places: Places) -> None:
    async with played(places) as scheduler:
        await scheduler.generate([1] * 16, 1, [0], chunk=16)
        _, sums = await scheduler.copied(True, Copy(0, 0))
        old = key_of(scheduler.arena)
        scheduler.arena.unlink()
        make_arena(scheduler.arena, ARENA)
        assert (await scheduler.copied(False, Copy(1, 0, sums[0])))[0] == [0]  # the new file is empty
        assert (await scheduler.copied(True, Copy(0, BLOCK), key=old))[0] == [0]
        assert scheduler.arena.read_bytes()[FRONT:] == bytes(ARENA)
        assert (await scheduler.copied(True, Copy(0, 0)))[0] == [1]
        assert scheduler.arena.read_bytes()[FRONT : FRONT + BLOCK] != bytes(BLOCK)


async def test_quiesce_in_the_middle_stops_copies_and_drops_what_is_queued(places: Places) -> None:
    """Each copy takes 10 ms here; of two hundred, the few before Quiesce are made and none after Idle."""
    async with played(places, hooks={"worker_in_save": "delay:0.01"}) as scheduler:
        await scheduler.generate([1] * 16, 1, [0], chunk=16)
        for _ in range(4):
            scheduler.transfer(True, *(Copy(0, i * BLOCK) for i in range(50)))
        scheduler.plan(row(1, 0, [1, 2], [4]), epoch=0)  # of an epoch that never was
        await scheduler.quiesce(2)
        written = scheduler.arena.read_bytes().count(bytes(BLOCK))
        assert written > 10  # most slots are still empty
        assert await scheduler.step(row(1, 0, [1, 2], [4])) == toy_generate(SEED, [1, 2], 1)
        assert scheduler.arena.read_bytes().count(bytes(BLOCK)) == written


async def test_messages_of_an_older_epoch_are_dropped(places: Places) -> None:
    async with played(places) as scheduler:
        await scheduler.quiesce(5)
        scheduler.plan(row(1, 0, [9, 9], [0]), epoch=1)
        scheduler.transfer(True, Copy(0, 0), epoch=4)
        assert await scheduler.step(row(2, 0, [1, 2], [4])) == toy_generate(SEED, [1, 2], 1)  # nothing came before it
        async with dialled("admin", "worker", places) as (_, admin):
            seen = await admin.ask(Status(), Snapshot, deadline_s=5)
        assert seen.data["drops"]["older_epoch"] == 2
        assert seen.data["steps"]["steps"] == 1


async def test_a_plan_beyond_the_bound_fails_at_once_and_the_others_are_answered(places: Places) -> None:
    async with played(places, hooks={"worker_in_step": "delay:0.05"}) as scheduler:
        seqs = [scheduler.plan(row(i, 0, [i, 2], [i])) for i in range(MAX_PLANS + 1)]
        refused = await scheduler.result()
        assert refused.seq == seqs[-1]
        assert refused.rows[0].error == f"the worker has {MAX_PLANS} plans"
        for i in range(MAX_PLANS):
            result = await scheduler.result()
            assert (result.seq, result.rows[0].token) == (seqs[i], toy_generate(SEED, [i, 2], 1)[0])


async def test_requests_are_answered_as_replies_and_pushes_as_pushes(places: Places) -> None:
    async with played(places) as scheduler:
        plan = Plan(epoch=1, seq=77, rows=(row(1, 0, [5], [0]),))
        result = await scheduler.peer.ask(plan, Result, deadline_s=5)
        assert (result.seq, result.rows[0].token) == (77, toy_generate(SEED, [5], 1)[0])
        scheduler.peer.send(Quiesce(epoch=9))
        _, head, idle = await scheduler.mailbox.receive(Idle)
        assert (head.re, idle.epoch) == (0, 9)


async def test_a_wrong_row_ends_alone(places: Places) -> None:
    async with played(places) as scheduler:
        scheduler.plan(row(1, 0, [5], [BLOCKS]), row(2, 0, [5], [1]), row(3, 5, [5], []))
        rows = (await scheduler.result()).rows
        assert [r.error is None for r in rows] == [False, True, False]
        assert rows[1].token == toy_generate(SEED, [5], 1)[0]


async def test_a_new_scheduler_is_told_what_the_worker_is_and_old_work_is_forgotten(places: Places) -> None:
    arena = make_arena(places.home / "arena", ARENA)
    slow = config(hooks={"worker_in_save": "delay:0.01"})
    async with trio.open_nursery() as nursery:
        async with running(Worker, places, slow):
            async with running(Scheduler, places, incarnation=1) as mailbox:
                first = await meet(mailbox, arena, 1)
                await first.step(row(1, 0, [5], [1]))
                first.transfer(True, *(Copy(0, i * BLOCK) for i in range(60)))
            async with running(Scheduler, places, incarnation=2) as mailbox:
                second = await meet(mailbox, arena, 2)
                assert second.ready == first.ready
                empty = arena.read_bytes().count(bytes(BLOCK))
                assert await second.step(row(1, 0, [6], [1])) == toy_generate(SEED, [6], 1)
                assert arena.read_bytes().count(bytes(BLOCK)) == empty
        nursery.cancel_scope.cancel()


async def test_a_planned_stop_lets_queued_steps_answer(places: Places) -> None:
    slow = config(hooks={"worker_in_step": "delay:0.2"})
    async with running(Scheduler, places) as mailbox, running(Worker, places, slow) as worker:
        scheduler = await meet(mailbox, places.home / "arena", 1)
        scheduler.plan(row(1, 0, [5], [1]))
        scheduler.plan(row(2, 0, [6], [2]))
        assert (await scheduler.result()).rows[0].token == toy_generate(SEED, [5], 1)[0]
        worker.request_stop()  # the second step has just begun
        assert (await scheduler.result()).rows[0].token == toy_generate(SEED, [6], 1)[0]


async def test_status_shows_model_pool_and_work(places: Places) -> None:
    async with played(places) as scheduler, dialled("admin", "worker", places) as (_, admin):
        await scheduler.generate([1] * 20, 3, [0, 1], chunk=16)
        await scheduler.copied(True, Copy(0, 0), Copy(99, 0))
        snapshot = await admin.ask(Status(), Snapshot, deadline_s=5)
        data = snapshot.data
        assert snapshot.ready
        assert (data["model"], data["backend"], data["epoch"]) == ("toy:7", "toy", 1)
        assert data["pool"]["blocks"] == BLOCKS
        assert (data["steps"]["steps"], data["steps"]["tokens"], data["steps"]["drawn"]) == (4, 22, 3)
        assert (data["transfers"]["saved"], data["transfers"]["failed"]) == (1, 1)
        assert data["transfers"]["bytes_saved"] == BLOCK


async def test_killed_in_a_step_it_starts_with_an_empty_pool_and_the_arena_brings_its_blocks_back(
    places: Places,
) -> None:
    arena = make_arena(places.home / "arena", ARENA)
    prompt = [(17 * i) % 512 for i in range(40)]
    expected = toy_generate(SEED, prompt, 10)
    async with running(Scheduler, places) as mailbox:
        first = launch(places, **TOY, PERDURE_FAULTS__HOOKS__WORKER_IN_STEP="exit:4", PERDURE_INCARNATION="1")
        try:
            scheduler = await meet(mailbox, arena, 1)
            assert await scheduler.generate(prompt, 3, [0, 1, 2], chunk=40) == expected[:3]
            _, sums = await scheduler.copied(True, Copy(0, 0), Copy(1, BLOCK))
            scheduler.plan(row(1, 42, expected[2:3], [0, 1, 2]))
            await scheduler.peer.wait_gone()
            assert scheduler.peer.exit_proven
            assert first.wait() == -signal.SIGKILL
        finally:
            first.kill()
            first.wait()
        second = launch(places, **TOY, PERDURE_INCARNATION="2")
        try:
            scheduler = await meet(mailbox, arena, 2)
            ok, _ = await scheduler.copied(False, Copy(7, 0, sums[0]), Copy(5, BLOCK, sums[1]))
            assert ok == [1, 1]
            rest = await scheduler.generate(prompt + expected[:3], 7, [7, 5, 3, 1], chunk=16, cached=32)
            assert rest == expected[3:]
            second.terminate()
            assert second.wait() == 0
        finally:
            second.kill()
            second.wait()


@pytest.mark.parametrize("save", [True, False])
async def test_killed_in_a_copy_its_exit_is_proven_and_nothing_was_answered(places: Places, save: bool) -> None:
    arena = make_arena(places.home / "arena", ARENA)
    hook = "PERDURE_FAULTS__HOOKS__WORKER_IN_SAVE" if save else "PERDURE_FAULTS__HOOKS__WORKER_IN_LOAD"
    async with running(Scheduler, places) as mailbox:
        process = launch(places, **TOY, **{hook: "exit:2"})
        try:
            scheduler = await meet(mailbox, arena, 1)
            scheduler.transfer(save, Copy(0, 0), Copy(1, BLOCK), Copy(2, 2 * BLOCK))
            await scheduler.peer.wait_gone()
            assert scheduler.peer.exit_proven
            assert process.wait() == -signal.SIGKILL
        finally:
            process.kill()
            process.wait()


def test_a_model_that_is_refused_ends_the_start_in_one_line(places: Places) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.worker"],
        env=os.environ | {"PERDURE_HOME": str(places.home), "PERDURE_MODEL__SOURCE": "toy:seven"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "toy:<seed>" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_toy_worker_imports_no_torch(places: Places) -> None:
    code = (
        "import sys; import services.worker.actor; from services.worker.loading import load_runner; "
        "from shared.config import Config, ModelConfig; "
        "load_runner(Config(model=ModelConfig(source='toy:1')), None, print); "
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
