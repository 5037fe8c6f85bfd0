"""What a request must be before any work is done for it: all that its fields tell, and the model's limits.

Types are right already (the codec saw to that). Each refusal says what clashes, with both numbers, and the way out.
"""

import math
import re
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from shared.messages.front import Generate, RejectCode, Rejected, Sampling

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20
MAX_SALT_CHARS = 256
BODY_BYTES = 4 << 20
"""Bytes of text (or packed ids) that one request may carry."""
MAX_ID = 128
_ID = re.compile(rf"[0-9a-fA-F]{{32,{MAX_ID}}}")


class Refusal(Exception):
    """The request can't be served; becomes Rejected."""

    def __init__(self, code: RejectCode, reason: str, numbers: dict[str, float] | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.numbers = numbers or {}

    def rejected(self, request_id: str) -> Rejected:
        """The message for the client."""
        return Rejected(id=request_id, code=self.code, reason=self.reason, numbers=self.numbers)


@dataclass(frozen=True)
class Limits:
    """`vocab`: token ids that exist; `max_context`: tokens of prompt and output together; `body_bytes`: of input."""

    vocab: int
    max_context: int
    body_bytes: int = BODY_BYTES


def check(request: Generate, limits: Limits) -> None:
    """Everything that can be told without encoding; raises Refusal. Costs no more than one look at the input."""
    if not is_id(request.id):
        raise Refusal("bad_request", f"id {request.id[:140]!r} must be 32 to 128 hex digits, 128 random bits or more")
    given = [name for name in ("prompt", "messages", "ids") if getattr(request, name) is not None]
    if len(given) != 1:
        raise Refusal(
            "bad_request", f"give exactly one of prompt, messages and ids; given: {', '.join(given) or 'none'}"
        )
    _check_body(request, limits)
    _check_built(request)
    _check_sampling(request.sampling)
    if len(request.cache_salt or "") > MAX_SALT_CHARS:
        allowed = f"at most {MAX_SALT_CHARS} characters"
        raise _out_of_range("the length of cache_salt", len(request.cache_salt or ""), allowed)
    if request.deadline_s is not None and not (math.isfinite(request.deadline_s) and request.deadline_s > 0):
        raise _out_of_range("deadline_s", request.deadline_s, "more than 0 seconds")
    if request.ids is not None:
        check_ids(request.ids, limits)


def is_id(text: str) -> bool:
    """Whether a request can have this id."""
    return _ID.fullmatch(text) is not None


def _check_body(request: Generate, limits: Limits) -> None:
    texts = [request.prompt or ""]
    for message in request.messages or ():
        texts += (message.role, message.content)
    size = len(request.ids or b"") + sum(_utf8_bytes(text) for text in texts)
    if size > limits.body_bytes:
        over = size - limits.body_bytes
        reason = f"input is {size:,} bytes; the limit is {limits.body_bytes:,}; shorten by {over:,}"
        raise Refusal("body_too_large", reason, {"bytes": size, "limit": limits.body_bytes})
    if request.messages is not None and not request.messages:
        raise Refusal("bad_request", "messages is empty; give at least one message")
    if any(not message.role for message in request.messages or ()):
        raise Refusal("bad_request", "a message has an empty role; roles are system, user, assistant")


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _check_built(request: Generate) -> None:
    """Fields that the protocol carries and this version does not serve are refused by name, never ignored."""
    if request.choices != 1:
        if request.choices < 1:
            raise _out_of_range("choices", request.choices, "at least 1")
        raise Refusal(
            "unsupported", f"choices is {request.choices}; this version serves 1", {"choices": request.choices}
        )
    if request.priority != 0:
        reason = f"priority is {request.priority}; this version serves all requests alike, leave it at 0"
        raise Refusal("unsupported", reason, {"priority": request.priority})


def _check_sampling(sampling: Sampling) -> None:
    ranges: tuple[tuple[str, float | None, float, float, str], ...] = (
        ("max_tokens", sampling.max_tokens, 1, math.inf, "at least 1"),
        ("temperature", sampling.temperature, 0, math.inf, "0 or more, and finite"),
        ("top_k", sampling.top_k, 0, math.inf, "0 (off) or more"),
        ("top_p", sampling.top_p, math.ulp(0.0), 1, "more than 0, at most 1"),
        ("min_p", sampling.min_p, 0, 1, "0 to 1"),
        ("logprobs", sampling.logprobs, 0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
    )
    for name, value, low, high, allowed in ranges:
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            raise _out_of_range(name, value, allowed)
    if len(sampling.stop) > MAX_STOPS:
        raise _out_of_range("the number of stop strings", len(sampling.stop), f"at most {MAX_STOPS}")
    for stop in sampling.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise _out_of_range("the length of a stop string", len(stop), f"1 to {MAX_STOP_CHARS} characters")


def _out_of_range(name: str, value: float, allowed: str) -> Refusal:
    numbers = {name.replace(" ", "_"): float(value)} if math.isfinite(value) else {}
    return Refusal("bad_request", f"{name} is {value:,}; it must be {allowed}", numbers)


def check_ids(ids: bytes, limits: Limits) -> None:
    """Packed u32 prompt ids: whole, not empty, all in the vocabulary."""
    if len(ids) % 4:
        raise Refusal(
            "bad_request", f"ids are {len(ids)} bytes; packed u32 ids are a multiple of 4", {"bytes": len(ids)}
        )
    if not ids:
        raise Refusal("bad_request", "ids is empty; give at least one token id")
    largest = max(memoryview(ids).cast("I"))
    if largest >= limits.vocab:
        reason = f"token id {largest:,} is outside the vocabulary of {limits.vocab:,} (ids 0 to {limits.vocab - 1:,})"
        raise Refusal("bad_request", reason, {"token": largest, "vocab": limits.vocab})


def resolve_max_tokens(prompt_tokens: int, wanted: int | None, limits: Limits) -> int:
    """How many tokens the request may produce: what is wanted, at most what the context holds. Refusal if none."""
    if prompt_tokens == 0:
        raise Refusal("bad_request", "prompt is empty and the model has no BOS token; give at least one token")
    room = limits.max_context - prompt_tokens
    if room < 1:
        raise too_long(prompt_tokens, limits.max_context)
    return room if wanted is None else min(wanted, room)


def too_long(prompt_tokens: int, max_context: int, *, at_least: bool = False) -> Refusal:
    """The refusal of a prompt that leaves no room for one token of answer."""
    some = "at least " if at_least else ""
    reason = (
        f"prompt is {some}{prompt_tokens:,} tokens; the model's context is {max_context:,}, and one token of it is "
        f"for the answer; shorten by {some}{prompt_tokens + 1 - max_context:,} or start with a longer context"
    )
    return Refusal("context_too_long", reason, {"prompt_tokens": prompt_tokens, "max_context": max_context})


def digest(request: Generate) -> bytes:
    """32 bytes over all fields but the id: the same id with the same digest is the same request."""
    encoded = msgspec.msgpack.encode(replace(request, id=""))
    return blake2b(encoded, digest_size=32, person=b"perdure-generate").digest()
