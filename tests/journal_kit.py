"""Records and journals for the tests of the journal and the ledger."""

from pathlib import Path
from typing import Any

from services.scheduler.journal import Journal
from services.scheduler.records import Accept, Admit, AnyRecord, Ended, Step, StepRow
from shared.messages.base import pack_u32
from shared.messages.engine import SampleSpec
from shared.messages.front import Finish, Timing, TokenLogprob, Usage


def accept(key: int, prompt: int = 5) -> Accept:
    return Accept(
        key=key,
        at=1000.0 + key,
        id=f"{key:032x}",
        digest=bytes(32),
        principal="local",
        ids=pack_u32(range(prompt)),
        max_tokens=100,
        sample=SampleSpec(seed=key, bias=((3, 0.5),)),
        stop=("END",),
    )


def admit(key: int) -> Admit:
    return Admit(key, 1000.5, device=1, host=2, disk=3)


def step(*rows: tuple[int, int, int]) -> Step:
    """Rows of (key, start, tokens); each token names its place."""
    made = tuple(StepRow(key, start, pack_u32(range(start, start + count))) for key, start, count in rows)
    return Step(1001.0, made)


def logprob_step(key: int, start: int) -> Step:
    row = StepRow(key, start, pack_u32([start]), (TokenLogprob(-0.5, pack_u32([1, 2]), (-0.5, -1.5)),))
    return Step(1001.0, (row,))


def ended(key: int, tokens: int, at: float = 1002.0, error: tuple[str, str] | None = None) -> Ended:
    usage = Usage(5, tokens, 3, {"device": 1, "host": 2, "disk": 0})
    return Ended(key, at, Finish("error" if error else "length", usage, Timing(0.1, 0.2, 0.3), error))


def history(count: int) -> list[list[AnyRecord]]:
    """Batches in which `count` requests live side by side, each with a few tokens; the even ones end."""
    batches: list[list[AnyRecord]] = []
    for key in range(count):
        batches.append([accept(key)])
        batches.append([admit(key), step((key, 0, 1))])
    for place in range(1, 5):
        batches.append([step(*((key, place, 1) for key in range(count)))])
    batches.extend([ended(key, 5)] for key in range(0, count, 2))
    return batches


def filled(directory: Path, batches: list[list[AnyRecord]], **options: Any) -> None:
    """A journal with these batches, closed."""
    journal = Journal(directory, **options)
    journal.recover()
    for batch in batches:
        journal.append(batch)
    journal.close()


def flat(batches: list[list[AnyRecord]]) -> list[AnyRecord]:
    return [record for batch in batches for record in batch]
