"""Who is served next, what goes into a step, when something is due, and when the store is not worth waiting for."""

from random import Random

import pytest

from services.scheduler.batch import Batch, decodes_first
from services.scheduler.breaker import Breaker
from services.scheduler.policy import WaitingQueue
from services.scheduler.records import Accept, Admit
from services.scheduler.request import Request
from services.scheduler.settings import Settings
from services.scheduler.timers import Timers
from shared.config import Config, KVConfig, SchedulerConfig
from shared.messages.base import pack_u32, unpack_u32
from shared.messages.engine import SampleSpec
from tests.engine_kit import words
from tests.scheduler_world import World


def request(key: int, prompt: int = 4, *, computed: int = 0, resumed: bool = False) -> Request:
    made = Request.of(Accept(key, 0.0, f"r{key}", b"", "p", pack_u32(range(prompt)), max_tokens=9, sample=SampleSpec()))
    made.computed = computed
    if resumed:
        made.admit = Admit(key, 0.0, 0, 0, 0)
    return made


def queue_of(*requests: Request, **options: object) -> WaitingQueue:
    queue = WaitingQueue(Settings(**options))  # type: ignore[arg-type]
    for one in requests:
        queue.add(one)
    return queue


def keys(requests: list[Request]) -> list[int]:
    return [one.key for one in requests]


# --- policy -------------------------------------------------------------------------------------------------------


def test_fcfs_is_by_acceptance_with_the_resumed_first() -> None:
    queue = queue_of(request(3), request(1), request(5, resumed=True), request(2), request(4, resumed=True))
    assert keys(queue.candidates(lambda _: 0)) == [4, 5, 1, 2, 3]


def test_lpm_is_by_cached_prefix_then_by_acceptance() -> None:
    cached = {1: 0, 2: 16, 3: 32, 4: 16, 5: 0}
    queue = queue_of(*(request(key, resumed=key == 5) for key in cached), policy="lpm")
    assert keys(queue.candidates(lambda one: cached[one.key])) == [5, 3, 2, 4, 1]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_one_who_was_bypassed_often_comes_before_all_others(policy: str) -> None:
    first = request(1)
    queue = queue_of(first, request(2), policy=policy, max_bypass=3)
    for key in range(10, 13):
        younger = request(key)
        queue.add(younger)
        assert not queue.aged(first)
        queue.admitted(younger)
    assert queue.aged(first)
    assert keys(queue.candidates(lambda one: one.key))[0] == 1
    queue.admitted(first)
    queue.add(first)
    assert not queue.aged(first)


def test_admission_ages_only_those_who_waited_longer() -> None:
    waiting = [request(key) for key in range(1, 6)]
    queue = queue_of(*waiting)
    queue.admitted(waiting[2])
    assert [one.bypassed for one in waiting] == [1, 1, 0, 0, 0]
    assert len(queue) == 4


def test_a_step_looks_at_a_bounded_number() -> None:
    queue = queue_of(*(request(key) for key in range(100)), scan=7)
    assert keys(queue.candidates(lambda _: 0)) == [*range(7)]


def test_who_does_not_wait_cannot_be_removed() -> None:
    queue = queue_of(request(1))
    with pytest.raises(KeyError, match="does not wait"):
        queue.remove(request(2))


# --- batch --------------------------------------------------------------------------------------------------------


def test_decodes_come_before_prefills_and_the_oldest_prefill_gets_the_rest() -> None:
    running = [request(1, 20), request(2, 9, computed=8), request(3, 30, computed=2), request(4, 5, computed=4)]
    batch = Batch(16)
    for one in decodes_first(running):
        batch.add(one)
    assert {key: part.tokens for key, part in batch.slices.items()} == {2: 1, 4: 1, 1: 14}
    assert batch.left == 0


def test_one_prefill_is_partial_at_most() -> None:
    world = World(Settings(step_tokens=10, max_running=8), blocks=60, block_tokens=4)
    for i in range(6):
        world.submit(words(13 + i, i), 3)
    partial = 0
    while world.live():
        assert world.plan is not None
        running = world.engine._home.running.values()
        partial = sum(0 < one.computed + one.in_flight < one.prompt_tokens for one in running)
        assert partial <= 1
        world.turn()


def test_when_the_budget_is_smaller_than_the_decodes_they_take_turns() -> None:
    world = World(Settings(step_tokens=2, max_running=5), blocks=80, block_tokens=4, store=True)
    prompts = [words(9, i) for i in range(5)]
    for prompt in prompts:
        world.submit(prompt, 1)
        world.settle()
    world.start_worker()
    ids = [world.submit(prompt, 20) for prompt in prompts]
    while world.engine.statistics().loading or world.asks:  # all five are loaded: one token each is left
        world.answer_ask() if world.asks else world.finish_transfer()
    for _ in range(len(world.plans)):  # planned when only one had arrived
        world.step()
    before = [len(world.sent[id].tokens) for id in ids]
    for _ in range(15):
        world.step()
    gained = [len(world.sent[id].tokens) - had for id, had in zip(ids, before, strict=True)]
    assert sum(gained) == 30
    assert max(gained) - min(gained) <= 1
    world.settle()


def test_s09_every_stream_gets_a_token_in_each_step_of_a_long_prefill() -> None:
    world = World(Settings(step_tokens=32, max_running=8), blocks=600, block_tokens=4, max_context=3000, check=False)
    streams = [world.submit(words(5, i), 100) for i in range(3)]
    while not all(world.sent[id].tokens for id in streams):
        world.turn()
    long = world.submit(words(2000, 9), 1)
    while world.sent[long].finish is None:
        before = [len(world.sent[id].tokens) for id in streams]
        world.finish_plan()
        assert [len(world.sent[id].tokens) for id in streams] == [count + 1 for count in before]
    world.settle()


def test_rows_tell_where_and_what_and_how_many_were_drawn() -> None:
    world = World(Settings(step_tokens=6), blocks=60, block_tokens=4)
    world.submit(words(9), 3)
    seen = []
    while world.plan is not None:
        row = world.plan.rows[0]
        ids, blocks = len(unpack_u32(row.ids)), len(unpack_u32(row.blocks))
        seen.append((row.start, ids, row.feeds_last, blocks, row.sample is None, row.drawn))
        world.finish_plan()
    assert seen == [
        (0, 6, False, 2, True, 0),
        (6, 3, False, 3, False, 0),
        (9, 0, True, 3, False, 1),
        (10, 0, True, 3, False, 2),
    ]


# --- timers -------------------------------------------------------------------------------------------------------


def test_timers_against_a_naive_model() -> None:
    random, timers, naive = Random(4), Timers(), dict[tuple[str, int], float]()
    for _ in range(5000):
        name, at = ("t", random.randrange(30)), float(random.randrange(100))
        action = random.randrange(4)
        if action < 2:
            timers.set(name, at)
            naive[name] = at
        elif action == 2:
            timers.cancel(name)
            naive.pop(name, None)
        else:
            due = timers.due(at)
            assert sorted(due) == sorted(name for name, when in naive.items() if when <= at)
            assert [naive[name] for name in due] == sorted(naive[name] for name in due)
            for name in due:
                del naive[name]
        assert timers.next() == min(naive.values(), default=None)
        assert len(timers) == len(naive)
        assert len(timers._heap) <= 65 + 4 * 30


# --- breaker ------------------------------------------------------------------------------------------------------


def test_the_breaker_opens_at_the_third_timeout_in_a_row() -> None:
    breaker = Breaker()
    for strikes in (2, 2, 3):
        for _ in range(strikes):
            assert not breaker.open
            breaker.struck(0.0)
        if strikes < 3:
            breaker.passed()
    assert breaker.open
    assert breaker.opened == 1


def test_probes_are_single_and_ever_rarer_while_unanswered() -> None:
    breaker, now, gaps = Breaker(), 0.0, []
    for _ in range(3):
        breaker.struck(now)
    for _ in range(4):
        begin = now
        while not breaker.may_probe(now):
            now += 0.25
        gaps.append(now - begin)
        breaker.probing()
        assert not breaker.may_probe(now + 1000)
        breaker.probed(now, answered=False)
    assert gaps == [0.5, 1.0, 2.0, 4.0]


def test_after_an_answered_probe_one_more_timeout_opens_it_again() -> None:
    breaker = Breaker()
    for _ in range(3):
        breaker.struck(0.0)
    breaker.probing()
    breaker.probed(1.0, answered=True)
    assert not breaker.open
    breaker.struck(2.0)
    assert breaker.open
    assert breaker.opened == 2
    assert not breaker.may_probe(2.9)
    assert breaker.may_probe(3.0)


# --- settings -----------------------------------------------------------------------------------------------------


def test_settings_come_from_the_configuration_and_are_checked() -> None:
    config = Config(scheduler=SchedulerConfig(policy="lpm", step_tokens=7), kv=KVConfig(prefix_cache=False))
    settings = Settings.of(config)
    assert (settings.policy, settings.step_tokens, settings.prefix_cache) == ("lpm", 7, False)
    with pytest.raises(ValueError, match=r"scheduler.policy is 'best'; known are fcfs, lpm"):
        Settings.of(Config(scheduler=SchedulerConfig(policy="best")))
    with pytest.raises(ValueError, match=r"scheduler.max_running is 0"):
        Settings(max_running=0)
