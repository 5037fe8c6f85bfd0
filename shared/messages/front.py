"""Client <-> tokenizer (Generate, Cancel) and client <-> detokenizer (Attach, Chunk).

Submit, then attach: the client chooses the request's id, keeps it, and may send either message again after any
failure; the same id with the same content is the same request.
"""

from typing import Literal

import msgspec

from shared.messages.base import Message

RejectCode = Literal[
    "bad_request",
    "context_too_long",
    "body_too_large",
    "never_fits",
    "unsupported",
    "overloaded",
    "deadline",
    "conflict",
    "not_found",
    "shutting_down",
]
FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]

AWAY_S = "away_s"
"""In `Rejected.numbers` of an `overloaded`: seconds that a service has been away (0: it is only busy). Whoever sees it
sends the same request again instead of giving up.
"""


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling options of one request; `None` means the model's own default.

    `logprobs`: None for none, else how many alternatives (0..20) beside the chosen token.
    `max_tokens`: None for as many as the context holds. `temperature` 0 is greedy.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a chat."""

    role: str
    content: str


class Generate(Message, frozen=True, kw_only=True):
    """A request, to the tokenizer. Exactly one of `prompt`, `messages`, `ids` (packed u32) is given.

    `id`: 32 or more hex digits chosen by the client. `deadline_s`: seconds from acceptance, or None.
    Answered by Accepted or Rejected.
    """

    id: str
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    ids: bytes | None = None
    sampling: Sampling = Sampling()
    choices: int = 1
    cache_salt: str | None = None
    no_store: bool = False
    no_read: bool = False
    detached: bool = False
    deadline_s: float | None = None
    priority: int = 0


class Encode(Message, frozen=True, kw_only=True):
    """`admin` -> tokenizer: the token ids of a request's input, without submitting it. Answered by Encoded or
    Rejected.
    """

    request: Generate


class Encoded(Message, frozen=True, kw_only=True):
    """Packed u32."""

    ids: bytes


class Accepted(Message, frozen=True, kw_only=True):
    """The request is journaled: it will be answered whatever dies."""

    id: str
    prompt_tokens: int


class Rejected(Message, frozen=True, kw_only=True):
    """The request is not accepted, or there is none; `numbers` are the figures that clash."""

    id: str
    code: RejectCode
    reason: str
    numbers: dict[str, float] = msgspec.field(default_factory=dict)


class Cancel(Message, frozen=True, kw_only=True):
    """Stop a request, to the tokenizer; answered by Cancelled, also when it is over or unknown."""

    id: str


class Cancelled(Message, frozen=True, kw_only=True):
    """Answer to Cancel; `known` says whether such a request was still live."""

    id: str
    known: bool


class WhoIsAway(Message, frozen=True, kw_only=True):
    """Of a client that hears nothing and can't ask each service itself, to the tokenizer; answered by Away."""


class Away(Message, frozen=True, kw_only=True):
    """Services behind the front that do not serve; `starting`: they are being started, and not to be given up."""

    services: tuple[str, ...] = ()
    starting: bool = False


class Attach(Message, frozen=True, kw_only=True):
    """Follow a request from token index `start`, to the detokenizer. Answered by Attached or Rejected(not_found).

    `credit`: how many chunks may be on their way before the client sends more credit.
    """

    id: str
    start: int = 0
    credit: int = 64


class Attached(Message, frozen=True, kw_only=True):
    """The attach holds; chunks follow on the same connection."""

    id: str


class Credit(Message, frozen=True, kw_only=True):
    """Allows `chunks` more chunks (client -> detokenizer) or `Progress` messages (detokenizer -> scheduler)."""

    id: str = ""
    chunks: int


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of the chosen token and of the `n` best: packed u32 ids, their values."""

    chosen: float
    top_ids: bytes
    top: tuple[float, ...]


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request; `cached_by_tier` holds the keys device, host, disk and sums to cached_tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]


class Timing(msgspec.Struct, frozen=True):
    """Seconds, from the scheduler's acceptance: until first scheduled, until the first token, until the end."""

    queued_s: float
    ttft_s: float
    total_s: float


class Finish(msgspec.Struct, frozen=True):
    """How a request ended. `error` is (code, reason) when reason is `error`."""

    reason: FinishReason
    usage: Usage
    timing: Timing
    error: tuple[str, str] | None = None


class Chunk(Message, frozen=True, kw_only=True):
    """Tokens [start, end) of a request's output: their ids (packed u32) and the text that they release.

    Concatenated texts are a pure function of the tokens and the stop strings. The last chunk carries `finish`.
    """

    id: str
    choice: int = 0
    start: int
    end: int
    ids: bytes
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: Finish | None = None
