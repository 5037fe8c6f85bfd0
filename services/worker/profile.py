"""How many blocks the pool gets: budget = free memory - weights - peak of the largest step - reserve, at most the
configured size. Asked twice: before the weights load, by estimates, so that a hopeless start costs nothing; and after
a step of the largest size has run, by what it really took. Imports no torch.
"""

from dataclasses import dataclass

from shared.config import Config, ConfigError
from shared.kv import BLOCK_TOKENS, DTYPE_BYTES, KVLayout
from shared.large_memory import Wish

RESERVE_SHARE = 0.05
RESERVE_LEAST = 128 << 20
"""Left to the rest of the machine: this share of what is free, and at least so many bytes."""


@dataclass(frozen=True)
class Demand:
    """Bytes that a worker takes beside its pool. `loaded`: the weights are in memory, so `free` excludes them."""

    weights: int
    step: int
    loaded: bool = False


@dataclass(frozen=True)
class PoolSize:
    """`blocks` >= 1; `warning`: one line when it is less than asked for, else ""."""

    blocks: int
    warning: str


def check_settings(config: Config) -> None:
    """ConfigError for a KV dtype, block length, context or thread count that means nothing."""
    kv, model = config.kv, config.model
    if kv.dtype not in ("auto", *DTYPE_BYTES):
        raise ConfigError(f"kv.dtype {kv.dtype!r} is unknown; known are auto, {', '.join(DTYPE_BYTES)}")
    if kv.block_tokens and kv.block_tokens not in (1, 2, 4, 8, *BLOCK_TOKENS):
        raise ConfigError(
            f"kv.block_tokens is {kv.block_tokens}; write a power of two up to {BLOCK_TOKENS[-1]}, "
            "or 0 for the one whose block is nearest 1 MiB"
        )
    Wish(kv.huge_pages).checked("kv")
    for name, value in (("model.max_context", model.max_context), ("model.threads", model.threads)):
        if value < 0:
            raise ConfigError(f"{name} is {value}; write a positive number, or 0 for the default")


def size_pool(config: Config, layout: KVLayout, demand: Demand, free: int) -> PoolSize:
    """Blocks of the pool; ConfigError, with the numbers that clash, when not even one fits.

    `free`: bytes that this process may still take now.
    """
    asked, block = config.kv.pool_bytes, layout.block_bytes
    if asked < block:
        raise ConfigError(
            f"kv.pool_bytes is {asked:,}; one block of this model's KV ({layout.block_tokens} tokens, {layout.dtype}) "
            f"takes {block:,} bytes; raise kv.pool_bytes to at least that, or lower kv.block_tokens"
        )
    reserve = max(RESERVE_LEAST, int(free * RESERVE_SHARE))
    weights = 0 if demand.loaded else demand.weights
    if weights > free:
        raise ConfigError(
            f"the model is larger than memory: its weights take {weights:,} bytes as this backend keeps them, "
            f"{free:,} bytes are free; take a smaller model or a file of fewer bits, or free memory"
        )
    left = free - weights - demand.step - reserve
    numbers = (
        f"{free:,} bytes of memory are free, {'weights are loaded' if demand.loaded else f'weights take {weights:,}'}, "
        f"the largest step {demand.step:,}, {reserve:,} stay in reserve"
    )
    if left < block:
        raise ConfigError(
            f"no memory for KV: {numbers}; {max(left, 0):,} are left and one block of {layout.block_tokens} tokens "
            f"needs {block:,}; free memory, take a smaller model, or lower scheduler.step_tokens or model.max_context"
        )
    blocks = min(asked, left) // block
    warning = ""
    if left < asked:
        warning = f"kv.pool_bytes asks for {asked:,} bytes; {numbers}; the pool gets {blocks * block:,}"
    if config.faults.max_pool_blocks:
        blocks = min(blocks, config.faults.max_pool_blocks)
    return PoolSize(blocks, warning)
