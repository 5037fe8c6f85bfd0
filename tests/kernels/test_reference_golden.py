"""A tiny model's numbers, written down: whoever changes what `reference` computes learns of it here.

Weights come from an integer formula, so that no library's random numbers are in it. Numbers hold to 1e-4 on any
machine; what may change their last bits is in the numerics id, which therefore names the KV.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kernels.batch import make_batch
from kernels.paged import PagedKV
from kernels.reference.backend import Reference
from kernels.reference.pool import Views
from services.worker.models.decoder import decoder
from shared.kv import KVLayout
from shared.model.rope import Rope
from shared.model.spec import ModelSpec
from shared.model.tensors import Tensor
from tests.kernels import oracle

SPEC = ModelSpec(
    name="golden",
    architecture="llama",
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    hidden=16,
    intermediate=24,
    vocab=32,
    max_context=64,
    rope=Rope(theta=10000.0, dims=4),
    norm_eps=1e-5,
    tied=False,
    qk_norm=False,
    stop_ids=(),
    bos_id=None,
    add_bos=False,
    chat_template=None,
    source_kind="test",
    source=None,
    format="F32",
)
LAYOUT = KVLayout(SPEC.layers, SPEC.kv_heads, SPEC.head_dim, SPEC.head_dim, "fp32", 16)
TABLE = [3, 0, 4]
IDS = [(7 * i * i + 3 * i + 5) % SPEC.vocab for i in range(40)]
PLACES = (0, 15, 16, 39)
"""Positions whose KV is written down: both ends, and both sides of a block's border."""

# fmt: off
LOGITS = [
    2.62737, -1.49712, -0.83499, 1.08977, -0.28176, 1.71912, -0.66636, 0.93960,
    -1.41055, 1.25052, -0.92853, 2.17718, 0.02488, 0.37463, 0.28653, -0.16828,
    -1.64350, -2.82646, 0.98788, -1.39580, -0.02078, 1.94450, -0.52700, -0.81160,
    -1.09926, -0.17368, 0.29970, -0.25679, 1.77714, -2.55738, -0.36169, 0.20788,
]
"""After the last token, [vocab]."""
KV = {
    "k": [
        [-0.14001, 0.50844, 1.47500, 0.15945, 0.20395, -0.24224, -1.90247, 1.34477],
        [-0.17432, 0.27506, -1.51152, 0.84569, 0.52532, -0.84999, -1.01634, -0.52511],
        [-0.48092, 1.17362, 0.89321, 2.69397, 1.63365, 1.33077, 1.47570, -0.52014],
        [-2.02242, 0.19831, 1.02403, 0.41060, -1.01226, -2.98804, 0.80895, -0.48080],
        [0.07079, 0.82481, -0.30170, 0.98417, -3.29133, 0.57201, -0.99150, -1.19711],
        [0.23316, -0.72340, -0.46466, -0.15961, -0.53529, -0.52209, 0.31493, -0.40133],
        [0.78353, -1.39720, 1.37014, -2.25951, -1.31984, 0.19008, 0.25681, 0.43036],
        [-0.64199, -0.26600, -1.09522, 1.50125, 0.14960, 0.71404, 1.46259, 0.24772],
    ],
    "v": [
        [1.64322, 0.82563, 0.65763, -0.13362, 0.64663, 0.32396, -1.59831, -0.77976],
        [0.02154, -0.30268, 1.66595, -0.56260, -0.83577, -0.51484, -0.03781, -0.03945],
        [-0.60667, 0.32256, -0.18956, 2.16731, 2.22179, 1.75763, -0.31575, -0.60111],
        [-1.30377, 0.56954, 0.11651, -2.86863, -0.26345, -0.57139, 0.18770, -0.78904],
        [-1.66195, -1.15386, -0.20844, 0.87300, 1.73055, 0.80871, -1.16432, 1.55297],
        [1.26745, 1.90668, -1.57022, -1.74941, -0.63582, 0.09508, 0.04854, -1.36004],
        [-0.50812, 1.13416, -2.24296, -1.12294, 0.33391, -1.14008, 2.38057, -0.31054],
        [0.48313, 0.39317, -0.10501, 0.12354, -0.07144, -1.19271, 0.47889, 1.52072],
    ],
}
"""Rows: layer 0 at PLACES, layer 1 at PLACES; [kv_heads * head_dim] each."""
# fmt: on


def weights() -> dict[str, Tensor]:
    """Multiples of 2^-16 in [-1/2, 1/2) by a linear congruence over all elements; norms around 1."""
    out: dict[str, Tensor] = {}
    state = 1
    for name, shape in sorted(SPEC.shapes().items()):
        values = []
        for _ in range(int(np.prod(shape))):
            state = (state * 1664525 + 1013904223) % 2**32
            values.append((state >> 16) / 2**16 - 0.5)
        tensor = torch.tensor(values, dtype=torch.float64).view(shape)
        out[name] = oracle.tensor(tensor / 2 + 1 if len(shape) == 1 else tensor)
    return out


def run(chunk: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [vocab] after the last token, and K, V of PLACES, [2 layers, 4, kv_heads * head_dim] each."""
    backend = Reference(threads=1)
    model = backend.load(decoder(SPEC, weights(), max_context=64), None, lambda done, total: None)
    paged = PagedKV(bytearray(b"\xff" * (5 * LAYOUT.block_bytes)), LAYOUT)
    table = np.array(TABLE)
    for start in range(0, len(IDS), chunk):
        ids = np.array(IDS[start : start + chunk])
        logits = torch.from_numpy(model.step(make_batch([(start, ids, table, True)]), paged).logits[-1].copy())
    kv = Views(paged)
    at = [(TABLE[position // 16], position % 16) for position in PLACES]
    layers = range(SPEC.layers)
    k = torch.stack([torch.stack([kv.k(n)[block, :, :, slot].flatten() for block, slot in at]) for n in layers])
    v = torch.stack([torch.stack([kv.v(n)[block, :, slot].flatten() for block, slot in at]) for n in layers])
    return logits, {"k": k, "v": v}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("chunk", [40, 16, 7, 1])
def test_logits_and_kv_are_the_numbers_written_down(chunk: int) -> None:
    logits, kv = run(chunk)
    torch.testing.assert_close(logits, torch.tensor(LOGITS), rtol=0, atol=1e-4)
    for name, wanted in KV.items():
        torch.testing.assert_close(kv[name].view(-1, 8), torch.tensor(wanted), rtol=0, atol=1e-4)


def test_the_numerics_id_names_all_that_may_change_the_last_bits() -> None:
    one, two = Reference(threads=1).numerics, Reference(threads=2).numerics
    assert one != two
    for fact in (f"torch-{torch.__version__}", torch.backends.cpu.get_cpu_capability(), "threads-1"):
        assert fact in one.split("/")
