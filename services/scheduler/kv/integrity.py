"""The invariants of the radix tree, checked by recomputing everything from the edges.

A friend of RadixTree: it reads what is private there, and nothing else does.
"""

from typing import TYPE_CHECKING

from services.scheduler.kv.node import Node, TreeError, below
from shared.identity import child as child_identity

if TYPE_CHECKING:
    from services.scheduler.kv.radix import RadixTree


def check_tree(tree: "RadixTree") -> None:
    """Raises TreeError at the first invariant that does not hold, with its numbers."""
    seen: dict[int, Node] = {}
    evictable = protected = nodes = 0
    for space in [*tree._spaces.values(), *tree._dying]:
        if space.lock < 1 or space.blocks or space.dead != (space in tree._dying):
            raise TreeError(f"root with lock {space.lock}, {len(space.blocks)} blocks, dead {space.dead}")
        if not space.children and space.lock == 1:
            raise TreeError("an empty namespace that nothing rests on was kept")
        for node in below(space):
            nodes += 1
            _check_node(tree, node, space.dead)
            evictable += 0 if node.lock else len(node.blocks)
            protected += len(node.blocks) if node.lock else 0
            for block in node.blocks:
                if block in seen:
                    raise TreeError(f"block {block} lies in two edges")
                seen[block] = node
    if (evictable, protected, nodes) != (tree.evictable, tree.protected, tree._nodes):
        recorded = f"{tree._nodes}, {tree.evictable} and {tree.protected}"
        raise TreeError(
            f"{nodes} nodes with {evictable} evictable and {protected} protected blocks; recorded {recorded}"
        )
    if seen != tree._homes or tree._identities.keys() != seen.keys() or not tree.saved <= seen.keys():
        raise TreeError(f"{len(seen)} blocks in edges, {len(tree._homes)} indexed, {len(tree._identities)} named")


def _check_node(tree: "RadixTree", node: Node, dead: bool) -> None:
    parent, width = node.parent, tree._width
    if parent is None or parent.children.get(bytes(node.tokens[:width])) is not node:
        raise TreeError("a node is not where its first block says")
    if not node.blocks or len(node.tokens) != len(node.blocks) * width or node.start != parent.end:
        raise TreeError(f"an edge of {len(node.blocks)} blocks has {len(node.tokens)} bytes and starts at {node.start}")
    resting = sum(child.lock for child in node.children.values()) + node.pins
    pins = sum(tree._pins[block] for block in node.blocks)
    if node.lock < resting or node.lock > parent.lock or node.pins != pins:
        raise TreeError(
            f"lock {node.lock} under {parent.lock}, at least {resting} rest on it, pins {node.pins} of {pins}"
        )
    if node.dead != dead or (dead and not node.lock):
        raise TreeError(f"a node with lock {node.lock} is dead {node.dead} in a namespace that is dead {dead}")
    if node.evictable and not node.queued:
        raise TreeError("an evictable leaf is not in the eviction queue")
    name = parent.root if parent.parent is None else tree._identities[parent.blocks[-1]]
    for i, block in enumerate(node.blocks):
        name = child_identity(tree._key, name, bytes(node.tokens[i * width : (i + 1) * width]))
        if tree._identities[block] != name:
            raise TreeError(f"block {block} carries the identity of other tokens")
