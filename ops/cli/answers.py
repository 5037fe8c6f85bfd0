"""Showing an answer: as text while it comes, as JSON, and what it took."""

import json
import math
import sys
from typing import Any

import trio

from ops.client import Stream
from shared.messages.base import unpack_u32
from shared.messages.front import Chunk, Finish, Rejected, TokenLogprob


def rejected_json(rejected: Rejected) -> dict[str, Any]:
    """The JSON object of a request that was refused."""
    error = {"code": rejected.code, "reason": rejected.reason, "numbers": rejected.numbers}
    empty: dict[str, Any] = {"id": rejected.id, "choice": 0, "index": 0, "ids": [], "text": ""}
    return empty | {"finish_reason": "error", "error": error}


def chunk_json(chunk: Chunk) -> dict[str, Any]:
    """The JSON object of one chunk; `finish_reason`, `usage` and `timing` come with the last."""
    ids = unpack_u32(chunk.ids).tolist()
    fields: dict[str, Any] = {
        "id": chunk.id,
        "choice": chunk.choice,
        "index": chunk.start,
        "ids": ids,
        "text": chunk.text,
    }
    if chunk.logprobs is not None:
        fields["logprobs"] = [_logprob(token, logprob) for token, logprob in zip(ids, chunk.logprobs, strict=True)]
    return fields if chunk.finish is None else fields | _finish(chunk.finish)


def _logprob(token: int, logprob: TokenLogprob) -> dict[str, Any]:
    alternatives = zip(unpack_u32(logprob.top_ids), logprob.top, strict=True)
    top = [{"token": other, "logprob": _finite(value)} for other, value in alternatives]
    return {"token": token, "logprob": _finite(logprob.chosen), "top": top}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity: null is "impossible"


def _finish(finish: Finish) -> dict[str, Any]:
    usage, timing = finish.usage, finish.timing
    fields: dict[str, Any] = {"finish_reason": finish.reason}
    if finish.error is not None:
        fields["error"] = {"code": finish.error[0], "reason": finish.error[1], "numbers": {}}
    fields["usage"] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "cached_by_tier": {tier: usage.cached_by_tier.get(tier, 0) for tier in ("device", "host", "disk")},
    }
    fields["timing"] = {"queued_s": timing.queued_s, "ttft_s": timing.ttft_s, "total_s": timing.total_s}
    return fields


def joined_json(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One object for a whole answer from those of its chunks."""
    whole = parts[0] | parts[-1] | {"index": parts[0]["index"]}
    whole["ids"] = [token for part in parts for token in part["ids"]]
    whole["text"] = "".join(part["text"] for part in parts)
    if any("logprobs" in part for part in parts):
        whole["logprobs"] = [one for part in parts for one in part.get("logprobs", [])]
    order = ("id", "choice", "index", "ids", "text", "finish_reason", "logprobs", "error", "usage", "timing")
    return {name: whole[name] for name in order if name in whole}


def usage_line(finish: Finish) -> str:
    """What a request took, for people."""
    usage, timing = finish.usage, finish.timing
    tiers = ", ".join(f"{tier} {count:,}" for tier, count in usage.cached_by_tier.items() if count)
    cached = f" ({usage.cached_tokens:,} from the cache: {tiers})" if usage.cached_tokens else ""
    spent = timing.total_s - timing.ttft_s
    rate = (
        f", {(usage.completion_tokens - 1) / spent:.1f} tokens/s" if usage.completion_tokens > 1 and spent > 0 else ""
    )
    return (
        f"[{usage.prompt_tokens:,} prompt tokens{cached}, {usage.completion_tokens:,} new; "
        f"first after {timing.ttft_s:.2f} s{rate}; {finish.reason}]"
    )


_HARMLESS = {code: "\ufffd" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\t\n\r"}


def printable(text: str) -> str:
    """Text for a terminal: control characters, which could move its cursor or change its title, become U+FFFD."""
    return text.translate(_HARMLESS)


async def write(text: str) -> None:
    """Writes to stdout in a thread: a pager that takes nothing must not stop our heartbeats."""

    def work() -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    await trio.to_thread.run_sync(work, abandon_on_cancel=True)


async def show(stream: Stream, *, as_json: bool, lines: bool) -> tuple[Finish, str]:
    """Shows a whole answer on stdout; its finish and text. `lines`: JSON lines, one a chunk."""
    parts: list[dict[str, Any]] = []
    text: list[str] = []
    async for chunk in stream:
        text.append(chunk.text)
        if not as_json:
            await write(printable(chunk.text) if sys.stdout.isatty() else chunk.text)
            continue
        parts.append(chunk_json(chunk))
        if lines:
            await write(json.dumps(parts.pop(), ensure_ascii=False) + "\n")
    if parts:
        await write(json.dumps(joined_json(parts), ensure_ascii=False) + "\n")
    if stream.finish is None:
        raise RuntimeError("the stream ended without a finish")
    return stream.finish, "".join(text)
