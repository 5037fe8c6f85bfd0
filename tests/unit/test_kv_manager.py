"""One test a rule of the KV manager."""

from array import array

import pytest

from services.scheduler.kv.block_pool import OwnershipError
from services.scheduler.kv.manager import KVManager
from services.scheduler.kv.sequence import Sequence
from shared import identity

KEY, ROOT, OTHER = b"k" * 32, b"r" * 32, b"s" * 32
B = 4


def tokens(*ids: int) -> "array[int]":
    return array("I", ids)


PROMPT = tokens(*range(10))


def run(kv: KVManager, prompt: "array[int]", root: bytes = ROOT, *, store: bool = True) -> Sequence:
    """A request that computed its whole prompt."""
    seq = kv.open(root, prompt, len(prompt) - 1, store=store)
    assert kv.grow(seq, len(prompt))
    kv.publish(seq, prompt, len(prompt))
    kv.check_integrity()
    return seq


def end(kv: KVManager, seq: Sequence, prompt: "array[int]") -> None:
    kv.close(seq, prompt, len(prompt))
    kv.check_integrity()


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B])
def test_w04_at_least_one_token_is_left_to_compute(length: int) -> None:
    kv = KVManager(8, B, KEY)
    prompt = tokens(*range(length))
    end(kv, run(kv, prompt), prompt)
    match = kv.match(ROOT, prompt, length - 1)
    assert match.tokens == (length - 1) // B * B <= length - 1
    seq = kv.open(ROOT, prompt, length - 1)
    assert seq.cached_blocks * B == match.tokens


def test_a_match_locks_nothing_and_a_sequence_locks_its_hit() -> None:
    kv = KVManager(4, B, KEY)
    end(kv, run(kv, PROMPT), PROMPT)
    assert kv.match(ROOT, PROMPT, 9).tokens == 8
    assert (kv.statistics().cached, kv.statistics().locked) == (2, 0)
    seq = kv.open(ROOT, PROMPT, 9)
    assert (kv.statistics().cached, kv.statistics().locked) == (0, 2)
    end(kv, seq, PROMPT[:8])


def test_growing_is_all_or_nothing_and_evicts_nothing_in_vain() -> None:
    kv = KVManager(4, B, KEY)
    end(kv, run(kv, PROMPT), PROMPT)
    seq = kv.open(OTHER, PROMPT, 9)
    assert not kv.grow(seq, 5 * B)
    assert kv.statistics().evicted == 0
    assert kv.grow(seq, 3 * B)
    assert kv.statistics().evicted == 1
    assert kv.match(ROOT, PROMPT, 9).tokens == 4
    kv.check_integrity()


def test_growing_never_shrinks_and_is_free_when_there_is_enough() -> None:
    kv = KVManager(4, B, KEY)
    seq = kv.open(ROOT, PROMPT, 9)
    assert kv.grow(seq, 10)
    blocks = list(seq.blocks)
    assert kv.grow(seq, 3)
    assert kv.grow(seq, 12)
    assert seq.blocks == blocks


def test_w17_a_prefix_that_another_published_meanwhile_replaces_the_duplicate_blocks() -> None:
    kv = KVManager(8, B, KEY)
    first, second = kv.open(ROOT, PROMPT, 9), kv.open(ROOT, PROMPT, 9)
    assert kv.grow(first, 10)
    assert kv.grow(second, 10)
    tail = second.blocks[2]
    assert [block.index for block in kv.publish(first, PROMPT, 10)] == [0, 1]
    assert kv.publish(second, PROMPT, 10) == []
    assert second.blocks == [*first.blocks[:2], tail]
    assert kv.statistics().free == 8 - 2 - 2
    assert kv.statistics().duplicates == 2
    end(kv, first, PROMPT)
    end(kv, second, PROMPT)


def test_what_is_published_is_named_by_its_chain() -> None:
    kv = KVManager(8, B, KEY)
    seq = kv.open(ROOT, PROMPT, 9)
    kv.grow(seq, 10)
    first = kv.publish(seq, PROMPT, 5)
    second = kv.publish(seq, PROMPT, 9)
    names = list(identity.chain(KEY, ROOT, PROMPT.tobytes(), B))
    assert [block.identity for block in first + second] == names
    assert [block.parent for block in first + second] == [ROOT, names[0]]
    assert kv.identities(ROOT, PROMPT, 2) == b"".join(names)
    assert kv.publish(seq, PROMPT, 10) == []  # no further block is full


def test_a08_a_request_that_does_not_store_makes_progress_and_leaves_nothing() -> None:
    kv = KVManager(8, B, KEY)
    prompt = tokens(*range(20))
    seq = kv.open(ROOT, prompt, 19, store=False)
    held: list[int] = []
    for computed in (4, 8, 12, 16, 20):
        assert kv.grow(seq, computed)
        assert kv.publish(seq, prompt, computed) == []
        assert seq.blocks[: len(held)] == held  # never allocated anew from the start
        held = list(seq.blocks)
    end(kv, seq, prompt)
    assert kv.statistics().free == 8
    assert kv.match(ROOT, prompt, 19).tokens == 0


def test_a02_without_prefix_cache_nothing_stays() -> None:
    kv = KVManager(8, B, KEY, prefix_cache=False)
    for _ in range(300):
        end(kv, run(kv, PROMPT), PROMPT)
        assert kv.statistics().free == 8


def test_no_read_finds_nothing_and_still_shares_what_it_publishes() -> None:
    kv = KVManager(8, B, KEY)
    end(kv, run(kv, PROMPT), PROMPT)
    seq = kv.open(ROOT, PROMPT, 9, read=False)
    assert seq.blocks == []
    kv.grow(seq, 10)
    assert kv.publish(seq, PROMPT, 10) == []
    assert seq.cached_blocks == 2
    end(kv, seq, PROMPT)
    assert kv.statistics().cached == 2


def test_w23_a_block_with_a_copy_in_flight_outlives_its_request() -> None:
    kv = KVManager(3, B, KEY)
    seq = kv.open(ROOT, PROMPT, 9)
    kv.grow(seq, 10)
    loading = seq.blocks[0]
    kv.pin(loading)
    kv.close(seq, PROMPT, 0)  # cancelled
    other = kv.open(OTHER, PROMPT, 9)
    assert not kv.grow(other, 12)
    assert kv.grow(other, 8)
    assert loading not in other.blocks
    kv.unpin(loading)
    assert kv.grow(other, 12)
    kv.check_integrity()


def test_w23_a_cached_block_with_a_copy_in_flight_is_not_evicted() -> None:
    kv = KVManager(3, B, KEY)
    end(kv, run(kv, PROMPT), PROMPT)
    block = kv.match(ROOT, PROMPT, 9).blocks[0]
    kv.pin(block)
    seq = kv.open(OTHER, PROMPT, 9)
    assert not kv.grow(seq, 12)
    kv.unpin(block)
    assert kv.grow(seq, 12)


def test_loaded_blocks_are_the_tree_s_and_known_to_be_saved() -> None:
    kv = KVManager(8, B, KEY)
    seq = kv.open(ROOT, PROMPT, 9)
    kv.grow(seq, 8)
    new = kv.attach(seq, PROMPT, 8)
    assert [kv.is_saved(block.block) for block in new] == [True, True]
    kv.grow(seq, 12)
    more = tokens(*range(12))
    (computed,) = kv.publish(seq, more, 12)
    assert kv.unsaved(seq) == [computed]
    assert kv.mark_saved(computed.block, computed.identity)
    assert kv.unsaved(seq) == []


def test_w16_a_saved_hint_does_not_pass_to_what_a_block_holds_next() -> None:
    kv = KVManager(2, B, KEY)
    seq = run(kv, PROMPT[:8])
    late = kv.unsaved(seq)
    end(kv, seq, PROMPT[:8])
    other = run(kv, PROMPT[:8], OTHER)
    assert {block.block for block in late} == set(other.blocks)
    assert not any(kv.mark_saved(block.block, block.identity) for block in late)
    assert not any(kv.is_saved(block) for block in other.blocks)


@pytest.mark.parametrize("a_line", [False, True])
def test_clear_lets_running_requests_finish_and_keeps_them_from_publishing(a_line: bool) -> None:
    kv = KVManager(8, B, KEY)
    seq = kv.open(ROOT, PROMPT, 9)
    kv.grow(seq, 12)
    kv.publish(seq, PROMPT, 4)
    assert (kv.clear_line(ROOT, PROMPT[:B].tobytes()) if a_line else kv.clear()) == 1
    assert kv.publish(seq, PROMPT, 10) == []
    assert len(set(seq.blocks)) == 3
    fresh = run(kv, PROMPT)
    assert not set(fresh.blocks) & set(seq.blocks)
    end(kv, seq, PROMPT)
    end(kv, fresh, PROMPT)
    assert kv.match(ROOT, PROMPT, 9).tokens == 8
    assert kv.statistics().free == 6


def test_clear_of_one_namespace_leaves_the_others() -> None:
    kv = KVManager(8, B, KEY)
    for root in (ROOT, OTHER):
        end(kv, run(kv, PROMPT, root), PROMPT)
    assert kv.clear(lambda root: root == ROOT) == 2
    assert kv.match(ROOT, PROMPT, 9).tokens == 0
    assert kv.match(OTHER, PROMPT, 9).tokens == 8
    assert kv.clear(lambda root: root == b"x" * 32) == 0


def test_clear_of_a_line_leaves_its_neighbours() -> None:
    kv = KVManager(8, B, KEY)
    neighbour = array("I", [99, *PROMPT[1:]])
    for tokens in (PROMPT, neighbour):
        end(kv, run(kv, tokens), tokens)
    assert kv.clear_line(ROOT, array("I", [98, *PROMPT[1:B]]).tobytes()) == 0
    assert kv.clear_line(OTHER, PROMPT[:B].tobytes()) == 0
    assert kv.clear_line(ROOT, PROMPT[:B].tobytes()) == 2
    assert kv.match(ROOT, PROMPT, 9).tokens == 0
    assert kv.match(ROOT, neighbour, 9).tokens == 8
    assert kv.statistics().free == 6


def test_a_closed_sequence_is_used_by_nobody() -> None:
    kv = KVManager(8, B, KEY)
    seq = run(kv, PROMPT)
    end(kv, seq, PROMPT)
    for use in (
        lambda: kv.grow(seq, 20),
        lambda: kv.publish(seq, PROMPT, 10),
        lambda: kv.close(seq, PROMPT, 10),
    ):
        with pytest.raises(OwnershipError, match="closed"):
            use()
    kv.check_integrity()


def test_publishing_what_was_not_computed_is_an_error() -> None:
    kv = KVManager(8, B, KEY)
    seq = kv.open(ROOT, PROMPT, 9)
    kv.grow(seq, 8)
    with pytest.raises(ValueError, match="12 tokens computed, but 10 given"):
        kv.publish(seq, PROMPT, 12)


def test_a_conversation_keeps_one_edge_and_not_a_node_for_every_block() -> None:
    """A decode that completes block after block, each pinned by its save, must not make the tree a long chain."""
    kv = KVManager(80, B, KEY)
    ids = tokens(*range(8))
    seq = kv.open(ROOT, ids, 7)
    for position in range(8, 256):
        ids.append(position)
        kv.grow(seq, len(ids))
        for block in kv.publish(seq, ids, len(ids)):
            kv.pin(block.block)
    assert kv.statistics().nodes == 1
    kv.check_integrity()
