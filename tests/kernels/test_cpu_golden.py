"""Digests of a tiny model's logits and KV: who changes a bit has to raise VERSION or INT8_VERSION of
`kernels.cpu.backend`.

Weights come from an integer formula and cos, sin from exact fractions, so nothing but the kernels' arithmetic is in
the digests. They are the same on every instruction set.
"""

import hashlib

import numpy as np
import pytest

from kernels.batch import make_batch
from kernels.cpu.backend import INT8_VERSION, VERSION, Cpu
from kernels.cpu.library import ISA_VARIABLE, supported
from kernels.paged import PagedKV
from kernels.program import Builder, Embed, HeadNorm, Logits, Program, RmsNorm
from kernels.rope import RopeTables
from services.worker.models.layers import LayerBuilder
from shared.kv import KVLayout
from shared.model.rope import Rope
from shared.model.spec import ModelSpec
from shared.model.tensors import BLOCK_BYTES, BLOCK_VALUES, Tensor

SPEC = ModelSpec(
    name="golden", architecture="qwen3", layers=3, heads=6, kv_heads=2, head_dim=32, hidden=96, intermediate=160,
    vocab=200, max_context=1200, rope=Rope(theta=10000.0, dims=32), norm_eps=1e-5, tied=True, qk_norm=True,
    stop_ids=(), bos_id=None, add_bos=False, chat_template=None, source_kind="test", source=None, format="F32",
)  # fmt: skip
LENGTH = 1100
"""Beyond two partials of attention."""

DIGESTS = {
    "F32": {"fp16": "d72f47241a0f0cda", "bf16": "143a0aa95d025ebf", "fp32": "352c6298c5ec5151"},
    "F16": {"fp16": "78df61d2687becbb", "bf16": "c010bcd4132bddd0", "fp32": "9ed6fe269243249e"},
    "BF16": {"fp16": "409e28a2627e98ae", "bf16": "63eb6c8f78e13fd6", "fp32": "8afaf499bdab8518"},
    "Q8_0": {"fp16": "c1b6987953d26c56", "bf16": "9d3ded18cb246728", "fp32": "c8926948a383473a"},
    "Q4_0": {"fp16": "d2951b1e54279bb6", "bf16": "4a9257567e2b915d", "fp32": "4b9bd60479c16907"},
    "Q4_1": {"fp16": "9069579487bb7ac3", "bf16": "082739f767e28da4", "fp32": "a1e73dcd27fa9174"},
}


INT8_DIGESTS = {
    "Q8_0": {"fp16": "f6bd87b7db17adbc", "bf16": "6d47c0359bdb00d8", "fp32": "ac47c4e502d764b2"},
    "Q4_0": {"fp16": "76e4125b39b7a8a2", "bf16": "4daccabd7de377a9", "fp32": "24239e29db21828d"},
    "Q4_1": {"fp16": "ffb6718de219ab58", "bf16": "e1440112bfe2c831", "fp32": "0b9d2754351b6789"},
}
"""With activations of 8 bits."""


def stream(count: int, seed: int) -> np.ndarray:
    """So many uint32 of a counter, mixed; the same everywhere."""
    x = np.arange(count, dtype=np.uint64) + np.uint64(seed << 32)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)


def tensor(name: str, kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random bits of a format, scales of a size that keeps activations sane."""
    values = int(np.prod(shape))
    if len(shape) == 1 or kind in ("F32", "F16", "BF16"):
        floats = ((stream(values, seed) >> 8).astype(np.float32) / np.float32(1 << 24) - np.float32(0.5)) / 4
        if len(shape) == 1:
            return Tensor(name, "F32", shape, (floats + np.float32(1)).view(np.uint8))
        data = {
            "F32": floats,
            "F16": floats.astype(np.float16),
            "BF16": (floats.view(np.uint32) >> 16).astype(np.uint16),
        }
        return Tensor(name, kind, shape, data[kind].view(np.uint8))
    blocks = values // BLOCK_VALUES[kind]
    size = BLOCK_BYTES[kind]
    raw = stream(blocks * (-(-size // 4)), seed).view(np.uint8).reshape(blocks, -1)[:, :size].copy()
    scale = np.float32(0.002 if kind == "Q8_0" else 0.02)
    raw[:, :2] = (scale * (1 + (raw[:, :1] & 7))).astype(np.float16).view(np.uint8)
    if kind == "Q4_1":
        raw[:, 2:4] = np.full((blocks, 1), -0.1, np.float16).view(np.uint8)
    return Tensor(name, kind, shape, raw.reshape(-1))


def program(kind: str) -> Program:
    """The model with weights of one format."""
    angle = (np.arange(SPEC.max_context)[:, None] * np.arange(1, 17)) % 64 / 64  # points of a circle by fractions
    cos, sin = ((1 - angle**2) / (1 + angle**2)).astype(np.float32), (2 * angle / (1 + angle**2)).astype(np.float32)
    tensors = {
        name: tensor(name, kind, shape, seed) for seed, (name, shape) in enumerate(sorted(SPEC.shapes().items()))
    }
    builder = Builder(heads=6, kv_heads=2, head_dim=32, vocab=SPEC.vocab, rope=RopeTables(cos, sin))
    x = builder.buffer("residual", SPEC.hidden)
    builder.add(Embed(x, tensors["embed"]))
    for n in range(SPEC.layers):
        builder.begin_layer()
        mine = {name.removeprefix(f"layers.{n}."): one for name, one in tensors.items()}
        layer = LayerBuilder(builder, SPEC, mine, n)
        layer.attention(
            before_rope=lambda layer=layer, mine=mine: builder.add(
                HeadNorm(layer.qkv, 0, 6, mine["q_norm"], 1e-5), HeadNorm(layer.qkv, 192, 2, mine["k_norm"], 1e-5)
            )
        )
        layer.swiglu()
    normed = builder.buffer("normed", SPEC.hidden)
    builder.add(RmsNorm(normed, x, tensors["norm"], 1e-5), Logits(normed, tensors["embed"]))
    return builder.program()


def digest(kind: str, dtype: str, chunk: int, threads: int, *, int8: bool = False) -> str:
    """Of the logits behind every chunk's end that all chunkings share, and of all KV."""
    model = Cpu(threads, head_dim=32, int8=int8).load(program(kind), None, lambda done, total: None)
    layout = KVLayout(SPEC.layers, SPEC.kv_heads, 32, 32, dtype, 16)
    blocks = -(-LENGTH // 16)
    kv = PagedKV(bytearray(layout.block_bytes * blocks), layout)
    table = np.array(list(range(blocks))[::-1])
    ids = (stream(LENGTH, 99) % SPEC.vocab).astype(np.int64)
    for start in range(0, LENGTH, chunk):
        found = model.step(make_batch([(start, ids[start : start + chunk], table, True)]), kv)
        assert np.isfinite(found.health).all()
    whole = hashlib.sha256(found.logits[-1].tobytes())
    whole.update(kv.bytes.tobytes())
    return whole.hexdigest()[:16]


DTYPES = ("fp16", "bf16", "fp32")
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")


@pytest.mark.parametrize("isa", supported())
@pytest.mark.parametrize("kind", KINDS)
def test_not_a_bit_has_changed_without_a_new_version(kind: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    found = {dtype: digest(kind, dtype, 256, 2) for dtype in DTYPES}
    assert (VERSION, found) == (1, DIGESTS[kind])


@pytest.mark.parametrize("isa", supported())
@pytest.mark.parametrize("kind", sorted(INT8_DIGESTS))
def test_nor_with_activations_of_8_bits(kind: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    found = {dtype: digest(kind, dtype, 256, 2, int8=True) for dtype in DTYPES}
    assert (VERSION, INT8_VERSION, found) == (1, 1, INT8_DIGESTS[kind])


CUTS = [(LENGTH, 1), (37, 1), (64, 2), (1, 2)]


@pytest.mark.parametrize(("chunk", "threads"), CUTS)
def test_chunks_and_threads_do_not_change_a_bit(chunk: int, threads: int) -> None:
    assert digest("Q4_1", "fp16", chunk, threads) == DIGESTS["Q4_1"]["fp16"]


@pytest.mark.parametrize(("chunk", "threads"), CUTS)
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_nor_do_they_with_activations_of_8_bits(kind: str, chunk: int, threads: int) -> None:
    assert digest(kind, "fp16", chunk, threads, int8=True) == INT8_DIGESTS[kind]["fp16"]
