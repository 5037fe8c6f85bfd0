"""FP8 weights of safetensors: codes against torch, every shape of scales, whole models, and what must be refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.cpu import packing
from shared.model.fp8 import VALUES, scales_for
from shared.model.spec import BadModel, open_model
from shared.model.tensors import F8, Tensor
from tests.random_blocks import weights
from tests.tiny_models import Tiny, train_vocabulary, write_directory

VOCABULARY = train_vocabulary()
TINY = Tiny(hidden=192, heads=12, intermediate=320)
BLOCKS = {"weight_block_size": [128, 128]}


def test_codes_are_torchs() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(np.isnan(VALUES), np.isnan(expected))
    number = ~np.isnan(VALUES)
    assert np.array_equal(VALUES.view(np.uint32)[number], expected.view(np.uint32)[number])


def scale_shape(how: str, out: int, width: int) -> tuple[int, ...]:
    shapes: dict[str, tuple[int, ...]] = {"one": (), "one of rank 1": (1,), "flat": (out,), "outputs": (out, 1)}
    return shapes.get(how, (-(-out // 128), -(-width // 128)))


def fp8_model(path: Path, how: str, dtype: torch.dtype, suffix: str = "weight_scale", **config: Any) -> dict[str, Any]:
    """Writes a directory whose layers' matrices are FP8; the fp32 values of all tensors."""
    write_directory(path, TINY, TINY.tensors(), vocabulary=VOCABULARY, config=config)
    random = torch.Generator().manual_seed(3)
    out, values = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if "proj" not in name:
            out[name] = values[name] = tensor
            continue
        scale = (torch.rand(scale_shape(how, *tensor.shape), generator=random) * 0.01 + 0.001).to(dtype)
        codes = (tensor * 300).to(torch.float8_e4m3fn)
        wide = scale.float().reshape(scale.shape if scale.ndim == 2 else (-1, 1))
        rows, columns = -(-tensor.shape[0] // wide.shape[0]), -(-tensor.shape[1] // wide.shape[1])
        if how == "blocks":
            rows = columns = 128
        spread = wide.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: tensor.shape[0], : tensor.shape[1]]
        out[name], values[name] = codes, codes.float() * spread
        out[name.removesuffix("weight") + suffix] = scale
        out[name.removesuffix("weight") + "input_scale"] = torch.ones(())
    save_file(out, path / "model.safetensors")
    return values


@pytest.mark.parametrize(
    ("how", "dtype", "suffix", "quantisation"),
    [
        ("one", torch.float32, "weight_scale", {"quant_method": "fp8"}),
        ("one of rank 1", torch.bfloat16, "weight_scale", {"quant_method": "compressed-tensors"}),
        ("flat", torch.float32, "weight_scale", {"quant_method": "fbgemm_fp8"}),
        ("outputs", torch.bfloat16, "weight_scale", {"quant_method": "compressed-tensors"}),
        ("blocks", torch.float32, "weight_scale_inv", {"quant_method": "fp8", **BLOCKS}),
        ("blocks", torch.float32, "weight_scale_inv", {"quant_method": "fp8"}),
    ],
)
def test_weights_are_codes_times_scales(
    how: str, dtype: torch.dtype, suffix: str, quantisation: dict[str, Any], tmp_path: Path
) -> None:
    values = fp8_model(tmp_path, how, dtype, suffix, quantization_config=quantisation)
    source = open_model(str(tmp_path), tmp_path)
    assert source.spec.format == F8
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "down": "mlp.down_proj", "gate": "mlp.gate_proj"}
    for ours, theirs in names.items():
        tensor = source.tensors()[f"layers.1.{ours}"]
        assert tensor.kind == F8
        expected = values[f"model.layers.1.{theirs}.weight"].numpy()
        assert np.array_equal(tensor.fp32().view(np.uint32), expected.view(np.uint32))
        packed = packing.pack([tensor])
        assert packed.plan.runs == (packing.Run("F8", len(expected)),)
        assert np.array_equal(packing.unpack(packed).view(np.uint32), expected.view(np.uint32))


def test_a_scale_that_is_changed_changes_the_digest(tmp_path: Path) -> None:
    fp8_model(tmp_path, "one", torch.float32)
    before = open_model(str(tmp_path), tmp_path).digest()
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale"] *= 2
    save_file(tensors, tmp_path / "model.safetensors")
    assert open_model(str(tmp_path), tmp_path).digest() != before


@pytest.mark.parametrize(("width", "columns", "format"), [(96, 48, "F32"), (80, 80, "F32"), (96, 32, "F8")])
def test_scales_within_a_group_of_inputs_become_fp32(width: int, columns: int, format: str) -> None:
    tensor = weights(F8, 50, 32, 0)
    values = np.random.default_rng(0).random((50, -(-width // columns))).astype(np.float32)
    codes = np.resize(tensor.blob, 50 * width)
    scales = scales_for("here", (50, width), values, (1, columns))
    one = Tensor("t", F8, (50, width), codes, scales=scales)
    packed = packing.pack([one])
    assert packed.plan.runs == (packing.Run(format, 50),)
    assert np.array_equal(packing.unpack(packed), one.fp32())


@pytest.mark.parametrize(
    ("name", "made", "reason"),
    [
        (
            "mlp.up_proj.weight_scale",
            None,
            r"up_proj\.weight \[320, 192\] is F8_E4M3 and has 0 tensors of scales, not one",
        ),
        ("mlp.up_proj.weight_scale_inv", torch.ones(()), r"has 2 tensors of scales, not one"),
        (
            "mlp.up_proj.weight_scale",
            torch.ones(3, 5),
            r"scales of shape \[3, 5\] for weights \[320, 192\]; known are one",
        ),
        ("mlp.up_proj.weight_scale", torch.ones(()).to(torch.float8_e4m3fn), r"known for scales are F32, F16, BF16"),
        ("mlp.up_proj.weight", torch.ones(320, 192), r"up_proj\.weight_scale has no place in a llama model"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, made: Any, reason: str, tmp_path: Path) -> None:
    fp8_model(tmp_path, "one", torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.layers.0.{name}"] = made
    save_file({key: value for key, value in tensors.items() if value is not None}, tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match=reason):
        open_model(str(tmp_path), tmp_path)


@pytest.mark.parametrize("block", [3, [128], [0, 128], ["a", "b"]])
def test_blocks_that_are_none_are_refused(block: Any, tmp_path: Path) -> None:
    fp8_model(
        tmp_path, "blocks", torch.float32, quantization_config={"quant_method": "fp8", "weight_block_size": block}
    )
    with pytest.raises(BadModel, match=r"weight_block_size is .*, not a pair of sizes"):
        open_model(str(tmp_path), tmp_path)
