"""What the save path asks of the KV manager: who is unsaved, does a block still hold it, what stands before it."""

from array import array

from services.scheduler.kv.manager import KVManager
from shared.identity import chain

KEY, ROOT = b"k" * 32, b"r" * 32


def filled() -> tuple[KVManager, list[bytes], list[bytes]]:
    """Two lines that part after their second block: identities of each."""
    kv = KVManager(12, 4, KEY)
    lines = [array("I", range(20)), array("I", [*range(8), *range(50, 60)])]
    for tokens in lines:
        seq = kv.open(ROOT, tokens, len(tokens) - 1)
        assert kv.grow(seq, len(tokens))
        kv.publish(seq, tokens, 8)
        kv.publish(seq, tokens, len(tokens))
        kv.close(seq, tokens, 0)
    first, second = (list(chain(KEY, ROOT, tokens.tobytes(), 4)) for tokens in lines)
    return kv, first, second


def test_all_unsaved_gives_each_block_once_parents_first() -> None:
    kv, first, second = filled()
    unsaved = kv.all_unsaved()
    names = [cached.identity for _, cached in unsaved]
    assert sorted(names) == sorted({*first, *second})
    for root, cached in unsaved:
        assert root == ROOT
        assert cached.parent == ROOT or names.index(cached.parent) < names.index(cached.identity)
        assert cached.identity in (first[cached.index : cached.index + 1] + second[cached.index : cached.index + 1])


def test_hints_are_set_kept_and_taken_back() -> None:
    kv, first, second = filled()
    blocks = {cached.identity: cached.block for _, cached in kv.all_unsaved()}
    for name in first:
        assert kv.mark_saved(blocks[name], name)
    assert {cached.identity for _, cached in kv.all_unsaved()} == set(second) - set(first)
    kv.forget_saved()
    assert len(kv.all_unsaved()) == 7


def test_a_block_holds_its_identity_until_it_is_evicted() -> None:
    kv, first, _ = filled()
    block = next(cached.block for _, cached in kv.all_unsaved() if cached.identity == first[4])
    assert kv.holds(block, first[4])
    assert not kv.holds(block, first[3])
    other = array("I", range(900, 948))
    seq = kv.open(ROOT, other, 47)
    assert kv.grow(seq, 48)
    kv.publish(seq, other, 48)
    assert not kv.holds(block, first[4])
    kv.close(seq, other, 0)
    kv.check_integrity()


def test_a_lineage_is_everything_before_a_block_in_order() -> None:
    kv, first, second = filled()
    for _, cached in kv.all_unsaved():
        line = kv.lineage(ROOT, cached.block)
        expected = first if cached.identity in first else second
        assert [each.identity for each in line] == expected[: cached.index + 1]
        assert [each.parent for each in line] == [ROOT, *expected[: cached.index]]
        assert line[-1] == cached
