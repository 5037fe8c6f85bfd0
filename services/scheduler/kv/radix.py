"""The device tier's index: a compressed radix tree over blocks, one root per namespace.

Two kinds of reference keep a node: a *lock* rests on a node and counts on every node up to the root, so that
`child.lock <= parent.lock`; a *pin* (a copy of one block in flight) is a lock on the node whose edge holds the
block, and moves with the block when that edge is split. Lengths move between `evictable` and `protected` (blocks)
when a node's lock goes from 0 to 1 and back.

A cleared namespace's root is dead: what nothing rests on goes at once, the rest when its last lock goes. No
request finds it any more. A cleared line, all that begins with one block, gets a dead root of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.scheduler.kv.eviction import EvictionQueue
from services.scheduler.kv.integrity import check_tree
from services.scheduler.kv.node import Node, TreeError, below
from shared.identity import child as child_identity


@dataclass(frozen=True)
class TreeStatistics:
    """`evictable + protected` is the number of indexed blocks; `nodes` counts edges, `spaces` namespaces.

    Since the start: blocks `inserted` and `evicted`, nodes `visited` and bytes `compared` by matches and inserts.
    """

    nodes: int
    spaces: int
    evictable: int
    protected: int
    inserted: int
    evicted: int
    visited: int
    compared: int
    queue_steps: int


class RadixTree:
    """Runs of `block_tokens` tokens by block; `pins`: copies in flight by block id, kept by the pool."""

    def __init__(self, block_tokens: int, key: bytes, pins: Sequence[int]) -> None:
        self._width = 4 * block_tokens
        self._key = key
        self._pins = pins
        self._spaces: dict[bytes, Node] = {}
        self._dying: set[Node] = set()
        self._homes: dict[int, Node] = {}
        self._identities: dict[int, bytes] = {}
        self.saved: set[int] = set()
        """Blocks that the store was last known to hold: a hint."""
        self._queue = EvictionQueue()
        self._tick = 0
        self.evictable = 0
        self.protected = 0
        self._nodes = self._inserted = self._evicted = self._visited = self._compared = 0

    # --- finding ------------------------------------------------------------------------------------------------

    @property
    def indexed(self) -> int:
        """Blocks that a match can still find."""
        return self.evictable + self.protected - sum(len(n.blocks) for r in self._dying for n in below(r))

    def holds(self, block: int) -> bool:
        """Whether the tree owns this block."""
        return block in self._homes

    def identity(self, block: int) -> bytes:
        """Identity of a block that the tree owns; KeyError otherwise."""
        return self._identities[block]

    def space(self, root: bytes) -> Node:
        """The namespace's root node, made when it is new. It goes when nothing rests on it or hangs below it."""
        node = self._spaces.get(root)
        if node is None:
            node = self._spaces[root] = Node(None, b"", [], 0, root=root)
            node.lock = 1  # a root is locked for ever
        return node

    def match(self, root: bytes, run: bytes, *, touch: bool = True) -> list[int]:
        """Blocks of the longest cached prefix of `run` (packed tokens, whole blocks). Splits nothing."""
        space = self._spaces.get(root)
        if space is None:
            return []
        node, inside, blocks = self._walk(space, run)
        if touch:
            self._touch(inside or node)
        return blocks

    def descend(self, space: Node, run: bytes) -> tuple[Node, list[int]]:
        """As `match`, but returns the node that ends exactly there, splitting an edge when the match ends inside."""
        node, inside, blocks = self._walk(space, run)
        if inside is not None:
            node = self._split(inside, len(blocks) - inside.start)
        self._touch(node)
        return node, blocks

    def walk(self) -> Iterator[tuple[bytes, int, int, bytes, bytes]]:
        """(root, index, block, identity, parent identity) of every block that can be found, parents first."""
        for space in self._spaces.values():
            for node in reversed(list(below(space))):
                parent = self._last_identity(node.parent) if node.parent else space.root
                for index, block in enumerate(node.blocks, node.start):
                    name = self._identities[block]
                    yield space.root, index, block, name, parent
                    parent = name

    def path(self, block: int) -> list[int]:
        """Blocks from the first of the namespace down to `block`, which the tree owns, inclusive."""
        node: Node | None = self._homes[block]
        assert node is not None
        parts = [node.blocks[: node.blocks.index(block) + 1]]
        while (node := node.parent) is not None:
            parts.append(node.blocks)
        return [each for part in reversed(parts) for each in part]

    # --- growing ------------------------------------------------------------------------------------------------

    def insert(self, node: Node, run: bytes, blocks: list[int], *, saved: bool = False) -> tuple[Node, list[int], int]:
        """Adds `blocks`, which hold `run`, below `node`, on which the caller holds exactly one lock.

        Returns the node where the run ends now, the canonical block ids, and how many leading ones the tree had
        already: the caller's duplicates of those stay the caller's, all further ones are the tree's now.
        A leaf grows in place when the caller is the only one that rests on it, else it gets a child.
        """
        start = node
        node, inside, canonical = self._walk(node, run)
        if inside is not None:
            node = self._split(inside, start.end + len(canonical) - inside.start)
        known = len(canonical)
        if known < len(blocks):
            parent = self._last_identity(node)
            new, tail = blocks[known:], run[known * self._width :]
            if node is start and node.parent and not node.children and node.lock - node.pins == 1:
                node.tokens += tail
                node.blocks += new
                node.end += len(new)
                self.protected += len(new)
            else:
                leaf = Node(node, tail, list(new), self._tick)
                node.children[tail[: self._width]] = leaf
                node = leaf
                self._nodes += 1
                self.evictable += len(new)
            self._register(node, parent, tail, new, saved)
        self._touch(node)
        if node.evictable:
            self._queue.push(node)
        return node, canonical + blocks[known:], known

    def mark_saved(self, block: int, identity: bytes, saved: bool) -> bool:
        """Sets or takes the hint of a block that still has this identity; False when it has not."""
        if self._identities.get(block) != identity:
            return False
        (self.saved.add if saved else self.saved.discard)(block)
        return True

    # --- keeping ------------------------------------------------------------------------------------------------

    def lock(self, node: Node, count: int = 1) -> None:
        """`count` more rest on `node`."""
        at: Node | None = node
        while at is not None:
            if not at.lock:
                self.evictable -= len(at.blocks)
                self.protected += len(at.blocks)
            at.lock += count
            at = at.parent

    def unlock(self, node: Node) -> list[int]:
        """One rests on `node` no more. Returns blocks that go with it, which happens in a cleared namespace only."""
        at, loose = node, []
        while True:
            at.lock -= 1
            if at.lock < (at.parent is None):
                raise TreeError(f"a node of {len(at.blocks)} blocks is unlocked more often than locked")
            if not at.lock:
                self.protected -= len(at.blocks)
                self.evictable += len(at.blocks)
                loose.append(at)
            if at.parent is None:
                break
            at = at.parent
        if at.dead:
            freed = [block for dropped in loose for block in self._drop(dropped)]
            if at.lock == 1:
                self._dying.discard(at)
            return freed
        for released in loose:
            if not released.children:
                self._queue.push(released)
        self._forget_space(at)
        return []

    def pin(self, block: int) -> None:
        """A copy of a block that the tree owns begins."""
        home = self._homes[block]
        home.pins += 1
        self.lock(home)

    def unpin(self, block: int) -> list[int]:
        """A copy ended; returns blocks that go with it, as `unlock` does."""
        home = self._homes[block]
        home.pins -= 1
        return self.unlock(home)

    # --- shrinking ----------------------------------------------------------------------------------------------

    def evict(self, count: int) -> list[int]:
        """Takes up to `count` blocks from the ends of the least recently used unlocked leaves, tails first.

        Exactly `count` when as many are evictable. The caller owns them now.
        """
        freed: list[int] = []
        while len(freed) < count:
            leaf = self._queue.pop()
            if leaf is None:
                break
            cut = max(0, len(leaf.blocks) - (count - len(freed)))
            gone = leaf.blocks[cut:]
            if cut:
                del leaf.blocks[cut:], leaf.tokens[cut * self._width :]
                leaf.end -= len(gone)
                self.evictable -= len(gone)
                self._unregister(gone)
                self._queue.push(leaf)
            else:
                self._drop(leaf)
            freed += reversed(gone)
        self._evicted += len(freed)
        return freed

    def clear(self, chosen: Callable[[bytes], bool] = lambda root: True) -> list[int]:
        """Kills the namespaces whose root is chosen, all if not told; returns the blocks that nothing rests on."""
        freed: list[int] = []
        for space in [space for root, space in self._spaces.items() if chosen(root)]:
            del self._spaces[space.root]
            freed += self._kill(space)
        self._queue.prune()
        return freed

    def clear_line(self, root: bytes, first: bytes) -> list[int]:
        """Kills what begins with the block of these tokens: it moves below a dead root of its own, with its locks."""
        space = self._spaces.get(root)
        top = space.children.pop(first, None) if space is not None else None
        if space is None or top is None:
            return []
        grave = Node(None, b"", [], 0, root=root)
        grave.lock = 1 + top.lock
        grave.children[first] = top
        space.lock -= top.lock
        top.parent = grave
        freed = self._kill(grave)
        self._forget_space(space)
        self._queue.prune()
        return freed

    def _kill(self, space: Node) -> list[int]:
        freed: list[int] = []
        space.dead = True
        for node in below(space):
            node.dead = True
            if not node.lock:
                freed += self._drop(node)
        if space.lock > 1:
            self._dying.add(space)
        return freed

    # --- checking -----------------------------------------------------------------------------------------------

    def statistics(self) -> TreeStatistics:
        """Counts, in O(1)."""
        return TreeStatistics(
            nodes=self._nodes,
            spaces=len(self._spaces),
            evictable=self.evictable,
            protected=self.protected,
            inserted=self._inserted,
            evicted=self._evicted,
            visited=self._visited,
            compared=self._compared,
            queue_steps=self._queue.steps,
        )

    def check_integrity(self) -> None:
        """Walks everything and raises TreeError at the first invariant that does not hold."""
        check_tree(self)

    # --- inside -------------------------------------------------------------------------------------------------

    def _walk(self, node: Node, run: bytes) -> tuple[Node, Node | None, list[int]]:
        """Follows `run` below `node`: the last node wholly matched, the one the match ends inside of, the blocks.

        Linear in `run`: each byte is compared once, where it lies (slicing the rest at each node is the fault F03).
        """
        width, at, blocks = self._width, 0, list[int]()
        while at < len(run):
            child = node.children.get(run[at : at + width])
            if child is None:
                break
            self._visited += 1
            if run.startswith(child.tokens, at):
                same = len(child.blocks)
            else:
                same = 1
                while (
                    run[at + same * width : at + (same + 1) * width] == child.tokens[same * width : (same + 1) * width]
                ):
                    same += 1
            self._compared += same * width
            blocks += child.blocks[:same]
            if same < len(child.blocks):
                return node, child, blocks
            at += same * width
            node = child
        return node, None, blocks

    def _touch(self, node: Node) -> None:
        self._tick += 1
        at: Node | None = node
        while at is not None:
            at.recency = self._tick
            at = at.parent

    def _split(self, lower: Node, at: int) -> Node:
        """Cuts the edge of `lower` after `at` blocks; `lower` keeps its end and what rests there."""
        assert lower.parent is not None
        assert 0 < at < len(lower.blocks)
        width = self._width
        upper = Node(lower.parent, bytes(lower.tokens[: at * width]), lower.blocks[:at], lower.recency)
        upper.lock = lower.lock
        lower.parent.children[bytes(upper.tokens[:width])] = upper
        del lower.blocks[:at], lower.tokens[: at * width]
        upper.children[bytes(lower.tokens[:width])] = lower
        lower.parent = upper
        for block in upper.blocks:
            self._homes[block] = upper
        if lower.pins:
            upper.pins = sum(self._pins[block] for block in upper.blocks)
            lower.pins -= upper.pins
            lower.lock -= upper.pins
            if upper.pins and not lower.lock:
                self.protected -= len(lower.blocks)
                self.evictable += len(lower.blocks)
                if not lower.children:
                    self._queue.push(lower)
        self._nodes += 1
        return upper

    def _last_identity(self, node: Node) -> bytes:
        return node.root if node.parent is None else self._identities[node.blocks[-1]]

    def _register(self, node: Node, parent: bytes, run: bytes, blocks: list[int], saved: bool) -> None:
        pins = 0
        for i, block in enumerate(blocks):
            parent = child_identity(self._key, parent, run[i * self._width : (i + 1) * self._width])
            self._homes[block], self._identities[block] = node, parent
            pins += self._pins[block]
        if saved:
            self.saved.update(blocks)
        if pins:
            node.pins += pins
            self.lock(node, pins)
        self._inserted += len(blocks)

    def _unregister(self, blocks: list[int]) -> None:
        for block in blocks:
            del self._homes[block], self._identities[block]
        self.saved.difference_update(blocks)

    def _drop(self, leaf: Node) -> list[int]:
        """Takes an unlocked leaf out; its parent may become one, its namespace may go. Returns its blocks."""
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        del parent.children[bytes(leaf.tokens[: self._width])]
        leaf.dead = True
        self._nodes -= 1
        self.evictable -= len(leaf.blocks)
        self._unregister(leaf.blocks)
        if parent.parent is None:
            self._forget_space(parent)
        elif parent.evictable:
            self._queue.push(parent)
        return leaf.blocks

    def _forget_space(self, root: Node) -> None:
        if not root.children and root.lock == 1 and not root.dead:
            del self._spaces[root.root]
