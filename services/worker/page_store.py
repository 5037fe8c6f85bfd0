"""The KV pool's bytes: one private anonymous mapping cut into blocks. Reads and writes by block id, never decides.

Who may read or write a block, when it is reused, what lies in it: the scheduler's accounting. The mapping dies with
this process; what shall outlive it has been copied to the arena.
"""

import ctypes
import mmap
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.config import ConfigError
from shared.large_memory import LargeMemory, Wish

POISON = 0xFF
"""Byte of poisoned blocks: fp32, fp16 and bf16 all read it as NaN, so what multiplies it shows."""

_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class BlockOutOfRange(IndexError):
    """A block id is none of this pool's; the text gives both numbers."""


@dataclass(frozen=True)
class PoolStatistics:
    """Blocks, bytes a block, and bytes that have been prefaulted."""

    blocks: int
    block_bytes: int
    prefaulted: int


class PageStore:
    """`nblocks` blocks of `block_bytes` bytes; zero at first.

    `memory` is the whole pool as a writable buffer (page-aligned; torch views it through `frombuffer`), `blocks` the
    same bytes as uint8 [nblocks, block_bytes]. Both stay valid for the life of this object: nothing is ever unmapped.
    """

    def __init__(self, nblocks: int, block_bytes: int, wish: Wish | None = None) -> None:
        if nblocks < 1 or block_bytes < 1:
            raise ValueError(f"a pool needs at least one block of one byte, not {nblocks} of {block_bytes}")
        self.nblocks = nblocks
        self.block_bytes = block_bytes
        self.nbytes = nblocks * block_bytes
        try:
            self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"no memory for a pool of {self.nbytes} bytes ({error}); lower kv.pool_bytes") from error
        self.memory = memoryview(self._map)
        self.blocks: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8).reshape(nblocks, block_bytes)
        self._prefaulted = 0
        self.large = LargeMemory("the pool", "kv", self.memory, wish or Wish())

    def _advise(self, advice: int, start: int, length: int) -> bool:
        # Not mmap.madvise: that one holds the GIL while the kernel works.
        return bool(_libc.madvise(self.blocks.ctypes.data + start, length, advice) == 0)

    def prefault(self, nbytes: int) -> bool:
        """Touches the next `nbytes` bytes, so that a load does not pay the first touch; True when all are touched.

        First touch runs at a tenth of a copy's rate. Contents stay as they are. `nbytes`: a multiple of 4096.
        """
        start = self._prefaulted
        length = min(nbytes, self.nbytes - start)
        if length > 0 and self._advise(_MADV_POPULATE_WRITE, start, length):
            self._prefaulted = start + length
            return self._prefaulted == self.nbytes
        return True  # all done, or a kernel before 5.14: slower, not wrong

    def block(self, block: int) -> NDArray[np.uint8]:
        """Writable view, uint8 [block_bytes], of one block; BlockOutOfRange for an id that is not ours."""
        if not 0 <= block < self.nblocks:
            raise BlockOutOfRange(f"block {block} is outside the pool of {self.nblocks} blocks")
        view: NDArray[np.uint8] = self.blocks[block]
        return view

    def poison(self, block: int) -> None:
        """Fills a block with NaN (tests: nothing may depend on a slot that was never written)."""
        self.block(block)[:] = POISON

    def statistics(self) -> PoolStatistics:
        """Sizes, for status."""
        return PoolStatistics(self.nblocks, self.block_bytes, self._prefaulted)
