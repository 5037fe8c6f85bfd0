"""From logits to tokens: bias, temperature, top-k, top-p, min-p, draw; log-probabilities beside it.

Each row is a pure function of its own logits, its SampleSpec and the absolute position of the drawn token: batch,
order, process and restart do not matter. Arithmetic is float64 per row. All ties go to the lower token id.

Order, each step on what the one before has left (as in vLLM and Hugging Face):
1. bias is added to the logits; 2. temperature 0 takes the argmax and is done, else logits are divided by it;
3. top-k keeps the k largest; 4. top-p, on their softmax, keeps the shortest descending run that reaches p;
5. min-p keeps tokens of at least min_p times the largest probability; 6. one uniform number picks by inverse CDF
in the order of ids.

Log-probabilities are the log-softmax of the *raw* logits: before bias, temperature and every filter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shared.messages.base import pack_u32
from shared.messages.engine import SampleSpec
from shared.messages.front import TokenLogprob

Logits = NDArray[np.float32]
Doubles = NDArray[np.float64]


class Unsampleable(ValueError):
    """Nothing can be drawn from this row; the text says why. Ends one request."""


@dataclass(frozen=True)
class Drawn:
    """Outcome of one row: `token` (-1 with an `error`) and, if asked for, its log-probability."""

    token: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) of one token, 53 bits: a hash of what names the draw, so there is no state to lose.

    `seed` counts modulo 2^64. `position`: absolute position of the drawn token (prompt length for the first).
    """
    name = b"".join(part.to_bytes(8, "little") for part in (seed & (2**64 - 1), choice, position))
    digest = blake2b(name, digest_size=8, person=b"perdure-draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample_rows(logits: ArrayLike, specs: Sequence[SampleSpec], positions: Sequence[int]) -> list[Drawn]:
    """One draw per row. `logits`: float32 [n, vocab], numpy or a CPU tensor; `positions` of the drawn tokens.

    A row that is not finite, or whose bias names an unknown token, gets an error; the others do not notice.
    """
    if not specs:
        return []
    rows: Logits = np.asarray(logits, dtype=np.float32)
    if rows.ndim != 2 or len(rows) != len(specs) or len(specs) != len(positions):
        raise ValueError(f"{len(specs)} specs, {len(positions)} positions and logits {list(rows.shape)} do not match")
    best = rows.argmax(axis=1)  # ties to the lower id; a NaN wins and is then found below
    top = rows[np.arange(len(rows)), best]
    finite = np.isfinite(top) & np.isfinite(rows.min(axis=1))
    out: list[Drawn] = []
    for i, spec in enumerate(specs):
        if not finite[i]:
            out.append(Drawn(error="the model's logits are not finite"))
            continue
        try:
            plain = spec.temperature == 0.0 and not spec.bias
            token = int(best[i]) if plain else _draw(rows[i], spec, positions[i])
        except Unsampleable as error:
            out.append(Drawn(error=str(error)))
            continue
        out.append(Drawn(token, _logprob(rows[i], token, spec.logprobs) if spec.logprobs >= 0 else None))
    return out


def _draw(row: Logits, spec: SampleSpec, position: int) -> int:
    scores = row.astype(np.float64)
    for token, addend in spec.bias:
        if not 0 <= token < len(scores):
            raise Unsampleable(f"logit bias names token {token}; the vocabulary has {len(scores)}")
        scores[token] += addend
    best = int(scores.argmax())
    if not np.isfinite(scores[best]):
        raise Unsampleable("logit bias leaves no finite logit")
    if spec.temperature == 0.0:
        return best
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends the others to -inf, rightly
        scores = (scores - scores[best]) / spec.temperature
        ids, weights = _kept(scores, spec)
    edges = np.cumsum(weights)
    drawn = int(np.searchsorted(edges, uniform(spec.seed, spec.choice, position) * edges[-1], side="right"))
    return int(ids[min(drawn, len(ids) - 1)])


def _kept(scores: Doubles, spec: SampleSpec) -> tuple[NDArray[np.intp], Doubles]:
    """Ids that may be drawn, ascending, and their unnormalised probabilities; at least one is > 0."""
    ids = np.arange(len(scores))
    if 0 < spec.top_k < len(scores):
        ids = largest(scores, spec.top_k)
        ids.sort()
    weights = np.exp(scores[ids])
    if spec.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        reached = np.cumsum(weights[order])
        keep = int(np.searchsorted(reached, spec.top_p * reached[-1], side="left")) + 1
        chosen = np.sort(order[:keep])
        ids, weights = ids[chosen], weights[chosen]
    if spec.min_p > 0.0:
        likely = weights >= min(spec.min_p, 1.0) * weights.max()
        ids, weights = ids[likely], weights[likely]
    positive = weights > 0.0  # an id whose probability underflowed to nothing is never drawn
    return ids[positive], weights[positive]


def largest(values: Doubles, n: int) -> NDArray[np.intp]:
    """Ids of the `n` largest values, descending, ties to the lower id; O(len) plus sorting what ties or is larger."""
    if n >= len(values):
        return np.argsort(-values, kind="stable")
    bound = np.partition(values, len(values) - n)[len(values) - n]
    candidates = np.flatnonzero(values >= bound)
    return candidates[np.argsort(-values[candidates], kind="stable")[:n]]


def _logprob(row: Logits, token: int, alternatives: int) -> TokenLogprob:
    scores = row.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    top = largest(scores, alternatives) if alternatives else np.empty(0, np.intp)
    return TokenLogprob(
        chosen=float(scores[token]), top_ids=pack_u32(top.tolist()), top=tuple(float(scores[i]) for i in top)
    )
