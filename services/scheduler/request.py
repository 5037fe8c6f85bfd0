"""One request: what was asked, what came out so far, and where it stands.

            submit                admit                    (forced or for room)
    ───────────────► WAITING ──────────────► RUNNING ── retract ──► WAITING (resumed, at the front)
                        │ lookup at the store   │ load, prefill, decode
                        └────── end ◄───────────┘        ended ones stay for `result_ttl_s`

It has blocks (`seq`) exactly while it runs, and while a step that it ended in is still out (`leaving`).
"""

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from services.scheduler.kv.sequence import Sequence
from services.scheduler.records import Accept, Admit
from shared.messages.base import unpack_u32
from shared.messages.engine import Opening, Progress
from shared.messages.front import Finish, FinishReason, Timing, TokenLogprob, Usage

if TYPE_CHECKING:
    from services.scheduler.load import Load

PROMPT_TAIL = 16
"""Prompt tokens that the detokenizer gets to begin its text with."""


@dataclass(eq=False)
class Request:
    """`tokens`: prompt and output; the output alone once it is over, as the text of a long prompt, retained for
    minutes, would fill memory. `limit`: their largest number, as asked for, and in the context and pool of the present
    worker.

    While running, `computed` tokens have their KV in the blocks of `seq`, and `in_flight` more are in the
    outstanding plans, which draw `drawing` more tokens. `cached`: prompt tokens by tier, fixed when the request was
    first scheduled.
    """

    accept: Accept
    tokens: "array[int]"
    prompt_tokens: int
    prompt_tail: bytes
    logprobs: list[TokenLogprob] | None
    stop_ids: frozenset[int]
    limit: int
    root: bytes = b""

    seq: Sequence | None = None
    computed: int = 0
    in_flight: int = 0
    drawing: int = 0
    last_turn: int = 0
    """Grows with every row of every plan: who has the smallest has waited longest."""
    load: "Load | None" = None
    lookups_left: int = 0
    """Lookups before its next admission; a further one is only made when there was no room after the last."""
    bypassed: int = 0
    """Younger requests that were admitted past this one since it began to wait."""
    fresh: tuple[int, int] = (0, 0)
    """(output tokens, cached blocks) at the last admission."""
    forced_at: int = -1
    """Output tokens at its last retraction by force."""
    names: list[bytes] = field(default_factory=list)
    """Identities of its leading full blocks, as far as they were needed."""
    from_tier: tuple[int, int, int] = (0, 0, 0)
    """Tokens from device, host and disk at the present admission."""
    account_closed: bool = False
    """It was in a step before it came to its present blocks: those say nothing about its first ones."""
    furthest: int = 0
    """The most tokens that had their KV at the end of any of its steps, also in pools that are gone."""
    losses: int = 0
    """Workers lost in a row in a step that it was part of, without its getting further in between."""
    load_losses: int = 0
    """Workers lost in a row while they copied for a load of it."""
    sharing: bool = False
    """Whether it was ever made to wait for another's prefix; for the counter."""

    key: int = field(init=False)
    """Its number in the journal; a smaller one was accepted earlier."""
    id: str = field(init=False)
    """Chosen by the client."""
    admit: Admit | None = None
    admit_journaled: bool = False
    first_token_at: float = 0.0
    finish: Finish | None = None
    ended_at: float = 0.0
    trimmed: bool = False

    @classmethod
    def of(cls, accept: Accept) -> "Request":
        """A request as it is journaled, with no output yet."""
        tokens = unpack_u32(accept.ids)
        return cls(
            accept=accept,
            tokens=tokens,
            prompt_tokens=len(tokens),
            prompt_tail=tokens[-PROMPT_TAIL:].tobytes(),
            logprobs=[] if accept.sample.logprobs >= 0 else None,
            stop_ids=frozenset(accept.stop_ids),
            limit=len(tokens) + accept.max_tokens,
        )

    def __post_init__(self) -> None:
        self.key, self.id = self.accept.key, self.accept.id

    @property
    def output_tokens(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) if self.trimmed else len(self.tokens) - self.prompt_tokens

    @property
    def resumed(self) -> bool:
        """Whether it has run before: such a one waits at the front."""
        return self.admit is not None

    @property
    def planned(self) -> int:
        """Tokens whose KV is there once all outstanding plans are done."""
        return self.computed + self.in_flight

    @property
    def reach(self) -> int:
        """Tokens that there are once all outstanding plans are done and that are to be fed: all, on the assumption
        that no stop id is drawn, unless the last one is the last that there may be.
        """
        if not self.drawing:
            return len(self.tokens)
        tokens = len(self.tokens) + self.drawing
        return tokens if tokens < self.limit else self.computed + self.in_flight

    @property
    def pending(self) -> int:
        """Tokens that are in no plan yet; the last of them yields the next token."""
        return self.reach - self.computed - self.in_flight

    @property
    def plannable(self) -> int:
        """Those of them that may be in the next plan: what a load brings is not computed."""
        return self.pending if self.load is None else min(self.pending, self.load.allowed)

    def served(self, host: int, disk: int) -> tuple[int, int]:
        """So many tokens came from these tiers -> those of them that its account did not have when it first ran."""
        device, host_before, disk_before = self.from_tier
        self.from_tier = device, host_before + host, disk_before + disk
        if self.admit is None or self.admit_journaled or self.account_closed:
            return 0, 0
        self.admit = msgspec.structs.replace(self.admit, host=self.from_tier[1], disk=self.from_tier[2])
        return host, disk

    @property
    def drawable(self) -> int:
        """Tokens that may still be drawn, besides those of the outstanding plans."""
        return self.limit - len(self.tokens) - self.drawing

    def plan(self, count: int, draws: int) -> None:
        """So many tokens are in a plan now: pending ones, and of those that it draws all but the last."""
        self.drawing += draws
        self.in_flight += count

    def planned_result(self, count: int, draws: int) -> None:
        """A plan with `count` of its tokens is over."""
        self.in_flight -= count
        self.drawing -= draws

    def lost_pool(self) -> None:
        """Its blocks and its plans are gone with the worker."""
        self.seq = None
        self.computed = self.in_flight = self.drawing = 0

    def add(self, now: float, token: int, logprob: TokenLogprob | None) -> None:
        """One more output token."""
        if not self.output_tokens:
            self.first_token_at = now
        self.tokens.append(token)
        if self.logprobs is not None:
            self.logprobs.append(logprob or TokenLogprob(0.0, b"", ()))

    def came_to(self, computed: int) -> None:
        """A step with it is over. Only what is new counts: what it repeats after a loss says nothing about the step
        that was lost.
        """
        if computed > self.furthest:
            self.furthest, self.losses = computed, 0

    def natural_end(self) -> FinishReason | None:
        """Why the output ends with its last token, or None when it goes on."""
        if self.output_tokens and self.tokens[-1] in self.stop_ids:
            return "stop"
        if self.output_tokens and len(self.tokens) >= self.limit:
            return "length"
        return None

    def cut(self, output_tokens: int) -> None:
        """Drops output beyond `output_tokens`, and its logprobs with it (W26)."""
        del self.tokens[self._prompt_here + output_tokens :]
        if self.logprobs is not None:
            del self.logprobs[output_tokens:]

    def end(self, now: float, reason: FinishReason, error: tuple[str, str] | None = None) -> Finish:
        """Closes the account; the caller takes it out of queues and pool."""
        begun, born = self.admit, self.accept.at
        device, host, disk = (begun.device, begun.host, begun.disk) if begun else (0, 0, 0)
        self.finish = Finish(
            reason=reason,
            usage=Usage(
                prompt_tokens=self.prompt_tokens,
                completion_tokens=self.output_tokens,
                cached_tokens=device + host + disk,
                cached_by_tier={"device": device, "host": host, "disk": disk},
            ),
            timing=Timing(
                queued_s=max(0.0, (begun.at if begun else now) - born),
                ttft_s=max(0.0, self.first_token_at - born) if self.output_tokens else 0.0,
                total_s=max(0.0, now - born),
            ),
            error=error,
        )
        self.ended_at = now
        return self.finish

    def trim(self) -> None:
        """It is over, its blocks are freed: the prompt is not needed any more."""
        if not self.trimmed:
            self.tokens = self.tokens[self.prompt_tokens :]
            self.accept = msgspec.structs.replace(self.accept, ids=b"")
            self.names = []
            self.trimmed = True

    def progress(self, start: int) -> Progress:
        """Output from token `start` on, as the detokenizer is told."""
        start = min(max(start, 0), self.output_tokens)
        return Progress(
            id=self.id,
            start=start,
            ids=self.tokens[self._prompt_here + start :].tobytes(),
            opening=self._opening() if start == 0 else None,
            logprobs=tuple(self.logprobs[start:]) if self.logprobs is not None else None,
            finish=self.finish,
        )

    def _opening(self) -> Opening:
        accept = self.accept
        return Opening(
            principal=accept.principal,
            prompt_tokens=self.prompt_tokens,
            stop=accept.stop,
            stop_ids=accept.stop_ids,
            logprobs=accept.sample.logprobs >= 0,
            detached=accept.detached,
            prompt_tail=self.prompt_tail,
        )

    @property
    def _prompt_here(self) -> int:
        return 0 if self.trimmed else self.prompt_tokens
