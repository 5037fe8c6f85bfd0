"""When two greedy runs of one request count as equal, for backends that are exact only to a tolerance.

Equal ids, or: at the first difference the undisturbed run's two best tokens are closer than 1e-3 in log-probability,
so that rounding (another chunking, another batch) may choose either. Such near ties are counted and shown.
"""

from dataclasses import dataclass

from ops.client import Result

NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Comparison:
    """`equal`: by the rule. `first_difference`: token index, or None for identical ids. `gap`: the tie's width."""

    equal: bool
    first_difference: int | None = None
    gap: float = 0.0

    def __str__(self) -> str:
        if self.first_difference is None:
            return "identical ids"
        kind = "near tie" if self.equal else "WRONG"
        return f"{kind} at token {self.first_difference} (gap {self.gap:.2g})"


def compare(undisturbed: Result, other: Result) -> Comparison:
    """Compares ids by the rule; `undisturbed` was asked for at least 2 logprobs."""
    for index, (wanted, got) in enumerate(zip(undisturbed.ids, other.ids, strict=False)):
        if wanted != got:
            if undisturbed.logprobs is None:
                return Comparison(equal=False, first_difference=index)
            best = undisturbed.logprobs[index].top
            gap = best[0] - best[1]
            return Comparison(equal=gap < NEAR_TIE, first_difference=index, gap=gap)
    same_length = len(undisturbed.ids) == len(other.ids)
    return Comparison(equal=same_length, first_difference=None if same_length else len(other.ids))
