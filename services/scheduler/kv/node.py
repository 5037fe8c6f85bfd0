"""One edge of the radix tree: a block-aligned run of tokens and the blocks that hold their KV."""

from collections.abc import Iterator
from typing import Final


class TreeError(RuntimeError):
    """An invariant of the tree does not hold; the text carries the numbers."""


class Node:
    """An edge and the node at its end; a namespace's root has no edge and no parent.

    `tokens`: packed u32, `4 * block_tokens` bytes a block; `blocks`: as many ids. `end`: blocks from the root to
    the end of this edge. `lock`: requests and copies that rest on this node or below it; `pins`: the copies among
    them whose block lies in this very edge. `recency`: tick of the last use. `queued`: in the eviction queue.
    `children`: by the packed tokens of their first block.
    """

    __slots__ = ("blocks", "children", "dead", "end", "lock", "parent", "pins", "queued", "recency", "root", "tokens")

    def __init__(self, parent: "Node | None", tokens: bytes, blocks: list[int], recency: int, *, root: bytes = b""):
        self.parent = parent
        self.tokens = bytearray(tokens)
        self.blocks = blocks
        self.children: dict[bytes, Node] = {}
        self.end: int = (parent.end if parent else 0) + len(blocks)
        self.lock = 0
        self.pins = 0
        self.recency = recency
        self.queued = False
        self.dead = False
        self.root: Final = root

    @property
    def start(self) -> int:
        """Blocks from the root to the start of this edge."""
        return self.end - len(self.blocks)

    @property
    def evictable(self) -> bool:
        """A leaf that nothing rests on."""
        return not self.lock and not self.children and not self.dead


def below(root: Node) -> Iterator[Node]:
    """All nodes below a root, children before their parents; the tree may lose each one as it is given."""
    order, stack = list[Node](), list(root.children.values())
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(node.children.values())
    return reversed(order)
