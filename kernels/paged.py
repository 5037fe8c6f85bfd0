"""The KV pool as kernels see it: the bytes of whole blocks, and how they are laid out; it owns nothing.

One block: layer -> K/V -> KV head -> K as [dim][token], V as [token][dim] (see `shared.kv.KVLayout`). The block is the
outermost dimension, so one layer's K of all blocks has a stride of one block.
"""

from typing import Any

import numpy as np

from shared.kv import KVLayout


class PagedKV:
    """`memory`, a writable buffer of whole blocks, which must outlive this.

    ValueError when the buffer does not consist of whole blocks, or K and V differ in size.
    """

    def __init__(self, memory: Any, layout: KVLayout) -> None:
        self.memory = memory
        self.layout = layout
        self.bytes = np.frombuffer(memory, dtype=np.uint8)
        """All of it, [blocks * block_bytes]."""
        if self.bytes.nbytes % layout.block_bytes:
            raise ValueError(f"{self.bytes.nbytes} bytes of pool are no multiple of a block's {layout.block_bytes}")
        if layout.head_dim_k != layout.head_dim_v:
            raise ValueError(f"heads of {layout.head_dim_k} for K and {layout.head_dim_v} for V are not supported")
        self.blocks = self.bytes.nbytes // layout.block_bytes
