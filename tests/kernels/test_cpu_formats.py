"""Weights as a file has them and the same weights in F32 are one model to the CPU backend: equal bits of logits and KV.

Every product is one chain over the weights, so whatever a format's panels look like, what they multiply by must be the
file's values, in matrices of one format and in stacks of several.
"""

from collections.abc import Callable

import numpy as np
import pytest

from kernels.batch import make_batch
from kernels.cpu.backend import Cpu
from kernels.cpu.library import ISA_VARIABLE, supported
from kernels.cpu.packing import FORMATS
from kernels.paged import PagedKV
from kernels.program import Program
from services.worker.models.decoder import decoder
from shared.kv import KVLayout
from shared.model.rope import Rope
from shared.model.spec import ModelSpec
from shared.model.tensors import Tensor
from tests.random_blocks import weights

SPEC = ModelSpec(
    name="formats", architecture="llama", layers=2, heads=4, kv_heads=1, head_dim=64, hidden=256, intermediate=512,
    vocab=70, max_context=64, rope=Rope(theta=10000.0, dims=64), norm_eps=1e-5, tied=False, qk_norm=False,
    stop_ids=(), bos_id=None, add_bos=False, chat_template=None, source_kind="test", source=None, format="F32",
)  # fmt: skip
LENGTH = 40

Kinds = Callable[[str], str]
"""A tensor's name -> its kind."""


def tensors(kinds: Kinds) -> dict[str, Tensor]:
    """Of SPEC; vectors in F32."""
    made = {}
    for seed, (name, shape) in enumerate(sorted(SPEC.shapes().items())):
        kind = kinds(name) if len(shape) == 2 else "F32"
        one = weights(kind, *(shape if len(shape) == 2 else (1, *shape)), seed)
        made[name] = Tensor(name, kind, shape, one.blob, scales=one.scales)
    return made


def in_fp32(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values."""
    return {name: Tensor(name, "F32", one.shape, one.fp32().reshape(-1).view(np.uint8)) for name, one in given.items()}


def program(given: dict[str, Tensor]) -> Program:
    return decoder(SPEC, given, SPEC.max_context)


def results(given: dict[str, Tensor], threads: int, chunk: int, int8: bool = False) -> tuple[bytes, bytes]:
    """Logits of the last token and all KV, after LENGTH tokens in chunks."""
    model = Cpu(threads, head_dim=64, int8=int8).load(program(given), None, lambda done, total: None)
    layout = KVLayout(SPEC.layers, SPEC.kv_heads, 64, 64, "fp32", 16)
    blocks = -(-LENGTH // 16)
    kv = PagedKV(bytearray(layout.block_bytes * blocks), layout)
    ids = (np.arange(LENGTH) * 37 % SPEC.vocab).astype(np.int32)
    for start in range(0, LENGTH, chunk):
        part = ids[start : start + chunk]
        found = model.step(make_batch([(start, part, np.arange(blocks, dtype=np.int32), True)]), kv)
    assert np.isfinite(found.logits).all()
    return found.logits[-1].tobytes(), kv.bytes.tobytes()


MIXED: dict[str, Kinds] = {
    "as Q4_K_M": lambda name: "Q6_K" if name.endswith((".v", ".down", "lm_head")) else "Q4_K",
    "gate and up apart": lambda name: "Q5_K" if name.endswith((".up", ".k")) else "Q3_K",
    "legacy": lambda name: "Q5_1" if name.endswith((".q", ".gate")) else "Q5_0",
    "8-bit floats": lambda name: "BF16" if name.endswith((".embed", "lm_head", ".k")) else "F8_E4M3",
    "floats among them": lambda name: "BF16" if name.endswith((".k", ".gate")) else "Q8_0",
}


def settled(kind: str) -> Kinds:
    return lambda name: kind


@pytest.mark.parametrize("isa", supported())
@pytest.mark.parametrize("kinds", [*map(settled, sorted(FORMATS)), *MIXED.values()], ids=[*sorted(FORMATS), *MIXED])
def test_a_model_is_its_fp32_twin_to_the_bit(kinds: Kinds, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    given = tensors(kinds)
    expected = results(in_fp32(given), 1, LENGTH)
    assert results(given, 2, LENGTH) == expected
    assert results(given, 2, 1 if kinds in MIXED.values() else 3) == expected


def test_activations_of_8_bits_beside_formats_that_do_not_take_them_are_as_exact() -> None:
    given = tensors(lambda name: "Q6_K" if name.endswith((".v", ".up", "lm_head")) else "Q4_1")
    found = results(given, 1, LENGTH, int8=True)
    assert results(given, 2, 3, int8=True) == found
    assert results(given, 2, 1, int8=True) == found
    assert results(given, 2, 3) != found


def test_no_format_takes_the_room_of_fp32() -> None:
    """Bytes of weights per value, stacks of two formats included: a neighbour of another format costs nothing."""
    plain = Cpu(1, head_dim=64).footprint(program(in_fp32(tensors(settled("Q4_K")))), 1, 1, 64).weights
    for kinds, most in ((settled("Q4_K"), 5.5), (settled("Q6_K"), 10), (MIXED["as Q4_K_M"], 8)):
        found = Cpu(1, head_dim=64).footprint(program(tensors(kinds)), 1, 1, 64).weights
        assert found < plain * (most + 0.6) / 32
