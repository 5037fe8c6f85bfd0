"""One test a rule of the radix tree."""

from array import array

import pytest

from services.scheduler.kv.node import TreeError
from services.scheduler.kv.radix import RadixTree

KEY = b"k" * 32
ROOT = b"r" * 32
PINS = array("I", bytes(4 * 200_000))


def packed(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def tree_of(*runs: tuple[bytes, list[int]], block_tokens: int = 1) -> RadixTree:
    """A tree in which every run was inserted from the root by someone who has gone since."""
    tree = RadixTree(block_tokens, KEY, PINS)
    for run, blocks in runs:
        add(tree, run, blocks)
    return tree


def add(tree: RadixTree, run: bytes, blocks: list[int], root: bytes = ROOT) -> int:
    space = tree.space(root)
    tree.lock(space)
    _, _, known = tree.insert(space, run, blocks)
    tree.unlock(space)
    tree.check_integrity()
    return known


def test_a_match_ends_inside_an_edge_and_splits_nothing() -> None:
    tree = tree_of((packed(1, 2, 3, 4), [10, 11, 12, 13]))
    assert tree.match(ROOT, packed(1, 2, 9)) == [10, 11]
    assert tree.match(ROOT, packed(1, 2, 3, 4, 5)) == [10, 11, 12, 13]
    assert tree.match(ROOT, packed(2)) == []
    assert tree.match(b"other" + bytes(27), packed(1)) == []
    assert tree.statistics().nodes == 1


def test_descend_splits_so_that_a_lock_covers_exactly_the_match() -> None:
    tree = tree_of((packed(1, 2, 3, 4), [10, 11, 12, 13]))
    node, blocks = tree.descend(tree.space(ROOT), packed(1, 2, 9))
    tree.lock(node)
    tree.check_integrity()
    assert (node.end, blocks) == (2, [10, 11])
    assert (tree.evictable, tree.protected) == (2, 2)
    assert tree.evict(9) == [13, 12]
    tree.check_integrity()


def test_insert_returns_the_canonical_blocks_and_how_many_were_there() -> None:
    tree = tree_of((packed(1, 2, 3), [10, 11, 12]))
    space = tree.space(ROOT)
    tree.lock(space)
    node, canonical, known = tree.insert(space, packed(1, 2, 7, 8), [20, 21, 22, 23])
    assert (canonical, known, node.end) == ([10, 11, 22, 23], 2, 4)
    tree.check_integrity()
    assert not tree.holds(20)


def test_a_block_is_compared_whole_so_a_shared_start_of_it_is_no_match() -> None:
    tree = tree_of((packed(1, 2, 3, 4), [10, 11]), block_tokens=2)
    assert tree.match(ROOT, packed(1, 2, 3, 5)) == [10]
    assert tree.match(ROOT, packed(1, 9, 3, 4)) == []


def test_namespaces_never_share() -> None:
    tree = tree_of((packed(1, 2), [10, 11]))
    add(tree, packed(1, 2), [20, 21], root=b"s" * 32)
    assert tree.match(ROOT, packed(1, 2)) == [10, 11]
    assert tree.match(b"s" * 32, packed(1, 2)) == [20, 21]
    assert tree.identity(10) != tree.identity(20)


def test_a_leaf_grows_in_place_for_its_only_holder_and_gets_a_child_otherwise() -> None:
    tree = RadixTree(1, KEY, PINS)
    space = tree.space(ROOT)
    tree.lock(space)
    node, _, _ = tree.insert(space, packed(1), [10])
    tree.lock(node)
    same, _, _ = tree.insert(node, packed(2), [11])
    assert same is node
    tree.lock(node)
    other, _, _ = tree.insert(node, packed(3), [12])
    assert other is not node
    assert node.blocks == [10, 11]
    tree.check_integrity()
    assert tree.statistics().nodes == 2


def test_a_copy_in_flight_does_not_keep_a_leaf_from_growing() -> None:
    pins = array("I", bytes(80))
    tree = RadixTree(1, KEY, pins)
    space = tree.space(ROOT)
    tree.lock(space)
    node, _, _ = tree.insert(space, packed(1), [10])
    tree.lock(node)
    pins[10] = 1
    tree.pin(10)
    assert tree.insert(node, packed(2), [11])[0] is node
    tree.check_integrity()


def test_eviction_takes_the_least_recent_leaf_and_of_equals_the_deepest_and_tails_first() -> None:
    tree = tree_of((packed(1, 2), [10, 11]), (packed(5, 6, 7), [20, 21, 22]), (packed(1, 3), [30, 31]))
    tree.match(ROOT, packed(1, 2))
    assert tree.evict(1) == [22]
    assert tree.evict(2) == [21, 20]
    tree.check_integrity()
    assert tree.evict(1) == [31]
    assert tree.evict(5) == [11, 10]
    assert tree.statistics().spaces == 0
    tree.check_integrity()


def test_of_leaves_used_at_the_same_tick_the_deepest_goes_first() -> None:
    tree = tree_of((packed(1, 2), [10, 11]), (packed(5, 6, 7), [20, 21, 22]))
    for first_block in (10, 20):
        tree._homes[first_block].recency = 99
    assert tree.evict(1) == [22]


def test_a_childless_parent_is_promoted_to_a_leaf() -> None:
    tree = tree_of((packed(1, 2), [10, 11]), (packed(1, 3), [20, 21]))
    assert set(tree.evict(2)) == {11, 21}
    assert tree.evict(1) == [10]


def test_evicting_from_a_big_tree_is_no_scan() -> None:
    runs = [(packed(i), [i]) for i in range(4096)]
    tree = tree_of(runs[0])
    for run, blocks in runs[1:]:
        space = tree.space(ROOT)
        tree.lock(space)
        tree.insert(space, run, blocks)
        tree.unlock(space)
    for i in range(4096):
        tree.match(ROOT, packed(i))
    before = tree.statistics().queue_steps
    tree.evict(4096)
    # each leaf surfaces once outdated (its use pays for that) and once to go
    assert tree.statistics().queue_steps - before <= 3 * 4096
    before = tree.statistics().queue_steps
    add(tree, packed(1, 2), [1, 2])
    assert tree.evict(1) == [2]
    assert tree.statistics().queue_steps - before <= 4


@pytest.mark.parametrize("tokens", [8192, 16384, 32768])
def test_f03_a_long_match_compares_each_byte_once_and_visits_each_node_once(tokens: int) -> None:
    block_tokens = 16
    ids = array("I", range(tokens))
    blocks = tokens // block_tokens
    tree = RadixTree(block_tokens, KEY, PINS)
    node = tree.space(ROOT)
    for first in range(0, blocks, 2):  # each two blocks are two nodes, with a sibling that forks off between them
        pair = ids[first * block_tokens : (first + 2) * block_tokens]
        fork = pair[:block_tokens] + array("I", [7] * block_tokens)
        tree.lock(node, 2)  # two holders: it may not grow in place
        tree.insert(node, fork.tobytes(), [first, 100_000 + first])
        end, _, _ = tree.insert(node, pair.tobytes(), [first, first + 1])
        for _ in range(2):
            tree.unlock(node)
        node = end
    tree.check_integrity()
    assert tree.statistics().nodes >= blocks
    before = tree.statistics()
    assert tree.match(ROOT, ids.tobytes()) == list(range(blocks))
    after = tree.statistics()
    assert after.compared - before.compared == 4 * tokens
    assert after.visited - before.visited <= blocks


def test_a_split_leaves_the_pins_with_their_blocks() -> None:
    pins = array("I", bytes(80))
    tree = RadixTree(1, KEY, pins)
    space = tree.space(ROOT)
    tree.lock(space)
    tree.insert(space, packed(1, 2, 3), [10, 11, 12])
    pins[10] = 1
    tree.pin(10)
    assert (tree.evictable, tree.protected) == (0, 3)
    tree.descend(space, packed(1))
    tree.check_integrity()
    assert (tree.evictable, tree.protected) == (2, 1)
    assert tree.evict(3) == [12, 11]
    pins[10] = 0
    assert tree.unpin(10) == []
    tree.check_integrity()
    assert tree.evict(3) == [10]


def test_w16_an_evicted_block_answers_for_nothing_any_more() -> None:
    tree = tree_of((packed(1, 2), [10, 11]))
    name = tree.identity(11)
    tree.mark_saved(11, name, True)
    tree.evict(1)
    assert not tree.holds(11)
    assert 11 not in tree.saved
    assert not tree.mark_saved(11, name, True)
    with pytest.raises(KeyError):
        tree.identity(11)
    assert tree.match(ROOT, packed(1, 2)) == [10]


def test_clear_drops_what_is_loose_now_and_the_rest_when_its_last_lock_goes() -> None:
    tree = tree_of((packed(1, 2), [10, 11]), (packed(1, 3), [20, 21]))
    node, _ = tree.descend(tree.space(ROOT), packed(1, 2))
    tree.lock(node)
    assert tree.clear(lambda root: root == ROOT) == [21]
    tree.check_integrity()
    assert tree.match(ROOT, packed(1, 2)) == []
    add(tree, packed(1, 2), [30, 31])
    assert tree.match(ROOT, packed(1, 2)) == [30, 31]
    assert sorted(tree.unlock(node)) == [10, 11]
    tree.check_integrity()


def test_unlocking_too_often_is_an_error() -> None:
    tree = tree_of((packed(1), [10]))
    node, _ = tree.descend(tree.space(ROOT), packed(1))
    with pytest.raises(TreeError, match="more often"):
        tree.unlock(node)


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree, node: setattr(node, "lock", 1),
        lambda tree, node: setattr(node, "end", 5),
        lambda tree, node: node.blocks.append(12),
        lambda tree, node: node.tokens.__setitem__(0, 9),
        lambda tree, node: node.tokens.__setitem__(4, 9),
        lambda tree, node: setattr(node, "queued", False),
        lambda tree, node: setattr(node, "dead", True),
        lambda tree, node: setattr(tree, "evictable", 3),
        lambda tree, node: tree.saved.add(77),
        lambda tree, node: tree._homes.pop(10),
    ],
)
def test_the_integrity_check_can_fail(damage) -> None:
    tree = tree_of((packed(1, 2), [10, 11]))
    node, _ = tree.descend(tree.space(ROOT), packed(1, 2))
    damage(tree, node)
    with pytest.raises((TreeError, KeyError)):
        tree.check_integrity()
