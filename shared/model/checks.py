"""Sanity of a description read from untrusted files: one clear line instead of a crash far away."""

import math

from shared.model.spec import FAMILIES, BadModel, ModelSpec

MAX_LAYERS = 4096
MAX_SIZE = 1 << 31
"""Upper bound of any size in a description; guards products against absurd files."""


def check_family(where: object, name: str) -> None:
    """BadModel when the architecture is none of ours."""
    if name not in FAMILIES:
        raise BadModel(f"{where}: architecture {name!r} is not supported; known are {', '.join(FAMILIES)}")


def check_spec(where: object, spec: ModelSpec) -> None:
    """BadModel when the numbers contradict each other."""
    for name in ("layers", "heads", "kv_heads", "head_dim", "hidden", "intermediate", "vocab", "max_context"):
        value = getattr(spec, name)
        if not 1 <= value <= (MAX_LAYERS if name == "layers" else MAX_SIZE):
            raise BadModel(f"{where}: {name} is {value}, which no model has")
    if spec.heads % spec.kv_heads:
        raise BadModel(f"{where}: {spec.heads} query heads can't share {spec.kv_heads} KV heads")
    if spec.head_dim % 2:
        raise BadModel(f"{where}: head dimension {spec.head_dim} is odd, rotary embedding needs pairs")
    if spec.rope.dims != spec.head_dim:
        raise BadModel(
            f"{where}: rotary embedding over {spec.rope.dims} of {spec.head_dim} head dimensions is not supported; "
            "it must cover all of them"
        )
    for name, number in (("rms norm epsilon", spec.norm_eps), ("rope theta", spec.rope.theta)):
        if not (math.isfinite(number) and number > 0):
            raise BadModel(f"{where}: {name} is {number}")
    factors = spec.rope.factors
    if factors and (len(factors) != spec.rope.dims // 2 or not all(math.isfinite(f) and f > 0 for f in factors)):
        raise BadModel(f"{where}: {len(factors)} rope factors for {spec.rope.dims // 2} pairs, or one is not positive")
    for id in (*spec.stop_ids, *(() if spec.bos_id is None else (spec.bos_id,))):
        if not 0 <= id < spec.vocab:
            raise BadModel(f"{where}: special token id {id} is outside the vocabulary of {spec.vocab}")
    if spec.add_bos and spec.bos_id is None:
        raise BadModel(f"{where}: add_bos_token is set, but there is no BOS token")
    sampling = spec.sampling
    if not (
        0 <= sampling.temperature < math.inf
        and 0 <= sampling.top_k <= MAX_SIZE
        and 0 < sampling.top_p <= 1
        and 0 <= sampling.min_p <= 1
    ):
        raise BadModel(f"{where}: the sampling defaults make no sense: {sampling}")


def check_window(where: object, window: object, max_context: int) -> None:
    """BadModel when a sliding window is shorter than the context."""
    if isinstance(window, int) and 0 < window < max_context:
        raise BadModel(
            f"{where}: sliding-window attention of {window} tokens (context {max_context}) is not supported; "
            f"known is full attention"
        )
