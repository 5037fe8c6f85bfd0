"""One request as its client sees it: output by index, one end, and the answer that the oracle gives."""

from dataclasses import dataclass, field

from shared.messages.base import unpack_u32
from shared.messages.engine import KVFacts, Progress, Submit
from shared.messages.front import Finish
from tests.sim_worker import oracle


@dataclass
class Sent:
    """What was sent, and what has come back."""

    submit: Submit
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: int = 0
    finish: Finish | None = None
    cancelled: bool = False
    stop_at: int | None = None

    def told(self, progress: Progress) -> None:
        """News: they follow what is known, bring something, and end the request once."""
        news = list(unpack_u32(progress.ids))
        assert progress.start <= len(self.tokens)
        assert news or progress.finish is not None, "an advance without news"
        if progress.finish is not None:
            assert self.finish is None or self.stop_at is not None, "ended twice"
            end = progress.finish.usage.completion_tokens
            self.tokens = [*self.tokens[: progress.start], *news][:end]
            if self.submit.sample.logprobs >= 0:
                self.logprobs = min(self.logprobs, progress.start) + len(progress.logprobs or ())
            self.finish = progress.finish
            return
        assert progress.start == len(self.tokens)
        assert self.finish is None
        self.tokens += news
        self.logprobs += len(progress.logprobs or ())

    def check(self, facts: KVFacts, max_context: int) -> None:
        """The tokens are those of the cache-off oracle, and the account is right."""
        assert self.finish is not None
        prompt = list(unpack_u32(self.submit.ids))
        assert self.tokens == oracle(prompt, len(self.tokens), self.seed)
        usage, reason = self.finish.usage, self.finish.reason
        assert usage.completion_tokens == len(self.tokens)
        assert usage.prompt_tokens == len(prompt)
        assert 0 <= usage.cached_tokens <= len(prompt) - 1
        assert sum(usage.cached_by_tier.values()) == usage.cached_tokens
        if self.submit.no_read:
            assert usage.cached_tokens == 0
        assert self.logprobs == (len(self.tokens) if self.submit.sample.logprobs >= 0 else 0)
        stops = [i for i, token in enumerate(self.tokens) if token in self.submit.stop_ids]
        if reason == "stop":
            assert stops == [len(self.tokens) - 1] or (self.stop_at == len(self.tokens) and not stops)
        elif reason == "length":
            pool = facts.blocks * facts.block_tokens + 1
            assert len(self.tokens) == min(self.submit.max_tokens, max_context - len(prompt), pool - len(prompt))
            assert not stops
        else:
            assert not stops
            assert (reason == "cancelled") == self.cancelled
            if reason == "error" and self.finish.error and self.finish.error[0] == "worker_lost":
                return  # how often is the world's to check
            if reason == "error":  # accepted while no worker had told what can never fit
                assert not self.tokens
                assert len(prompt) > min(facts.blocks * facts.block_tokens, max_context - 1)
