"""What the engine holds of the KV manager: a match, a request's blocks, a newly cached block."""

from dataclasses import dataclass, field

from services.scheduler.kv.node import Node


@dataclass(frozen=True)
class Match:
    """The longest cached prefix on the device: `tokens` long (a multiple of the block length), in `blocks`."""

    tokens: int
    blocks: list[int]


@dataclass(eq=False)
class Sequence:
    """What one request owns of the pool, from `KVManager.open` to `KVManager.close`.

        blocks:  [ 0 ............ cached_blocks ............ len )
                 └ the tree's, locked ┘└ the request's own ┘
                   by this request        (freed at close)

    `blocks` is the block table in logical order; `publish` may replace ids in it (never of blocks before
    `cached_blocks`); those that a plan in flight still names are pinned and noted in `replaced`. `node`: where the
    locked part ends. `store` False: nothing of it is ever published.
    """

    root: bytes
    node: Node
    space: Node
    store: bool
    blocks: list[int] = field(default_factory=list)
    cached_blocks: int = 0
    closed: bool = False
    rewrites: int = 0
    """How often `publish` has replaced ids in `blocks`."""
    replaced: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class CachedBlock:
    """A block of a sequence that the tree owns: what the save path needs to know of it.

    `index`: its place in the sequence. `parent`: identity of the block before it (the root for the first).
    """

    index: int
    block: int
    identity: bytes
    parent: bytes
