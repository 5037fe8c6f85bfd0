"""The operations in torch: what each op of a program means, in one expression where that is possible."""

import torch

from kernels.reference.step import ReferenceStep


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension: x / sqrt(mean(x^2) + eps) * weight.

    Four passes, sqrt(mean(x^2) + eps) being the hypotenuse of the RMS and sqrt(eps), where F.rms_norm makes six
    on a CPU: half the time, and there are two a layer.
    """
    rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5)
    return torch.div(x, torch.hypot(rms, rms.new_tensor(eps**0.5))).mul_(weight)


def rope(heads: torch.Tensor, step: ReferenceStep) -> torch.Tensor:
    """Rotates [T, n, head_dim]: (a, b) -> (a cos - b sin, b cos + a sin) for the halves a and b of what is rotated."""
    dims = step.cos.shape[-1]
    turned = heads[..., :dims].roll(dims // 2, -1).mul_(step.sin).addcmul_(heads[..., :dims], step.cos)
    return turned if dims == heads.shape[-1] else torch.cat((turned, heads[..., dims:]), -1)


def write_kv(k: torch.Tensor, v: torch.Tensor, layer: int, step: ReferenceStep) -> None:
    """Stores [T, kv_heads, head_dim] at the tokens' slots, rounded to the pool's dtype; adds to `step.health`."""
    k, v = k.to(step.kv.dtype), v.to(step.kv.dtype)
    # A sum is NaN or infinite if anything in it is: one reduction instead of a mask.
    step.health.add_(k.sum((1, 2), dtype=torch.float32)).add_(v.sum((1, 2), dtype=torch.float32))
    step.kv.k(layer)[step.block_of, :, :, step.slot_of] = k
    step.kv.v(layer)[step.block_of, :, step.slot_of] = v
