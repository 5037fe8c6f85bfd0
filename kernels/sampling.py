"""What sampling is asked and what it answers, whatever computes it; the random numbers, which are a hash.

The definition of each stage and of their order is kernels/reference/sampler.py, for one row and in float64. A backend
that samples by itself agrees with it up to the rounding of sums of probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.messages.engine import SampleSpec


@dataclass(frozen=True)
class Draw:
    """One row: `logits` float32 [vocab], how to sample, and the absolute position of the token that is drawn.

    `forced`: a token that is not drawn but given, so that only its log-probability is wanted; -1: none.
    """

    logits: NDArray[np.float32]
    spec: SampleSpec
    position: int
    forced: int = -1


@dataclass(frozen=True)
class Drawn:
    """`token`, or -1 and the `error` that ends the request. The rest only if the spec asks for log-probabilities.

    `logprob`: of the token; `top`: (id, log-probability) of the best ones, descending.
    """

    token: int = -1
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    error: str | None = None


class Sampler(Protocol):
    """Draws rows. Each is a pure function of its own logits, spec and position."""

    def __call__(self, draws: Sequence[Draw]) -> list[Drawn]:
        """In the order of `draws`."""


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) of one token, 53 bits: a hash of what names the draw, so there is no state to lose.

    `seed` counts modulo 2^64. `position`: absolute position of the drawn token (prompt length for the first).
    """
    name = b"".join(part.to_bytes(8, "little") for part in (seed & (2**64 - 1), choice, position))
    digest = blake2b(name, digest_size=8, person=b"perdure-draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


NOT_FINITE = "the model's logits are not finite"
BIAS_LEAVES_NONE = "logit bias leaves no finite logit"


def bias_beyond(token: int, vocab: int) -> str:
    """What is wrong with a bias on a token that does not exist."""
    return f"logit bias names token {token}; the vocabulary has {vocab}"
