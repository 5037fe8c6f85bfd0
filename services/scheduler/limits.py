"""What can never be served is refused at once, with both numbers; how far a request may go, how often fail."""

from collections import Counter

from services.scheduler.request import Request
from shared.identity import LOCAL
from shared.messages.engine import KVFacts
from shared.messages.front import RejectCode

Refusal = tuple[RejectCode, str, dict[str, float]]

MOST_LOSSES = 3
"""A request in whose steps so many workers died in a row is given up: all others would wait for it for ever."""

MOST_LOAD_LOSSES = 2
"""A request in whose copies from the store so many workers died in a row computes instead, and what they copied is not
read again. Fewer than MOST_LOSSES: a request that was only in the step beside such a load is never blamed for it.
"""


def malformed(request: Request, seconds: float | None) -> Refusal | None:
    """What is wrong with a request whatever the worker; `seconds`: its deadline."""
    if not request.prompt_tokens:
        return "bad_request", "the prompt has no token; at least 1 is needed", {"prompt_tokens": 0}
    wanted = request.accept.max_tokens
    if wanted < 1:
        return "bad_request", f"max_tokens is {wanted}; at least 1 is needed", {"max_tokens": wanted}
    if seconds is not None and not seconds > 0:
        return "deadline", f"the deadline is {seconds:g} s after acceptance; it has passed", {"deadline_s": seconds}
    return None


def hopeless(request: Request, facts: KVFacts, max_context: int) -> Refusal | None:
    """Whether the prompt and one token can't ever fit the context, or the prompt the pool (S01)."""
    prompt, pool = request.prompt_tokens, facts.blocks * facts.block_tokens
    if prompt + 1 > max_context:
        text = f"prompt is {prompt:,} tokens; the model's context is {max_context:,}, one of them for the answer"
        advice = f"shorten by {prompt + 1 - max_context:,} or start with a longer context"
        return "context_too_long", f"{text}; {advice}", {"prompt_tokens": prompt, "max_context": max_context}
    if prompt > pool:
        text = f"prompt is {prompt:,} tokens; the KV pool holds {pool:,} ({facts.blocks:,} blocks)"
        advice = f"shorten by {prompt - pool:,} or start with a larger pool"
        return "never_fits", f"{text}; {advice}", {"prompt_tokens": prompt, "pool_tokens": pool}
    return None


def deadly(request: Request) -> tuple[str, str] | None:
    """The error of a request that seems to kill every worker, or None while it may try again."""
    if request.losses < MOST_LOSSES:
        return None
    text = f"the worker died {request.losses} times in a row in a step with this request, which never got further"
    return "worker_lost", f"{text}; it is given up so that others are served; the worker's log may tell why"


def token_limit(request: Request, facts: KVFacts, max_context: int) -> int:
    """Prompt and output tokens at which it ends: as asked for, or what context and pool can hold (A10).

    The last token needs no KV, so a pool of n tokens serves n + 1.
    """
    pool = facts.blocks * facts.block_tokens + 1
    return min(request.prompt_tokens + request.accept.max_tokens, max_context, pool)


class Shares:
    """How many live requests each principal has. Whoever works on this machine may fill the queue, a user may not."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.live: Counter[str] = Counter()

    def begin(self, principal: str) -> None:
        """A request of it begins to wait."""
        self.live[principal] += 1

    def end(self, principal: str) -> None:
        """A request of it has ended."""
        self.live[principal] -= 1
        if not self.live[principal]:
            del self.live[principal]

    def refusal(self, principal: str) -> Refusal | None:
        """Why it may have no other one now, or None."""
        own = self.live[principal]
        if principal == LOCAL or own < self._most:
            return None
        text = f"{own:,} requests of user {principal} wait or run, at most {self._most:,} may; try later"
        return "overloaded", text, {"requests": own, "user_requests": self._most}
