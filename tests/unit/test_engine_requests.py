"""A request's account: ids, ends, retention, the journal, and the same effects for the same events."""

import os
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.scheduler.engine import Engine
from services.scheduler.records import Accept, Admit, AnyRecord, Ended, Step
from services.scheduler.settings import Settings
from shared.messages.base import unpack_u32
from shared.messages.engine import Journaled, RowResult
from shared.messages.front import Rejected
from tests.engine_kit import counter, kv_of, words
from tests.property.test_engine_walks import walk
from tests.scheduler_world import KEY, World
from tests.sim_worker import oracle

SMALL = Settings(step_tokens=16, result_ttl_s=100.0)


def reason_of(world: World, id: str) -> str:
    finish = world.sent[id].finish
    assert finish is not None
    return finish.reason


def test_the_same_request_again_is_known_also_when_it_is_over() -> None:
    world = World(SMALL)
    id = world.submit(words(9), 3)
    message = world.sent[id].submit
    for _ in range(2):
        answer = world.send(message, drawn=99)
        assert answer == Journaled(id=id, known=True, prompt_tokens=9)
        world.settle()
    assert counter(world, "accepted") == 1


@pytest.mark.parametrize("change", [{"digest": b"x" * 32}, {"principal": "mallory"}])
def test_the_same_id_with_another_digest_or_from_somebody_else_is_a_conflict(change: dict[str, Any]) -> None:
    world = World(SMALL)
    id = world.submit(words(9), 3)
    other = msgspec.structs.replace(world.sent[id].submit, **change)
    answer = world.send(other, drawn=1)
    assert isinstance(answer, Rejected)
    assert answer.code == "conflict"
    world.settle()


def test_a_finished_request_is_forgotten_after_its_time() -> None:
    world = World(SMALL)
    id = world.submit(words(9), 3)
    world.settle()
    world.advance(99.0)
    assert world.engine.progress(id, 0) is not None
    world.advance(1.1)
    assert world.forgotten == {id}
    assert world.engine.progress(id, 0) is None
    assert world.engine.next_deadline() is None
    again = world.send(world.sent[id].submit, drawn=1)
    assert again == Journaled(id=id, known=False, prompt_tokens=9)


@pytest.mark.parametrize("steps", range(6))
def test_cancel_at_any_moment_frees_everything(steps: int) -> None:
    world = World(Settings(step_tokens=4))
    id = world.submit(words(10), 5)
    for _ in range(steps):
        world.turn()
    assert not world.cancel(id, principal="someone else")
    assert world.cancel(id)
    assert not world.cancel(id)
    world.settle()
    assert reason_of(world, id) == "cancelled"


def test_a_cancel_is_told_at_once_and_its_request_is_in_no_plan_made_later() -> None:
    world = World(Settings(step_tokens=16))
    gone, stays = world.submit(words(5, 1), 50), world.submit(words(5, 2), 6)
    for _ in range(3):
        world.finish_plan()
    assert world.plan is not None
    assert [world.ids[row.key] for row in world.plan.rows] == [gone, stays]  # a step with it is out
    told = len(world.sent[gone].tokens)
    assert world.cancel(gone)
    assert reason_of(world, gone) == "cancelled"  # journaled and told with no step in between
    for _ in range(len(world.plans)):  # made before
        world.finish_plan()
    while world.plan is not None:
        assert [world.ids[row.key] for row in world.plan.rows] == [stays]
        world.finish_plan()
    assert len(world.sent[gone].tokens) == told
    world.settle()


def test_a_deadline_ends_waiting_and_running_requests() -> None:
    world = World(Settings(step_tokens=16, max_running=1))
    ids = [world.submit(words(9, i), 50, deadline_s=2.0) for i in range(2)]
    for _ in range(4):
        world.turn()
    assert world.engine.next_deadline() == world.now + 2.0
    world.advance(2.0)
    assert [reason_of(world, id) for id in ids] == ["deadline", "deadline"]
    assert len(world.sent[ids[0]].tokens) > 0
    world.settle()


def test_a_deadline_that_has_passed_is_refused() -> None:
    world = World(SMALL)
    world.submit(words(9), 1, deadline_s=0.0)
    assert isinstance(world.answer, Rejected)
    assert world.answer.code == "deadline"


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 1), ([1], 0)])
def test_empty_prompts_and_empty_answers_are_refused(prompt: list[int], max_tokens: int) -> None:
    world = World(SMALL)
    world.submit(prompt, max_tokens)
    assert isinstance(world.answer, Rejected)
    assert world.answer.code == "bad_request"


def test_a_stop_id_is_the_last_token() -> None:
    world = World(SMALL)
    prompt = words(9)
    expected = oracle(prompt, 20)
    stop = expected[7]
    id = world.submit(prompt, 20, stop_ids=(stop,))
    world.settle()
    assert world.sent[id].tokens == expected[: expected.index(stop) + 1]
    assert reason_of(world, id) == "stop"


def test_the_context_ends_a_request() -> None:
    world = World(SMALL, max_context=20)
    id = world.submit(words(12), 100)
    world.settle()
    assert len(world.sent[id].tokens) == 8
    assert reason_of(world, id) == "length"
    assert counter(world, "outgrown") == 0


def test_a_stop_string_cuts_the_output_where_it_ends() -> None:
    world = World(SMALL)
    id = world.submit(words(9), 30, logprobs=0)
    while len(world.sent[id].tokens) < 10:
        world.turn()
    world.stop_at(id, 7)
    world.stop_at(id, 7)
    world.settle()
    assert (len(world.sent[id].tokens), reason_of(world, id)) == (7, "stop")
    ends = [record for record in world.journal if isinstance(record, Ended)]
    assert [end.finish.usage.completion_tokens for end in ends] == [7]


def test_a_stop_string_that_comes_after_the_end_still_cuts() -> None:
    world = World(SMALL)
    id = world.submit(words(9), 8)
    world.settle()
    world.stop_at(id, 6)
    world.stop_at(id, 6)
    assert (len(world.sent[id].tokens), reason_of(world, id)) == (6, "stop")
    world.stop_at(id, 7)  # more than there is: old news
    assert len(world.sent[id].tokens) == 6
    assert sum(isinstance(record, Ended) for record in world.journal) == 2
    world.settle()


def test_a_row_error_ends_its_request_alone() -> None:
    world = World(SMALL)
    bad, good = world.submit(words(5, 1), 4), world.submit(words(5, 2), 4)
    world.finish_plan()
    assert world.plan is not None
    wrong = RowResult(1, error="non-finite value in layer 3")
    world.finish_plan(lambda row: wrong if row.key == 1 else row)
    finish = world.sent[bad].finish
    assert finish is not None
    assert finish.error == ("internal", "non-finite value in layer 3")
    while world.live():
        world.turn()
    world.check_answer(good)
    assert kv_of(world).locked == 0


def test_results_of_older_epochs_and_second_results_are_ignored() -> None:
    world = World(SMALL)
    id = world.submit(words(9), 6)
    assert world.worker is not None
    assert world.plan is not None
    late = world.worker.run(world.plan)
    world.start_worker()
    world.call("result", world.now, late)
    assert world.plan is not None
    again = world.worker.run(world.plan)
    world.finish_plan()
    world.call("result", world.now, again)
    assert counter(world, "stale_results") == 2
    assert len(world.sent[id].tokens) == 1
    world.settle()


def test_a_worker_epoch_must_grow() -> None:
    world = World(SMALL)
    with pytest.raises(ValueError, match="epoch 1 is not larger"):
        world.engine.worker_up(world.now, 1, world.facts, 100)


def test_an_unseeded_request_keeps_its_drawn_seed_over_a_restart() -> None:
    world = World(SMALL)
    id = world.submit(words(9), 12, seed=None)
    for _ in range(5):
        world.turn()
    world.restart_scheduler(lose_result=True)
    assert len(world.sent[id].tokens) > 0
    world.settle()  # compares with the oracle of the drawn seed
    assert world.sent[id].seed != 0


def test_a_restart_keeps_cached_tokens_times_and_order() -> None:
    world = World(Settings(step_tokens=64, max_running=2))
    stem = words(12)
    world.submit(stem, 1)
    world.settle()
    ids = [world.submit([*stem, i], 20) for i in range(4)]
    world.advance(1.0)
    for _ in range(4):
        world.turn()
    assert world.sent[ids[1]].tokens
    assert not world.sent[ids[2]].tokens
    world.advance(5.0)
    world.restart_scheduler()
    world.settle()
    finish = world.sent[ids[0]].finish
    assert finish is not None
    assert finish.usage.cached_by_tier == {"device": 12, "host": 0, "disk": 0}
    assert finish.timing.ttft_s == pytest.approx(1.0)
    assert world.engine.retained() == ["r1", *ids]


def test_the_journal_holds_accept_first_then_admit_steps_and_end() -> None:
    world = World(SMALL)
    world.submit(words(20), 3, logprobs=0)
    world.settle()
    assert [type(record) for record in world.journal] == [Accept, Admit, Step, Step, Step, Ended]
    steps = [record for record in world.journal if isinstance(record, Step)]
    assert [step.rows[0].start for step in steps] == [0, 1, 2]
    assert all(len(step.rows[0].logprobs or ()) == 1 for step in steps)
    frames = [msgspec.msgpack.encode(record) for record in world.journal]
    assert [msgspec.msgpack.decode(frame, type=AnyRecord) for frame in frames] == world.journal


@pytest.mark.parametrize("kept", range(9))
def test_any_prefix_of_the_journal_gives_the_same_tokens_in_the_end(kept: int) -> None:
    world = World(Settings(step_tokens=16))
    world.submit(words(9, 1), 3, stop_ids=(1, 2, 3))
    world.submit(words(9, 2), 3)
    world.settle()
    journal = world.journal[: len(world.journal) * kept // 8]
    other = Engine(SMALL, KEY)
    other.restore(world.now, journal)
    for id in other.retained():
        replay = other.progress(id, 0)
        assert replay is not None
        tokens = list(unpack_u32(replay.ids))
        assert tokens == world.sent[id].tokens[: len(tokens)]
    if kept == 8:
        assert other.statistics().retained == 2
    new = [effect for effect in other.take_effects() if type(effect).__name__ == "Journal"]
    assert len(new) <= 2


def test_repeated_and_foreign_records_change_nothing() -> None:
    world = World(SMALL)
    id = world.submit(words(9), 3)
    world.settle()
    other = Engine(SMALL, KEY)
    step = next(record for record in world.journal if isinstance(record, Step))
    foreign = msgspec.structs.replace(step, rows=(msgspec.structs.replace(step.rows[0], key=77),))
    gap = msgspec.structs.replace(step, rows=(msgspec.structs.replace(step.rows[0], start=9),))
    twice = [record for record in world.journal for _ in range(2)]
    other.restore(world.now, [foreign, *twice[:4], gap, *twice[4:], *world.journal])
    replay = other.progress(id, 0)
    assert replay is not None
    assert list(unpack_u32(replay.ids)) == world.sent[id].tokens
    other.check_integrity()


def test_the_detokenizer_gets_opening_news_and_end_by_index() -> None:
    world = World(SMALL)
    id = world.submit(words(20), 4, stop=("x",), detached=True)
    world.settle()
    whole, tail = world.engine.progress(id, 0), world.engine.progress(id, 3)
    assert whole is not None
    assert tail is not None
    assert whole.opening is not None
    assert (whole.opening.prompt_tokens, whole.opening.stop, whole.opening.detached) == (20, ("x",), True)
    assert list(unpack_u32(whole.opening.prompt_tail)) == words(20)[4:]
    assert tail.opening is None
    assert unpack_u32(tail.ids) == unpack_u32(whole.ids)[3:]
    assert tail.finish == whole.finish
    assert world.engine.progress("unknown", 0) is None


@pytest.mark.parametrize("seed", [7, 11, 13])
def test_a_recorded_event_log_replays_to_identical_effects(seed: int) -> None:
    world = walk(seed, store=True)
    other, effects = Engine(world.settings, KEY), []
    for name, arguments in world.log:
        answer = getattr(other, name)(*arguments)
        if name == "next_plan":
            effects += [*other.take_effects(), answer]
    assert len(effects) > 200
    assert effects == world.effects
    assert other.statistics() == world.engine.statistics()


def test_effects_do_not_depend_on_the_process() -> None:
    code = "from tests.unit.test_engine_requests import digest_of_a_walk; print(digest_of_a_walk())"
    root = Path(__file__).parents[2]
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def digest_of_a_walk() -> str:
    world = walk(11, store=True, requests=25)
    return blake2b(repr(world.effects).encode()).hexdigest()


def test_a_retained_request_keeps_its_answer_and_not_its_prompt() -> None:
    world = World(SMALL)
    id = world.submit(words(50), 5, logprobs=0)
    world.settle()
    kept = world.engine._requests[id]
    assert (len(kept.tokens), kept.accept.ids, kept.names) == (5, b"", [])
    whole = world.engine.progress(id, 0)
    assert whole is not None
    assert whole.opening is not None
    assert list(unpack_u32(whole.opening.prompt_tail)) == words(50)[-16:]
    world.stop_at(id, 3)
    world.restart_scheduler()
    assert len(world.engine._requests[id].tokens) == 3
    world.settle()


def test_with_too_many_finished_requests_those_that_ended_first_are_forgotten() -> None:
    world = World(Settings(step_tokens=16, max_retained=2), blocks=40)
    late = world.submit(words(5, 9), 30)
    ids = [world.submit(words(5, salt), 1 + salt) for salt in range(3)]
    while len(world.live()) > 1:
        world.turn()
        world.advance(0.01)
    assert world.forgotten == {ids[0]}
    world.settle()
    assert world.forgotten == set(ids[:2])
    assert world.engine.retained() == [late, ids[2]]
    assert world.engine.statistics().retained == 2
    world.restart_scheduler()
    assert world.engine.retained() == [late, ids[2]]
    world.advance(700.0)
    assert world.engine.statistics().retained == 0


def test_an_end_in_the_tick_that_forgets_another_takes_its_place_once() -> None:
    world = World(Settings(step_tokens=16, max_retained=1, result_ttl_s=10.0), blocks=40)
    first = world.submit(words(5), 1)
    world.settle()
    world.kill_worker()
    second = world.submit(words(5), 1, deadline_s=5.0)
    world.advance(20.0)
    assert world.forgotten == {first}
    assert world.engine.retained() == [second]


def test_an_id_that_was_forgotten_and_used_again_is_one_request_after_a_restart() -> None:
    world = World(Settings(step_tokens=16, max_retained=1), blocks=40)
    world.submit(words(5), 1, id="twice")
    world.settle()
    world.submit(words(5), 1)
    world.settle()
    assert world.forgotten == {"twice"}
    del world.sent["twice"]
    world.submit(words(6), 2, id="twice")
    world.settle()
    world.restart_scheduler()
    assert world.engine.retained() == ["twice"]
    world.advance(700.0)
    assert world.engine.retained() == []
