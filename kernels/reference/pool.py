"""The pool as torch tensors: strided views of its bytes by (layer, block)."""

import torch

from kernels.paged import PagedKV

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Views:
    """Views of one pool; they share its memory.

    `pieces`: the pool as [n, head_dim * block_tokens], a piece being one head's K or V of one layer in one block.
    """

    def __init__(self, kv: PagedKV) -> None:
        layout = self.layout = kv.layout
        flat = torch.frombuffer(kv.memory, dtype=TORCH_DTYPES[layout.dtype])
        size = layout.block_bytes // flat.element_size()
        self.dtype = flat.dtype
        k_size = layout.kv_heads * layout.head_dim_k * layout.block_tokens
        self.pieces = flat.view(-1, layout.head_dim_k * layout.block_tokens)
        pool = flat.view(kv.blocks, layout.layers, size // layout.layers)
        k_shape = (kv.blocks, layout.kv_heads, layout.head_dim_k, layout.block_tokens)
        v_shape = (kv.blocks, layout.kv_heads, layout.block_tokens, layout.head_dim_v)
        # Made once: a step asks for them two times a layer.
        self._k = [pool[:, layer, :k_size].view(k_shape) for layer in range(layout.layers)]
        self._v = [pool[:, layer, k_size:].view(v_shape) for layer in range(layout.layers)]

    def k(self, layer: int) -> torch.Tensor:
        """[blocks, kv_heads, head_dim, block_tokens]."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """[blocks, kv_heads, block_tokens, head_dim]."""
        return self._v[layer]

    def piece_index(self, blocks: torch.Tensor) -> torch.Tensor:
        """Indices into `pieces` of layer 0, [2 (K, V), ..., kv_heads, n] for blocks [..., n]; see `piece_step`."""
        heads = torch.arange(2 * self.layout.kv_heads).view(2, *[1] * (blocks.dim() - 1), self.layout.kv_heads, 1)
        return blocks.unsqueeze(-2) * (self.layout.layers * self.piece_step) + heads

    @property
    def piece_step(self) -> int:
        """What to add to a piece's index for the next layer."""
        return 2 * self.layout.kv_heads
