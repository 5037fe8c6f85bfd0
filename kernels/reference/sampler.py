"""The definition of sampling: bias, temperature, top-k, top-p, min-p, draw; log-probabilities beside it.

Each row is a pure function of its own logits, its SampleSpec and the absolute position of the drawn token: batch,
order, process and restart do not matter. Arithmetic is float64 per row. All ties go to the lower token id.

Order, each step on what the one before has left (as in vLLM and Hugging Face):
1. bias is added to the logits; 2. temperature 0 takes the argmax and is done, else logits are divided by it;
3. top-k keeps the k largest; 4. top-p, on their softmax, keeps the shortest descending run that reaches p;
5. min-p keeps tokens of at least min_p times the largest probability; 6. one uniform number picks by inverse CDF
in the order of ids.
These are all the stages there are: penalties (on the logits, before temperature) come later and are no field yet.

Log-probabilities are the log-softmax of the *raw* logits: before bias, temperature and every filter.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.sampling import BIAS_LEAVES_NONE, NOT_FINITE, Draw, Drawn, bias_beyond, uniform
from shared.messages.engine import SampleSpec

Logits = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.intp]


class Unsampleable(ValueError):
    """Nothing can be drawn from this row; the text says why. Ends one request."""


def sample_each(draws: Sequence[Draw]) -> list[Drawn]:
    """Implements `kernels.sampling.Sampler`.

    One row at a time on purpose: an argmax over 49,152 logits takes 6 us alone and no less in a batch, and a row
    that is not alone could not be told apart.
    """
    return [sample(draw.logits, draw.spec, draw.position, draw.forced) for draw in draws]


def sample(logits: Logits, spec: SampleSpec, position: int, forced: int = -1) -> Drawn:
    """Draws the token at absolute `position` from `logits`, float32 [vocab], or takes the `forced` one.

    Errors of a row (not finite, bias out of range) are in the outcome.
    """
    best = int(logits.argmax())  # ties to the lower id; a NaN wins and is found by the next line
    if not (np.isfinite(logits[best]) and np.isfinite(logits.min())):
        return Drawn(error=NOT_FINITE)
    try:
        token = best if not (spec.temperature > 0.0 or spec.bias) else _draw(logits, spec, position)
    except Unsampleable as error:
        return Drawn(error=str(error))
    return chosen(logits, token if forced < 0 else forced, spec.logprobs)


def _draw(logits: Logits, spec: SampleSpec, position: int) -> int:
    scores = logits.astype(np.float64)
    for token, addend in spec.bias:
        if not 0 <= token < len(scores):
            raise Unsampleable(bias_beyond(token, len(scores)))
        scores[token] += addend
    best = int(scores.argmax())
    if not np.isfinite(scores[best]):
        raise Unsampleable(BIAS_LEAVES_NONE)
    if not spec.temperature > 0.0:
        return best
    weights, ids = _filtered(scores, float(scores[best]), spec)
    edges = np.cumsum(weights)
    total = float(edges[-1])
    # Below the last edge whatever the rounding, so that the first edge above it belongs to a positive weight.
    point = min(uniform(spec.seed, spec.choice, position) * total, float(np.nextafter(total, 0.0)))
    drawn = int(np.searchsorted(edges, point, side="right"))
    return drawn if ids is None else int(ids[drawn])


def _filtered(scores: Doubles, best: float, spec: SampleSpec) -> tuple[Doubles, Ids | None]:
    """Unnormalised probabilities of the ids that may be drawn, in the order of ids, and these ids (None: all).

    Ranks are those of the scores themselves: differences and exponentials of different scores can be equal.
    """
    ids: Ids | None = None
    if 0 < spec.top_k < len(scores):
        ids = np.sort(largest(scores, spec.top_k))
        scores = scores[ids]
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature leaves 0 to all but the best, rightly
        weights = np.exp((scores - best) / spec.temperature)
    if spec.top_p < 1.0:
        kept = np.sort(_nucleus(scores, weights, spec.top_p))
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    if spec.min_p > 0.0:
        kept = np.flatnonzero(weights >= min(spec.min_p, 1.0) * weights.max())
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    return weights, ids


def _nucleus(scores: Doubles, weights: Doubles, p: float) -> Ids:
    """Indices of the shortest run, descending by score, whose weights reach `p` of the whole; at least one.

    Sorts no more than it needs: a whole vocabulary costs 8 ms, the few hundred that matter 0.3.
    """
    bound = p * float(weights.sum())
    n = 256
    while True:
        order = largest(scores, n)
        keep = int(np.searchsorted(np.cumsum(weights[order]), bound, side="left")) + 1
        if keep <= len(order) or len(order) == len(weights):
            return order[:keep]
        n *= 8


def largest(values: Doubles, n: int) -> Ids:
    """Ids of the `n` largest values, descending, ties to the lower id; O(len) plus sorting what ties or is larger."""
    if not 0 < n < len(values):
        return np.argsort(-values, kind="stable")[: max(n, 0)]
    bound = np.partition(values, len(values) - n)[len(values) - n]
    candidates = np.flatnonzero(values >= bound)
    return candidates[np.argsort(-values[candidates], kind="stable")[:n]]


def chosen(logits: Logits, token: int, alternatives: int) -> Drawn:
    """Log-softmax of the raw logits at `token`, and the `alternatives` best, descending, ties to the lower id.

    `alternatives` < 0: the token alone.
    """
    if alternatives < 0:
        return Drawn(token)
    scores = logits.astype(np.float64)
    top = largest(scores, alternatives)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    return Drawn(token, float(scores[token]), tuple((int(i), float(scores[i])) for i in top))
