"""One test a rule of the block pool."""

import pytest

from services.scheduler.kv.block_pool import COPY, FREE, REQUEST, TREE, BlockPool, OutOfBlocks, OwnershipError


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of 4 are free"):
        pool.allocate(2)
    assert pool.free == 1
    assert pool.allocate(1) == [3]
    pool.check_integrity()


def test_released_blocks_are_used_again_first_so_that_a_light_load_touches_few() -> None:
    pool = BlockPool(100)
    for _ in range(20):
        blocks = pool.allocate(5)
        assert blocks == [0, 1, 2, 3, 4]
        pool.release(reversed(blocks), REQUEST)


def test_any_free_block_can_be_taken_from_the_middle() -> None:
    pool = BlockPool(6)
    for block in (3, 0, 5):
        pool.take(block)
        pool.check_integrity()
    assert pool.allocate(3) == [1, 2, 4]
    assert pool.free == 0


@pytest.mark.parametrize("owner", [REQUEST, TREE])
def test_a_double_free_is_an_error(owner: int) -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    if owner == TREE:
        pool.adopt(blocks)
    pool.release(blocks, owner)
    with pytest.raises(OwnershipError, match="block 0 released"):
        pool.release(blocks, owner)
    pool.check_integrity()


def test_nobody_frees_or_takes_what_is_anothers() -> None:
    pool = BlockPool(3)
    mine, trees = pool.allocate(2)
    pool.adopt([trees])
    for wrong in (
        lambda: pool.release([mine], TREE),
        lambda: pool.release([trees], REQUEST),
        lambda: pool.take(mine),
        lambda: pool.adopt([trees]),
        lambda: pool.adopt([2]),
        lambda: pool.pin(2),
        lambda: pool.unpin(mine),
    ):
        with pytest.raises(OwnershipError):
            wrong()
    pool.check_integrity()
    assert [pool.owner(b) for b in range(3)] == [REQUEST, TREE, FREE]


def test_w23_a_released_block_with_copies_in_flight_is_free_only_after_the_last_one() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.pin(block)
    pool.pin(block)
    pool.release([block], REQUEST)
    assert pool.owner(block) == COPY
    assert pool.free == 0
    pool.unpin(block)
    assert pool.free == 0
    pool.unpin(block)
    assert pool.owner(block) == FREE
    pool.check_integrity()


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        BlockPool(0)


def test_the_integrity_check_can_fail() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool._owner[2] = REQUEST
    with pytest.raises(OwnershipError):
        pool.check_integrity()
    pool = BlockPool(3)
    pool._pins[1] = 1
    with pytest.raises(OwnershipError):
        pool.check_integrity()
