"""The scheduler's shell over real sockets, its counterparts played by hand."""

import pytest
from msgspec.structs import replace

from services.scheduler.actor import CHECK_BLOCKS, Scheduler
from services.scheduler.engine import Engine
from services.scheduler.journal_segment import HEADER_BYTES, pack_header
from services.scheduler.ledger import read_ledger
from shared.config import Config, ConfigError, FaultsConfig, SchedulerConfig
from shared.messages.engine import CancelRequest, Idle, Journaled, Quiesce, StopAt, WorkerReady
from shared.messages.front import Cancelled, Rejected
from shared.messages.hello import Snapshot, Status
from shared.paths import Places
from shared.peers import DeadlinePassed
from shared.testing import dialled
from tests.service.scheduler_kit import (
    CONFIG,
    FACTS,
    PlayedDetokenizer,
    PlayedWorker,
    a_submit,
    expected,
    result_of,
    staged,
    submit,
)

PROMPT = [5, 6, 7, 8, 9]


async def test_a_request_is_journaled_planned_and_told(places: Places) -> None:
    async with staged(places) as stage:
        worker, detokenizer, tokenizer = await stage.worker(), await stage.detokenizer(), await stage.tokenizer()
        answer = await submit(tokenizer, a_submit("a" * 32, PROMPT))
        assert answer == Journaled(id="a" * 32, known=False, prompt_tokens=5)
        for _ in range(3):
            await worker.step()
        await detokenizer.finished("a" * 32)
        story = detokenizer.stories["a" * 32]
        assert story.tokens == expected(PROMPT, 3)
        assert story.finish.reason == "length"
        assert story.finish.usage.completion_tokens == 3


async def test_the_first_news_of_a_request_come_before_any_token_so_that_clients_can_attach(places: Places) -> None:
    async with staged(places) as stage:
        detokenizer, tokenizer = await stage.detokenizer(), await stage.tokenizer()
        await submit(tokenizer, a_submit("a" * 32, PROMPT))  # there is no worker at all
        await detokenizer.until(lambda: "a" * 32 in detokenizer.stories)
        assert detokenizer.stories["a" * 32].tokens == []


async def test_without_a_worker_it_sleeps_once_its_wait_for_the_store_is_over(places: Places) -> None:
    async with staged(places, Config(scheduler=SchedulerConfig(store_wait_s=0.05))) as stage:
        await stage.until(lambda: stage.scheduler._next_turn_at() == float("inf"))


async def test_the_same_submit_again_is_the_same_request_and_another_one_a_conflict(places: Places) -> None:
    async with staged(places) as stage:
        tokenizer = await stage.tokenizer()
        first = a_submit("a" * 32, PROMPT)
        assert (await submit(tokenizer, first)).known is False
        assert (await submit(tokenizer, first)).known is True
        answer = await submit(tokenizer, a_submit("a" * 32, PROMPT, digest=b"z" * 32))
        assert isinstance(answer, Rejected)
        assert answer.code == "conflict"


async def test_a_submit_whose_fields_do_not_fit_each_other_is_refused_and_nothing_breaks(places: Places) -> None:
    async with staged(places) as stage:
        tokenizer = await stage.tokenizer()
        for bad in (
            a_submit("a" * 32, PROMPT, digest=b"short"),
            a_submit("b" * 300, PROMPT),
            a_submit("", PROMPT, digest=b"d" * 32),
        ):
            answer = await submit(tokenizer, bad)
            assert isinstance(answer, Rejected)
            assert answer.code == "bad_request"
        assert isinstance(await submit(tokenizer, a_submit("c" * 32, PROMPT)), Journaled)


async def test_requests_of_an_earlier_life_go_on_where_they_were_with_no_token_lost_or_doubled(places: Places) -> None:
    prompts = {letter * 32: [ord(letter)] * 6 for letter in "abc"}
    async with staged(places) as stage:
        worker, tokenizer = await stage.worker(), await stage.tokenizer()
        for id, prompt in prompts.items():
            await submit(tokenizer, a_submit(id, prompt, max_tokens=6))
        for _ in range(4):
            await worker.step()
        await worker.plan()  # and dies in the middle of a step
    async with staged(places, incarnation=2) as stage:
        tokenizer, detokenizer = await stage.tokenizer(), await stage.detokenizer()
        assert (await submit(tokenizer, a_submit("a" * 32, prompts["a" * 32], max_tokens=6))).known is True
        await detokenizer.until(lambda: detokenizer.synced)
        before = {id: len(story.tokens) for id, story in detokenizer.stories.items()}
        assert sum(before.values()) >= 3
        worker = await stage.worker(incarnation=2)
        async with stage.working(worker):
            await detokenizer.finished(*prompts)
        for id, prompt in prompts.items():
            assert detokenizer.stories[id].tokens == expected(prompt, 6)
            assert detokenizer.stories[id].openings == 1
        fed = [row.start for plan in worker.plans for row in plan.rows]
        assert fed.count(0) == 3  # each was prefilled again once, prompt and output together


async def test_a_request_that_ended_is_told_again_after_a_restart_and_the_ledger_has_one_row(places: Places) -> None:
    async with staged(places) as stage:
        worker, tokenizer = await stage.worker(), await stage.tokenizer()
        await submit(tokenizer, a_submit("a" * 32, PROMPT, max_tokens=2))
        await worker.step()
        await worker.step()
        detokenizer = await stage.detokenizer()
        await detokenizer.finished("a" * 32)
    for incarnation in (2, 3):
        async with staged(places, incarnation=incarnation) as stage:
            detokenizer = await stage.detokenizer()
            await detokenizer.until(lambda d=detokenizer: d.synced)
            assert detokenizer.stories["a" * 32].tokens == expected(PROMPT, 2)
            assert detokenizer.stories["a" * 32].finish.reason == "length"
    rows = read_ledger(places.ledger)
    assert [row["id"] for row in rows] == ["a" * 32]


async def test_a_stop_string_ends_the_request_at_its_token(places: Places) -> None:
    async with staged(places) as stage:
        worker, detokenizer, tokenizer = await stage.worker(), await stage.detokenizer(), await stage.tokenizer()
        await submit(tokenizer, a_submit("a" * 32, PROMPT, max_tokens=50, stop=("x",)))
        for _ in range(3):
            await worker.step()
        await detokenizer.until(lambda: len(detokenizer.tokens_of("a" * 32)) == 3)
        detokenizer.peer.send(StopAt(id="a" * 32, at=2))
        await detokenizer.finished("a" * 32)
        assert detokenizer.stories["a" * 32].finish.reason == "stop"
        assert detokenizer.stories["a" * 32].finish.usage.completion_tokens == 2


async def test_cancel_ends_a_request_of_the_same_principal_only(places: Places) -> None:
    async with staged(places) as stage:
        detokenizer, tokenizer = await stage.detokenizer(), await stage.tokenizer()
        await submit(tokenizer, a_submit("a" * 32, PROMPT))
        stranger = await tokenizer.ask(CancelRequest(id="a" * 32, principal="other"), Cancelled, deadline_s=5)
        assert stranger.known is False
        mine = await tokenizer.ask(CancelRequest(id="a" * 32, principal="local"), Cancelled, deadline_s=5)
        assert mine.known is True
        await detokenizer.finished("a" * 32)
        assert detokenizer.stories["a" * 32].finish.reason == "cancelled"


async def test_a_deadline_of_the_engine_is_met_without_any_message(places: Places) -> None:
    async with staged(places) as stage:
        detokenizer, tokenizer = await stage.detokenizer(), await stage.tokenizer()
        await submit(tokenizer, a_submit("a" * 32, PROMPT, deadline_s=0.05))
        await detokenizer.finished("a" * 32)
        assert detokenizer.stories["a" * 32].finish.reason == "deadline"


async def test_what_is_over_and_past_its_retention_is_forgotten_by_all(places: Places) -> None:
    config = Config(scheduler=SchedulerConfig(result_ttl_s=0.05, store_wait_s=0.0))
    async with staged(places, config) as stage:
        detokenizer, tokenizer = await stage.detokenizer(), await stage.tokenizer()
        await submit(tokenizer, a_submit("a" * 32, PROMPT, deadline_s=0.01))
        message = await detokenizer.one()
        while type(message).__name__ != "Forget":
            message = await detokenizer.one()
        assert message.id == "a" * 32
        assert stage.scheduler.durable.journal.statistics()["live"] == 0
        assert (await submit(tokenizer, a_submit("a" * 32, PROMPT))).known is False


async def test_i05_a_stopped_detokenizer_costs_marks_and_catches_up_in_few_messages(places: Places) -> None:
    async with staged(places) as stage:
        worker, tokenizer = await stage.worker(), await stage.tokenizer()
        detokenizer = await stage.detokenizer(credit=2)
        ids = [letter * 32 for letter in "abcd"]
        for id in ids:
            await submit(tokenizer, a_submit(id, PROMPT, max_tokens=20))
        async with stage.working(worker):
            await stage.until(lambda: stage.finished() == 4)
        feed = stage.scheduler.feed
        assert feed.credit == 0
        assert feed.due <= len(ids) + 1
        told = sum(story.messages for story in detokenizer.stories.values())
        detokenizer.credit(100)
        await detokenizer.finished(*ids)
        assert all(story.tokens == expected(PROMPT, 20) for story in detokenizer.stories.values())
        assert sum(story.messages for story in detokenizer.stories.values()) - told <= 3 * len(ids)


async def test_a_new_detokenizer_is_told_everything_then_synced_then_what_follows(places: Places) -> None:
    async with staged(places) as stage:
        worker, tokenizer = await stage.worker(), await stage.tokenizer()
        await submit(tokenizer, a_submit("a" * 32, PROMPT, max_tokens=5))
        await submit(tokenizer, a_submit("b" * 32, PROMPT, max_tokens=1))
        for _ in range(2):
            await worker.step()
        for incarnation in (1, 2, 3):
            async with dialled("detokenizer", "scheduler", places, incarnation=incarnation) as (node, peer):
                detokenizer = PlayedDetokenizer(node, peer)
                detokenizer.credit(100)
                await detokenizer.until(lambda d=detokenizer: d.synced)
                assert list(detokenizer.stories) == ["a" * 32, "b" * 32]
                if incarnation == 3:
                    async with stage.working(worker):
                        await detokenizer.finished("a" * 32, "b" * 32)
                    assert detokenizer.stories["a" * 32].tokens == expected(PROMPT, 5)


async def test_nothing_is_planned_before_idle_of_this_very_epoch(places: Places) -> None:
    async with staged(places) as stage:
        tokenizer = await stage.tokenizer()
        await submit(tokenizer, a_submit("a" * 32, PROMPT))
        node, peer = await stage.dial("worker")
        worker = PlayedWorker(node, peer)
        ready = WorkerReady(
            model="m", architecture="a", vocab=9, max_context=99, backend="b", numerics="n", kv=FACTS, limits={}
        )
        peer.send(ready)
        _, head, quiesce = await node.receive_request()
        assert isinstance(quiesce, Quiesce)
        assert not stage.scheduler.worker.ready
        node.answer(peer, head, Idle(epoch=quiesce.epoch - 1))  # of another life: no answer to this question
        _, head, again = await node.receive_request()
        assert isinstance(again, Quiesce)
        assert again.epoch > quiesce.epoch
        node.answer(peer, head, Idle(epoch=again.epoch))
        plan = await worker.plan()
        assert plan.epoch == again.epoch


async def test_epochs_grow_over_workers_and_schedulers(places: Places) -> None:
    epochs = []
    for incarnation in (1, 2):
        async with staged(places, incarnation=incarnation):
            for life in (1, 2):
                async with dialled("worker", "scheduler", places, incarnation=10 * incarnation + life) as (node, peer):
                    worker = PlayedWorker(node, peer)
                    await worker.introduce()
                    epochs += worker.epochs
    assert epochs == sorted(set(epochs))


async def test_results_of_an_older_epoch_change_nothing(places: Places) -> None:
    async with staged(places) as stage:
        detokenizer, tokenizer, old = await stage.detokenizer(), await stage.tokenizer(), await stage.worker(1)
        await submit(tokenizer, a_submit("a" * 32, PROMPT, max_tokens=2))
        stale = await old.plan()
        new = await stage.worker(2)
        assert old.epochs < new.epochs
        fresh = await new.plan()
        new.peer.send(result_of(stale))
        new.peer.send(result_of(fresh))
        new.peer.send(result_of(fresh))
        await new.step()
        await detokenizer.finished("a" * 32)
        assert detokenizer.stories["a" * 32].tokens == expected(PROMPT, 2)
        assert stage.scheduler.core.statistics().counters["stale_results"] == 2


async def test_a_full_journal_promises_nothing_emits_nothing_and_goes_on_when_there_is_room(places: Places) -> None:
    config = Config(scheduler=CONFIG.scheduler, faults=FaultsConfig(hooks={"scheduler_before_step": "fail:2"}))
    async with staged(places, config) as stage:
        worker, detokenizer, tokenizer = await stage.worker(), await stage.detokenizer(), await stage.tokenizer()
        await submit(tokenizer, a_submit("a" * 32, PROMPT, max_tokens=4))
        for _ in range(4):  # the second step's write fails once, and is tried again
            await worker.step()
        await detokenizer.finished("a" * 32)
        assert detokenizer.stories["a" * 32].tokens == expected(PROMPT, 4)
        assert stage.scheduler.drops["journal"] == 1


async def test_while_the_journal_takes_nothing_new_requests_are_refused_as_overloaded(places: Places) -> None:
    config = Config(scheduler=CONFIG.scheduler, faults=FaultsConfig(hooks={"journal_before_accept": "fail"}))
    async with staged(places, config) as stage:
        tokenizer = await stage.tokenizer()
        with pytest.raises(DeadlinePassed):  # its promise waits for the disk: no answer is no promise
            await tokenizer.ask(a_submit("a" * 32, PROMPT), (Journaled, Rejected), deadline_s=0.2)
        answer = await submit(tokenizer, a_submit("b" * 32, PROMPT))
        assert isinstance(answer, Rejected)
        assert answer.code == "overloaded"
        assert "journal" in answer.reason or "fault" in answer.reason


async def test_status_names_pool_queue_tiers_and_worker(places: Places) -> None:
    async with staged(places) as stage:
        admin = stage.admin
        snapshot: Snapshot = await admin.ask(Status(), Snapshot, deadline_s=5)
        assert snapshot.data["worker_ready"] is False
        worker, tokenizer = await stage.worker(), await stage.tokenizer()
        shared_prefix = list(range(20, 32))
        for letter, tail in (("a", [1]), ("b", [2])):
            await submit(tokenizer, a_submit(letter * 32, shared_prefix + tail, max_tokens=1))
            await worker.step()
        detokenizer = await stage.detokenizer()
        await detokenizer.finished("a" * 32, "b" * 32)
        data = (await admin.ask(Status(), Snapshot, deadline_s=5)).data
        assert data["worker_ready"] is True
        assert data["block_tokens"] == FACTS.block_tokens
        assert data["hits"]["device"] == 12
        assert data["hits"]["prompt_tokens"] == 26
        pool = data["pool"]
        assert pool["free"] + pool["cached"] + pool["locked"] == pool["total"] == FACTS.blocks
        assert pool["locked"] == 0


@pytest.mark.parametrize(("blocks", "checks"), [(CHECK_BLOCKS, 1), (CHECK_BLOCKS + 1, 0)])
async def test_the_idle_check_leaves_out_pools_that_would_hold_the_loop_up(
    places: Places, monkeypatch: pytest.MonkeyPatch, blocks: int, checks: int
) -> None:
    checked: list[Engine] = []
    monkeypatch.setattr(Engine, "check_integrity", lambda core: checked.append(core))
    async with staged(places) as stage:
        shell = stage.scheduler
        shell.worker.facts = replace(FACTS, blocks=blocks)
        shell._unchecked, shell._check_at = True, 0.0
        shell._check_when_idle(1.0)
        assert (shell._unchecked, shell._check_at) == (False, None)
    assert len(checked) == checks


async def test_drain_leaves_new_requests_to_the_next_life_instead_of_refusing_them(places: Places) -> None:
    async with staged(places) as stage:
        tokenizer = await stage.tokenizer()
        await submit(tokenizer, a_submit("a" * 32, PROMPT))
        await stage.scheduler.drain()
        with pytest.raises(DeadlinePassed):
            await tokenizer.ask(a_submit("b" * 32, PROMPT), (Journaled, Rejected), deadline_s=0.1)
    async with staged(places, incarnation=2) as stage:
        assert stage.scheduler.core.retained() == ["a" * 32]


async def test_a_setting_that_means_nothing_is_named_as_wrong_configuration(places: Places) -> None:
    shell = Scheduler(places, Config(scheduler=SchedulerConfig(step_tokens=0)), incarnation=1)
    with pytest.raises(BaseExceptionGroup) as caught:
        await shell.serve()
    assert caught.group_contains(ConfigError, match="scheduler.step_tokens is 0")


async def test_a_journal_of_another_version_stops_the_start_with_one_line(places: Places) -> None:
    async with staged(places) as stage:
        await submit(await stage.tokenizer(), a_submit("a" * 32, PROMPT))
    (segment,) = places.journal.glob("*.log")
    segment.write_bytes(pack_header(1, 0, version=99) + segment.read_bytes()[HEADER_BYTES:])
    with pytest.raises(BaseExceptionGroup) as caught:
        async with staged(places, incarnation=2):
            raise AssertionError("it started")
    assert "journal format 99" in str(_innermost(caught.value))


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
