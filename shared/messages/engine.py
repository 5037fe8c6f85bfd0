"""Tokenizer -> scheduler (Submit), scheduler <-> worker (plans, transfers), scheduler <-> detokenizer (Progress)."""

import msgspec

from shared.messages.base import Message
from shared.messages.front import Finish, TokenLogprob


class SampleSpec(msgspec.Struct, frozen=True, array_like=True):
    """How one row is sampled; all defaults resolved.

    The draw depends on (seed, choice, absolute position of the drawn token) and on the logits alone.
    `logprobs` is -1 for none, else the number of alternatives. `bias`: (token id, addend) pairs.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    logprobs: int = -1
    bias: tuple[tuple[int, float], ...] = ()


class Submit(Message, frozen=True, kw_only=True):
    """A validated, encoded request, tokenizer -> scheduler; answered by Journaled or Rejected.

    `digest`: BLAKE2b-256 of the raw Generate (all fields but `id`). `ids`: the prompt, packed u32.
    `max_tokens` >= 1 and resolved. `sample.seed` is meaningless when `seeded` is False: the scheduler draws one
    and journals it. `stop_ids`: tokens that end the request (kept as its last token). `stop`: stop strings, for
    the detokenizer. `salt`: tenant salt, b"" for none. `deadline_s`: seconds from acceptance, None for none.
    """

    id: str
    digest: bytes
    principal: str
    ids: bytes
    max_tokens: int
    sample: SampleSpec
    seeded: bool
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    salt: bytes = b""
    no_store: bool = False
    no_read: bool = False
    detached: bool = False
    deadline_s: float | None = None


class Journaled(Message, frozen=True, kw_only=True):
    """The request is durable. `known`: it was already (same id, same digest)."""

    id: str
    known: bool
    prompt_tokens: int


class CancelRequest(Message, frozen=True, kw_only=True):
    """Tokenizer or detokenizer -> scheduler. Answered by Cancelled when it is a request."""

    id: str
    principal: str
    reason: str = "client"


# --- scheduler <-> worker -------------------------------------------------------------------------------------


class KVFacts(msgspec.Struct, frozen=True):
    """What the scheduler must know of the worker's KV, without ever seeing a tensor.

    `fingerprint`: 32 bytes over model, numerics and layout. `block_tokens`: tokens a block; `block_bytes`: bytes
    a block over all layers, which is also the payload of a host or disk slot. `blocks`: size of the pool.
    `token_s`: seconds of computing a token's KV, as estimated at load; 0: no time at all.
    """

    fingerprint: bytes
    block_tokens: int
    block_bytes: int
    blocks: int
    kv_dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    token_s: float = 0.0


class WorkerReady(Message, frozen=True, kw_only=True):
    """Worker -> scheduler, once a connection is up and the model loaded."""

    model: str
    architecture: str
    vocab: int
    max_context: int
    backend: str
    numerics: str
    kv: KVFacts
    limits: dict[str, int]


class Quiesce(Message, frozen=True, kw_only=True):
    """Scheduler -> worker, first message of a scheduler's life: finish or drop everything, forget older epochs."""

    epoch: int


class Idle(Message, frozen=True, kw_only=True):
    """Worker -> scheduler: nothing of an older epoch runs any more; the pool is the scheduler's again."""

    epoch: int


MOST_STEPS = 8
"""Of one plan."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One request's part of a step, whole: feed `ids` (packed u32) at absolute positions [start, start + n).

    `blocks`: packed u32 block table that covers [0, start + n). KV of [0, start) is in the pool.
    `sample` None: a prefill chunk that is not the last one, no logits wanted. `drawn`: how many output tokens the
    request has already, so the index of the one that this row draws (also after a retraction or a restart).

    A plan that is made while another runs doesn't know what that one draws. `feeds_last`: `ids` is empty, and the row
    feeds the one token that was drawn last for this key, behind all that was fed for it: when the plan before was
    curtailed, that is before `start`, and `drawn` counts as much too high.
    """

    key: int
    start: int
    ids: bytes
    blocks: bytes
    sample: SampleSpec | None
    drawn: int = 0
    stop_ids: tuple[int, ...] = ()
    feeds_last: bool = False


class Grown(msgspec.Struct, frozen=True, array_like=True):
    """Further blocks (packed u32) at the end of a request's table."""

    key: int
    blocks: bytes


class Plan(Message, frozen=True, kw_only=True):
    """One ragged step, or several in a row. Answered by Result with the same epoch and seq, in the order of the plans.

    A plan is a delta. The worker keeps, for each key and for as long as the epoch lasts, the last row with its table,
    and what it drew. In this order: `gone` (packed u64) are keys to be forgotten, `grown` are further blocks, `goes_on`
    (packed u64) are keys whose last row drew a token: that is fed at the next position, and another drawn, with the
    same sampling; and `rows` are given whole.

    `steps`: the plan stands for so many steps, in each of which after the first all keys of the one before go on; their
    tables reach as far already. At most MOST_STEPS; fewer are made when a Curtail comes.

    A key whose row ended in an error, or drew one of its `stop_ids`, is not computed again: results of further rows of
    it are `dropped`.

    The scheduler sends the next plan while this one runs; the worker has at most two, and works through them in order.
    """

    epoch: int
    seq: int
    rows: tuple[Row, ...] = ()
    goes_on: bytes = b""
    grown: tuple[Grown, ...] = ()
    gone: bytes = b""
    steps: int = 1


class Curtail(Message, frozen=True, kw_only=True):
    """Scheduler -> worker: plans up to `seq` end with the step that they are in, or with their first one.

    Somebody has come who must not wait for the others' steps.
    """

    epoch: int
    seq: int


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """`token`: the drawn id, -1 when the row had no `sample` or failed. `error`: ends the request alone.

    `dropped`: a plan before ended this request, so there was nothing to compute.
    """

    key: int
    token: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None
    dropped: bool = False


class Result(Message, frozen=True, kw_only=True):
    """Outcome of a plan: of the rows of `goes_on`, then of `rows`, each in order; and the same again for each further
    step that was made. `forward_s`: seconds of all of them.
    """

    epoch: int
    seq: int
    rows: tuple[RowResult, ...]
    forward_s: float


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """One block between the pool and the arena: `offset` is the payload's byte offset in the arena file.

    `checksum`: for a load the expected XXH3-64 of the payload; 0 for a save.
    """

    block: int
    offset: int
    checksum: int = 0


class Transfer(Message, frozen=True, kw_only=True):
    """Copies, executed beside the steps; answered by Transferred with the same epoch and seq.

    `save` True: pool -> arena, else arena -> pool. `arena`: path of the arena file, `arena_key` its identity
    (changes when the store made a new file: then the worker maps it anew).
    """

    epoch: int
    seq: int
    save: bool
    arena: str
    arena_key: str
    copies: tuple[Copy, ...]


class Transferred(Message, frozen=True, kw_only=True):
    """Per copy, in order: the XXH3-64 of the bytes now in the pool (load) or arena (save), and whether it held.

    `ok`: one byte per copy, 1 = copied and (for a load) the checksum matched.
    """

    epoch: int
    seq: int
    checksums: bytes
    ok: bytes
    seconds: float


# --- scheduler <-> detokenizer --------------------------------------------------------------------------------


class Opening(msgspec.Struct, frozen=True):
    """What the detokenizer needs to know of a request to turn its tokens into text."""

    principal: str
    prompt_tokens: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    logprobs: bool
    detached: bool
    prompt_tail: bytes = b""


class Progress(Message, frozen=True, kw_only=True):
    """Scheduler -> detokenizer: output tokens [start, start + n) of a request; idempotent by index.

    `opening` comes with start = 0 (first news of a request, and every replay). `finish` closes the request; its
    `usage.completion_tokens` is authoritative.
    """

    id: str
    start: int
    ids: bytes
    opening: Opening | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: Finish | None = None


class StopAt(Message, frozen=True, kw_only=True):
    """Detokenizer -> scheduler: a stop string is complete with output token `at` - 1; idempotent."""

    id: str
    at: int


class Forget(Message, frozen=True, kw_only=True):
    """Scheduler -> detokenizer: the request's retention is over."""

    id: str


class Synced(Message, frozen=True, kw_only=True):
    """Scheduler -> detokenizer: everything retained has been replayed once on this connection."""
