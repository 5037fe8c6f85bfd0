"""The journal: frames, records, whole segments, and the engine's state that is made of them."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from ops.fuzz.mutate import bent
from ops.fuzz.target import Target, joined, parted, same
from ops.fuzz.values import bent_value
from services.scheduler.journal import Journal, JournalFormat
from services.scheduler.journal_segment import HEADER_BYTES, pack_header, segment_path
from services.scheduler.records import Accept, Admit, AnyRecord, Ended, Step, StepRow
from shared.framing import frame, read_frames
from shared.messages.base import pack_u32
from shared.messages.engine import SampleSpec
from shared.messages.front import Finish, Timing, TokenLogprob, Usage

_NEW = Accept(1 << 40, 1.0, "f" * 32, bytes(32), "local", pack_u32([1]), 1, SampleSpec())


def _accept(key: int) -> Accept:
    sample = SampleSpec(seed=key, bias=((3, 0.5),), logprobs=2)
    return Accept(key, 1000.0, f"{key:032x}", bytes(32), "local", pack_u32(range(5)), 9, sample, (2,), ("END",))


def _step(key: int, start: int) -> Step:
    row = StepRow(key, start, pack_u32([start]), (TokenLogprob(-0.5, pack_u32([1, 2]), (-0.5, -1.5)),))
    return Step(1001.0, (row, StepRow(key + 1, start, pack_u32([start, 7]))))


def _ended(key: int, tokens: int) -> Ended:
    usage = Usage(5, tokens, 3, {"device": 1, "host": 2, "disk": 0})
    return Ended(key, 1002.0, Finish("length", usage, Timing(0.1, 0.2, 0.3)))


def seeds(rng: Random) -> list[bytes]:
    """Two segments: requests that begin in one and end in the other."""
    made = []
    for key in range(4):
        first: list[list[AnyRecord]] = [[_accept(key), _accept(key + 1)], [Admit(key, 1000.5, 1, 2, 3), _step(key, 0)]]
        second: list[list[AnyRecord]] = [[_step(key, 2)], [_ended(key, 2), _ended(key + 1, 4)]]
        older = pack_header(1, 0) + b"".join(frame(msgspec.msgpack.encode(batch)) for batch in first)
        newer = pack_header(2, len(older)) + b"".join(frame(msgspec.msgpack.encode(batch)) for batch in second)
        made.append(joined([older, newer]))
    return made


def checked(data: bytes, place: Path) -> bool:
    """What one start makes of it, the next start finds again, with what was appended in between."""
    directory = place / "journal"
    directory.mkdir(mode=0o700)
    for number, content in enumerate(parted(data, 2), 1):
        if content:
            segment_path(directory, number).write_bytes(content)
    journal = Journal(directory)
    try:
        first = journal.recover()
    except JournalFormat:
        return False
    journal.append([_NEW])
    journal.close()
    again = Journal(directory)
    second = again.recover()
    again.close()
    # as bytes: a bent number may be NaN, which equals nothing
    expected = msgspec.msgpack.encode([*first.records, _NEW])
    same(msgspec.msgpack.encode(second.records) == expected, "a second start finds other records than the first")
    return not first.losses


def bend(data: bytes, rng: Random, corpus: Sequence[bytes]) -> bytes:
    """Half of them inside a record whose frame is sealed again."""
    parts = parted(data, 2)
    which = rng.randrange(2)
    frames = read_frames(parts[which], HEADER_BYTES)
    if rng.random() < 0.5 or not frames.payloads:
        parts[which] = bent(parts[which], rng, [parted(other, 2)[which] for other in corpus])
    else:
        payloads = [bytes(payload) for payload in frames.payloads]
        at = rng.randrange(len(payloads))
        if rng.random() < 0.3:
            payloads[at] = bent(payloads[at], rng, payloads)
        else:
            value: Any = msgspec.msgpack.decode(payloads[at])
            payloads[at] = msgspec.msgpack.encode(bent_value(value, rng))
        parts[which] = parts[which][:HEADER_BYTES] + b"".join(map(frame, payloads))
    return joined(parts)


TARGETS = [Target("journal", seeds, checked, bend)]
