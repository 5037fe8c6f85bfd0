"""What the tests of the engine share: prompts, counters, and worlds whose store is warm."""

from random import Random

from services.scheduler.kv.manager import KVStatistics
from services.scheduler.settings import Settings
from tests.scheduler_world import World
from tests.sim_worker import VOCAB


def words(count: int, salt: int = 0) -> list[int]:
    random = Random(salt)
    return [random.randrange(VOCAB) for _ in range(count)]


def kv_of(world: World) -> KVStatistics:
    kv = world.engine.statistics().kv
    assert kv is not None
    return kv


def counter(world: World, name: str) -> int:
    return world.engine.statistics().counters[name]


def cached_tokens(world: World, id: str) -> int:
    finish = world.sent[id].finish
    assert finish is not None
    return finish.usage.cached_tokens


def warm(world: World, length: int = 33, salt: int = 0, *, spill: bool = False) -> list[int]:
    """A prompt that only the store holds."""
    prompt = words(length, salt)
    world.submit(prompt, 1)
    world.settle()
    if spill:
        world.store.spill()
    world.start_worker()
    return prompt


def by_tier(world: World, id: str) -> dict[str, int]:
    finish = world.sent[id].finish
    assert finish is not None
    return finish.usage.cached_by_tier


def stored(**options: int) -> World:
    return World(Settings(step_tokens=64, **options), blocks=40, block_tokens=4, store=True)
