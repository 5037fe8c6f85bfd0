"""The KV pool's bytes."""

import mmap

import numpy as np
import pytest

from services.worker.page_store import BlockOutOfRange, PageStore


def test_blocks_are_contiguous_slices_of_one_page_aligned_memory() -> None:
    pool = PageStore(5, 1024)
    assert pool.blocks.ctypes.data % mmap.PAGESIZE == 0
    assert len(pool.memory) == pool.nbytes == 5 * 1024
    assert not any(pool.memory)
    pool.block(3)[:] = 7
    assert bytes(pool.memory[3 * 1024 : 4 * 1024]) == b"\x07" * 1024
    assert not any(pool.memory[: 3 * 1024])
    assert not any(pool.memory[4 * 1024 :])


@pytest.mark.parametrize("block", [-1, 3, 1 << 40])
def test_a_block_outside_the_pool_is_an_error_with_both_numbers(block: int) -> None:
    pool = PageStore(3, 64)
    with pytest.raises(BlockOutOfRange, match=f"{block} .* 3 blocks"):
        pool.block(block)
    with pytest.raises(BlockOutOfRange):
        pool.poison(block)


def test_poison_reads_as_nan_in_every_kv_dtype() -> None:
    pool = PageStore(2, 64)
    pool.poison(1)
    assert np.isnan(pool.block(1).view(np.float32)).all()
    assert np.isnan(pool.block(1).view(np.float16)).all()
    bf16_as_fp32 = pool.block(1).view(np.uint16).astype(np.uint32) << 16
    assert np.isnan(bf16_as_fp32.view(np.float32)).all()
    assert not pool.block(0).any()


def test_prefault_ends_and_keeps_the_contents() -> None:
    pool = PageStore(7, 4096)
    pool.block(5)[:] = 9
    turns = 0
    while not pool.prefault(8192):
        turns += 1
        assert turns < 10
    assert (pool.block(5) == 9).all()
    assert pool.prefault(8192)


def test_a_pool_without_blocks_or_too_large_to_map_is_refused_with_numbers() -> None:
    with pytest.raises(ValueError, match="0 of 64"):
        PageStore(0, 64)
    with pytest.raises(ValueError, match=r"lower kv\.pool_bytes"):
        PageStore(1 << 30, 1 << 30)


def test_torch_sees_the_same_memory() -> None:
    torch = pytest.importorskip("torch")
    pool = PageStore(2, 64)
    tensor = torch.frombuffer(pool.memory, dtype=torch.float32).view(2, 16)
    tensor[1, 3] = 2.5
    assert pool.block(1).view(np.float32)[3] == 2.5
