"""Sizes of KV: bytes a token, bytes a block, and the block length that a model gets by default."""

from dataclasses import dataclass

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
TARGET_BLOCK_BYTES = 1 << 20
BLOCK_TOKENS = (16, 32, 64, 128)


@dataclass(frozen=True)
class KVLayout:
    """Layout of one block: layer -> K/V -> KV head -> K as [dim][token], V as [token][dim], contiguous.

    One block of all layers is one copy, one host slot and one disk slot.
    """

    layers: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: str
    block_tokens: int

    @property
    def token_bytes(self) -> int:
        """Bytes of KV that one token takes over all layers."""
        width = self.kv_heads * (self.head_dim_k + self.head_dim_v)
        return self.layers * width * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.token_bytes * self.block_tokens

    @property
    def name(self) -> str:
        """The layout's own version, part of the fingerprint."""
        return "block-layer-kv-head:Kdt,Vtd:1"


def default_block_tokens(token_bytes: int) -> int:
    """The power of two from 16 to 128 whose block is nearest 1 MiB."""
    return min(BLOCK_TOKENS, key=lambda tokens: abs(tokens * token_bytes - TARGET_BLOCK_BYTES))
