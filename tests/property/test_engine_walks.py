"""Long busy days of the scheduler engine: hundreds of events in an order drawn from a seed, faults at a drawn rate.

The state machine beside this file finds short strange stories; these walks keep queue, pool and store full.
"""

from random import Random

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from services.scheduler.settings import Settings
from tests.scheduler_world import World, prompts


def fault(world: World, random: Random) -> None:
    what = random.randrange(12)
    if what == 0:
        world.start_worker()
    elif what == 1 and world.store_up:
        world.kill_store(lose_arena=random.random() < 0.3, answered=random.randrange(3))
        world.start_store()
    elif what == 2:
        world.restart_scheduler(lose_result=random.random() < 0.5)
    elif what == 3:
        if world.clearing:
            world.end_clear(answered=random.random() < 0.8)
        else:
            world.begin_clear()
    elif what in (4, 5):
        world.store.spill()
    elif what == 6:
        world.store.corrupt(random.randrange(100))
    elif what == 7:
        world.store.lose(random.randrange(100))
    elif what == 8 and world.transfers:
        world.finish_transfer(random.randrange(len(world.transfers)), ok=False)
    elif what == 9 and world.asks:
        world.lose_ask(random.randrange(len(world.asks)))
    elif what == 10 and world.store.staging:
        world.stage(fail=True)
    elif what == 11:
        world.advance(random.choice([0.01, 0.06, 1.0, 10.0]))


def walk(seed: int, *, store: bool, requests: int = 50) -> World:
    random = Random(seed)
    size = random.choice([1, 2, 4, 16])
    blocks = random.choice([6, 12, 40])
    settings = Settings(
        step_tokens=random.choice([3, 8, 32, 200]) * (4 if size == 16 else 1),
        max_running=random.choice([2, 5, 12]),
        policy=random.choice(["fcfs", "lpm"]),
        retract_every=random.choice([0, 0, 2, 5]),
        max_bypass=random.choice([2, 32]),
        max_loads=random.choice([1, 16]),
        save_batch=random.choice([1, 64]),
        burst_s=random.choice([0.0, 0.03]),
    )
    world = World(settings, blocks=blocks, block_tokens=size, max_context=40 * size, store=store)
    world.steps_left = random.choice([1, 3, 8])
    faults = random.choice([0.0, 0.03, 0.15])
    pauses, longest = random.choice([([0, 0, 2, 8, 60], 20), ([4, 8, 20], 120)])
    for prompt in prompts(random, requests, blocks * size, families=random.choice([1, 3])):
        id = world.submit(
            prompt,
            random.choice([1, 3, longest]),
            seed=random.choice([0, None]),
            logprobs=random.choice([-1, 1]),
            stop_ids=random.choice([(), (5,)]),
            no_store=random.random() < 0.1,
            no_read=random.random() < 0.1,
            deadline_s=random.choice([None, None, 3.0]),
        )
        for _ in range(random.choice(pauses)):
            world.turn()
            if random.random() < faults:
                fault(world, random)
        if random.random() < 0.05 and id in world.sent and id not in world.forgotten:
            world.cancel(id)
    world.settle()
    return world


@given(seed=st.integers(0, 1 << 32), store=st.sampled_from([True, True, False]))
@hypothesis_settings(max_examples=hypothesis_settings.default.max_examples // 3)
def test_busy_days_end_with_the_oracles_tokens(seed: int, store: bool) -> None:
    walk(seed, store=store)
