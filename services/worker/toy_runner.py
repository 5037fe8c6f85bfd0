"""The integer test model over the real page store: writes real bytes, reads all of them back.

A token's KV goes into its block where the layout says (K as [dim][token], V as [token][dim]); its state comes from
the bytes of the position before, and the next token from the bytes of *all* positions, through the block table. So a
wrong, stale or torn block changes what is generated. Imports no torch: a toy worker is up in a fraction of a second.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.worker.page_store import PageStore
from services.worker.rows import Span, checked
from services.worker.runner import RowOutput, StepOutput
from shared.config import Config, ConfigError
from shared.identity import fingerprint
from shared.kv import KVLayout
from shared.messages.engine import KVFacts, Row, WorkerReady
from shared.model.toy import HEAD_DIM, KV_HEADS, LAYERS, MAX_CONTEXT, START_STATE, TOKEN_BYTES, VOCAB, ToyModel

DEFAULT_BLOCK_TOKENS = 16
NUMERICS = "toy-1"


class ToyRunner:
    """Runs `toy:<seed>`. Deterministic: the same rows over the same bytes give the same tokens, batched or not."""

    def __init__(self, config: Config) -> None:
        source = config.model.source
        try:
            seed = int(source.removeprefix("toy:"))
        except ValueError:
            raise ConfigError(f"model.source {source!r} names no toy model; write toy:<seed>, as in toy:7") from None
        self._model = ToyModel(seed)
        tokens = config.kv.block_tokens or DEFAULT_BLOCK_TOKENS
        layout = KVLayout(LAYERS, KV_HEADS, HEAD_DIM, HEAD_DIM, "fp32", tokens)
        blocks = config.kv.pool_bytes // layout.block_bytes
        if config.faults.max_pool_blocks:
            blocks = min(blocks, config.faults.max_pool_blocks)
        if blocks < 1:
            raise ConfigError(f"kv.pool_bytes {config.kv.pool_bytes} holds no block of {layout.block_bytes} bytes")
        self._ready = WorkerReady(
            model=source,
            architecture="toy",
            vocab=VOCAB,
            max_context=config.model.max_context or MAX_CONTEXT,
            backend="toy",
            numerics=NUMERICS,
            kv=KVFacts(
                fingerprint=fingerprint(
                    {"model": source, "numerics": NUMERICS, "layout": layout.name, "block_tokens": tokens}
                ),
                block_tokens=tokens,
                block_bytes=layout.block_bytes,
                blocks=blocks,
                kv_dtype=layout.dtype,
                layers=LAYERS,
                kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
            ),
            limits={},
        )

    @property
    def ready(self) -> WorkerReady:
        """Model, limits and KV facts."""
        return self._ready

    @property
    def facts(self) -> KVFacts:
        """`ready.kv`."""
        return self._ready.kv

    @property
    def largest_step_s(self) -> float:
        """Microseconds a token."""
        return 0.0

    @property
    def exact(self) -> bool:
        """Integers are."""
        return True

    def step(self, rows: Sequence[Row], pool: PageStore) -> StepOutput:
        """Writes the KV of all rows' tokens, then draws for the rows that sample. BadRow before anything is written."""
        spans = [checked(row, self._ready) for row in rows]
        for span in spans:
            self._write(span, pool)
        return StepOutput(
            tuple(
                RowOutput(token=self._next(span, pool)) if row.sample is not None else RowOutput()
                for row, span in zip(rows, spans, strict=True)
            )
        )

    def _halves(self, pool: PageStore) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """K, uint32 [blocks, dim, token], and V, uint32 [blocks, token, dim], as views of the pool."""
        tokens = self.facts.block_tokens
        words = pool.blocks.view(np.uint32).reshape(pool.nblocks, 2, HEAD_DIM * tokens)
        return words[:, 0].reshape(-1, HEAD_DIM, tokens), words[:, 1].reshape(-1, tokens, HEAD_DIM)

    def _write(self, span: Span, pool: PageStore) -> None:
        keys, values = self._halves(pool)
        tokens = self.facts.block_tokens
        state = START_STATE
        if span.start:
            block, slot = span.blocks[(span.start - 1) // tokens], (span.start - 1) % tokens
            state = self._model.state(keys[block, :, slot].tobytes() + values[block, slot].tobytes())
        for position, token in enumerate(span.ids, span.start):
            block, slot = span.blocks[position // tokens], position % tokens
            kv = self._model.kv(token, position, state)
            words = np.frombuffer(kv, np.uint32)
            keys[block, :, slot] = words[:HEAD_DIM]
            values[block, slot] = words[HEAD_DIM:]
            state = self._model.state(kv)

    def _next(self, span: Span, pool: PageStore) -> int:
        keys, values = self._halves(pool)
        table = np.asarray(span.blocks[: -(-span.end // self.facts.block_tokens)])
        by_token = np.concatenate([keys[table].transpose(0, 2, 1), values[table]], axis=2)
        history = by_token.reshape(-1, TOKEN_BYTES // 4)[: span.end]
        return self._model.next_token(history.tobytes())
