"""What `perdure generate` prints: the JSON of answers, usage for people, nothing that drives a terminal."""

import json
import math

from ops.cli.answers import chunk_json, joined_json, printable, rejected_json, usage_line
from ops.waiting import _missing
from shared.messages.base import pack_u32
from shared.messages.front import Chunk, Finish, Rejected, Timing, TokenLogprob, Usage
from shared.messages.hello import Snapshot

ID = "ab" * 16
FINISH = Finish(
    reason="stop",
    usage=Usage(
        prompt_tokens=6000,
        completion_tokens=3,
        cached_tokens=5968,
        cached_by_tier={"device": 0, "host": 5000, "disk": 968},
    ),
    timing=Timing(queued_s=0.1, ttft_s=0.25, total_s=0.75),
)


def logprob(chosen: float) -> TokenLogprob:
    return TokenLogprob(chosen=chosen, top_ids=pack_u32([7, 8]), top=(chosen, -math.inf))


def chunks() -> list[Chunk]:
    return [
        Chunk(id=ID, start=4, end=6, ids=pack_u32([1, 2]), text="ab", logprobs=(logprob(-0.5), logprob(-1.5))),
        Chunk(id=ID, start=6, end=7, ids=pack_u32([3]), text="c", logprobs=(logprob(-2.5),), finish=FINISH),
    ]


def test_the_whole_answer_is_its_chunks_joined_in_the_promised_order_of_fields() -> None:
    whole = joined_json([chunk_json(chunk) for chunk in chunks()])
    names = ["id", "choice", "index", "ids", "text", "finish_reason", "logprobs", "usage", "timing"]
    assert list(whole) == names
    assert (whole["index"], whole["ids"], whole["text"], whole["finish_reason"]) == (4, [1, 2, 3], "abc", "stop")
    assert [one["token"] for one in whole["logprobs"]] == [1, 2, 3]
    assert whole["usage"]["cached_by_tier"] == {"device": 0, "host": 5000, "disk": 968}
    assert whole["timing"] == {"queued_s": 0.1, "ttft_s": 0.25, "total_s": 0.75}


def test_an_impossible_alternative_is_null_because_json_has_no_infinity() -> None:
    text = json.dumps(chunk_json(chunks()[0]), allow_nan=False)
    assert json.loads(text)["logprobs"][0]["top"] == [{"token": 7, "logprob": -0.5}, {"token": 8, "logprob": None}]


def test_logprobs_are_there_only_when_asked_for() -> None:
    plain = Chunk(id=ID, start=0, end=1, ids=pack_u32([1]), text="a")
    assert "logprobs" not in chunk_json(plain)
    assert "finish_reason" not in chunk_json(plain)


def test_errors_carry_code_reason_and_numbers() -> None:
    refused = rejected_json(Rejected(id=ID, code="never_fits", reason="too big", numbers={"blocks": 9.0}))
    assert refused["error"] == {"code": "never_fits", "reason": "too big", "numbers": {"blocks": 9.0}}
    assert refused["finish_reason"] == "error"
    failed = Finish(reason="error", usage=FINISH.usage, timing=FINISH.timing, error=("internal", "not finite"))
    last = Chunk(id=ID, start=0, end=0, ids=b"", text="", finish=failed)
    assert chunk_json(last)["error"] == {"code": "internal", "reason": "not finite", "numbers": {}}


def test_people_read_tokens_cache_by_tier_and_rate() -> None:
    line = usage_line(FINISH)
    assert "6,000 prompt tokens (5,968 from the cache: host 5,000, disk 968)" in line
    assert "4.0 tokens/s" in line  # two tokens after the first, in half a second


def test_text_for_a_terminal_cannot_drive_it() -> None:
    assert printable("a\x1b[31mb\x07\x9b\x7f é✅\t\n") == "a\ufffd[31mb\ufffd\ufffd\ufffd é✅\t\n"


def snapshot(role: str, *, ready: bool = True, **data: object) -> Snapshot:
    return Snapshot(role=role, engine="e0", incarnation=1, pid=1, uptime_s=1, ready=ready, data=data)


def test_who_is_missing_is_told_by_absence_by_not_being_ready_and_by_the_scheduler_for_its_worker() -> None:
    there = {role: snapshot(role) for role in ("store", "worker", "tokenizer")}
    assert _missing(there | {"scheduler": snapshot("scheduler", worker_ready=True)}) == ()
    assert _missing(there | {"scheduler": snapshot("scheduler", worker_ready=False)}) == ("worker",)
    assert _missing(there | {"scheduler": None}) == ("scheduler",)
    assert _missing(there | {"store": snapshot("store", ready=False), "worker": None}) == ("store", "worker")
