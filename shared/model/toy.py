"""The toy model: a deterministic integer "language model" whose every token depends on every byte of its KV.

Tests of cache, store and kills run on it: a wrong, stale or torn block changes the tokens that follow, so equality is
strict, and starting it costs no torch import. A token's KV is 64 bytes (one layer, one head of 8, K and V in fp32);
it is hashed from seed, token, position and the *state*, which is read back from the KV of the position before. The
next token hashes the KV of all positions, so a block that was loaded and never read again is noticed too.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

VOCAB = 512
EOS = 256
"""Never generated; ids below it are bytes, ids above it are written `<300>`."""
LAYERS = 1
KV_HEADS = 1
HEAD_DIM = 8
TOKEN_BYTES = 64
"""KV of one token: 2 (K and V) * HEAD_DIM * 4 bytes."""
MAX_CONTEXT = 4096
START_STATE = 0
"""State before position 0."""

_FINITE = int.from_bytes(b"\xff\xff\xff\xbf" * (TOKEN_BYTES // 4), "little")
"""Clears the exponent's top bit of each fp32: the bytes are finite numbers below 2, as a real model's KV would be."""

Buffer = bytes | bytearray | memoryview


class ToyModel:
    """The model of one seed; pure, holds no KV."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._key = (seed & (2**64 - 1)).to_bytes(8, "little")

    def kv(self, token: int, position: int, previous_state: int) -> bytes:
        """64 bytes of KV of `token` at `position`; `previous_state` is `state` of the KV at position - 1."""
        facts = token.to_bytes(4, "little") + position.to_bytes(4, "little") + previous_state.to_bytes(8, "little")
        digest = blake2b(facts, digest_size=TOKEN_BYTES, key=self._key, person=b"toy-kv").digest()
        return (int.from_bytes(digest, "little") & _FINITE).to_bytes(TOKEN_BYTES, "little")

    @staticmethod
    def state(kv: Buffer) -> int:
        """Running state (u64) after the position whose 64 bytes of KV these are."""
        if len(kv) != TOKEN_BYTES:
            raise ValueError(f"a token's KV has {TOKEN_BYTES} bytes, got {len(kv)}")
        return int.from_bytes(blake2b(kv, digest_size=8, person=b"toy-state").digest(), "little")

    def next_token(self, kv: Buffer | Iterable[Buffer]) -> int:
        """Id that follows positions 0..n-1, from all their KV bytes in order: one buffer, or pieces (blocks, rows).

        Pieces may be cut anywhere; their concatenation decides. ValueError when there is no KV.
        """
        digest = blake2b(digest_size=8, key=self._key, person=b"toy-next")
        seen = 0
        for piece in [kv] if isinstance(kv, Buffer) else kv:
            digest.update(piece)
            seen += memoryview(piece).nbytes
        if not seen or seen % TOKEN_BYTES:
            raise ValueError(f"KV of {seen} bytes is no positive multiple of {TOKEN_BYTES}")
        drawn = int.from_bytes(digest.digest(), "little") % (VOCAB - 1)
        return drawn + (drawn >= EOS)


def toy_generate(seed: int, prompt_ids: Sequence[int], n: int) -> list[int]:
    """The oracle: the `n` ids that follow `prompt_ids`, with no cache anywhere. ValueError for an empty prompt."""
    model = ToyModel(seed)
    cached = bytearray()
    state = START_STATE
    out: list[int] = []
    for position in range(len(prompt_ids) + n):
        if position >= len(prompt_ids):
            out.append(model.next_token(cached))
        kv = model.kv(prompt_ids[position] if position < len(prompt_ids) else out[-1], position, state)
        state = model.state(kv)
        cached += kv
    return out


def toy_encode(text: str) -> list[int]:
    """Text -> ids: its UTF-8 bytes."""
    return list(text.encode())


def toy_decode(ids: Iterable[int]) -> str:
    """Ids -> text: bytes as UTF-8 (invalid ones replaced), eos as nothing, others as `<300>`."""
    raw = b"".join(bytes((i,)) if i < EOS else b"" if i == EOS else f"<{i}>".encode() for i in ids)
    return raw.decode(errors="replace")
