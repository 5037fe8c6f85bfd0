"""Messages: the envelope's two frames, every tagged struct, and what the services read out of packed fields."""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from ops.fuzz.mutate import bent
from ops.fuzz.target import Target, joined, parted, same
from ops.fuzz.values import bent_value, sample
from services.scheduler.wellformed import found_fault, reserved_fault, staged_fault, submit_fault
from services.store.requests import chains, checksums_in, grants_in, scope_of
from services.tokenizer.validate import Limits, Refusal, check
from shared.actor import Reject
from shared.messages import MESSAGES, BadMessage, Head, Message, decode, encode
from shared.messages.base import split_identities, unpack_u32
from shared.messages.engine import Submit
from shared.messages.front import Generate
from shared.messages.store import (
    Abandon,
    Clear,
    Commit,
    Found,
    Lookup,
    OpenEngine,
    Release,
    Reserve,
    Reserved,
    Staged,
    Taken,
)

READERS: dict[type[Message], Callable[[Any], object]] = {
    Generate: lambda m: check(m, Limits(vocab=1000, max_context=4096)),
    Submit: submit_fault,
    OpenEngine: lambda m: grants_in(m.held_slots, m.held_generations),
    Reserve: lambda m: chains(m.identities, m.parents, m.root),
    Commit: lambda m: checksums_in(m.checksums, len(grants_in(m.slots, m.generations))),
    Abandon: lambda m: grants_in(m.slots, m.generations),
    Lookup: lambda m: split_identities(m.identities),
    Release: lambda m: unpack_u32(m.bad),
    Taken: lambda m: unpack_u32(m.blocks),
    Clear: scope_of,
    Found: lambda m: found_fault(m, 3),
    Staged: staged_fault,
    Reserved: reserved_fault,
}
"""What a service does first with a message that decodes; ValueError, Reject and Refusal are its documented refusals."""


def seeds(rng: Random) -> list[bytes]:
    """Three of each message."""
    heads = [Head(), Head(to=3, rid=2**40, re=1, deadline=12.5)]
    return [joined(encode(rng.choice(heads), sample(kind, rng))) for kind in MESSAGES for _ in range(3)]


def checked(data: bytes, _: Path) -> bool:
    """Decodes, encodes, decodes: the same bytes."""
    try:
        head, message = decode(parted(data, 2))
    except BadMessage:
        return False
    once = encode(head, message)
    same(encode(*decode(once)) == once, "a message that was decoded is not the same after a round trip")
    try:
        READERS.get(type(message), lambda m: None)(message)
    except (Reject, Refusal, ValueError):
        return False
    return True


def bend(data: bytes, rng: Random, corpus: Sequence[bytes]) -> bytes:
    """Half of them as values, so that what arrives is msgpack still."""
    parts = parted(data, 2)
    which = rng.random() < 0.85
    if rng.random() < 0.5:
        parts[which] = bent(parts[which], rng, [parted(other, 2)[which] for other in rng.sample(corpus, 2)])
    else:
        parts[which] = msgspec.msgpack.encode(bent_value(msgspec.msgpack.decode(parts[which]), rng))
    return joined(parts)


TARGETS = [Target("messages", seeds, checked, bend)]
