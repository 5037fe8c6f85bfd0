"""The KV pool as kernels see it: strided views of its bytes, addressed by (layer, block); it owns nothing.

One block: layer -> K/V -> KV head -> K as [dim][token], V as [token][dim] (see `shared.kv.KVLayout`). The block is the
outermost dimension, so a layer's K is a view with a stride of one block between blocks.
"""

from typing import Any

import torch

from shared.kv import KVLayout

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class PagedKV:
    """Views of `memory`, a writable buffer of whole blocks, which must outlive them.

    `pieces`: the pool as [n, head_dim * block_tokens], a piece being one head's K or V of one layer in one block.
    ValueError when the buffer does not consist of whole blocks, or K and V differ in size.
    """

    def __init__(self, memory: Any, layout: KVLayout) -> None:
        self.layout = layout
        flat = torch.frombuffer(memory, dtype=TORCH_DTYPES[layout.dtype])
        size = layout.block_bytes // flat.element_size()
        if flat.numel() % size:
            raise ValueError(f"{flat.nbytes} bytes of pool are no multiple of a block's {layout.block_bytes}")
        self.blocks = flat.numel() // size
        self.dtype = flat.dtype
        if layout.head_dim_k != layout.head_dim_v:
            raise ValueError(f"heads of {layout.head_dim_k} for K and {layout.head_dim_v} for V are not supported")
        k_size = layout.kv_heads * layout.head_dim_k * layout.block_tokens
        self.pieces = flat.view(-1, layout.head_dim_k * layout.block_tokens)
        pool = flat.view(self.blocks, layout.layers, size // layout.layers)
        k_shape = (self.blocks, layout.kv_heads, layout.head_dim_k, layout.block_tokens)
        v_shape = (self.blocks, layout.kv_heads, layout.block_tokens, layout.head_dim_v)
        # Made once: a step asks for them two times a layer.
        self._k = [pool[:, layer, :k_size].view(k_shape) for layer in range(layout.layers)]
        self._v = [pool[:, layer, k_size:].view(v_shape) for layer in range(layout.layers)]

    def k(self, layer: int) -> torch.Tensor:
        """[blocks, kv_heads, head_dim, block_tokens]."""
        return self._k[layer]

    def piece_index(self, blocks: torch.Tensor) -> torch.Tensor:
        """Indices into `pieces` of layer 0, [2 (K, V), ..., kv_heads, n] for blocks [..., n]; see `piece_step`."""
        heads = torch.arange(2 * self.layout.kv_heads).view(2, *[1] * (blocks.dim() - 1), self.layout.kv_heads, 1)
        return blocks.unsqueeze(-2) * (self.layout.layers * self.piece_step) + heads

    @property
    def piece_step(self) -> int:
        """What to add to a piece's index for the next layer."""
        return 2 * self.layout.kv_heads

    def v(self, layer: int) -> torch.Tensor:
        """[blocks, kv_heads, block_tokens, head_dim]."""
        return self._v[layer]
