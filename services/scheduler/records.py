"""What the scheduler writes to its journal: everything needed to go on with each request, and nothing else.

The pure engine makes these records and folds them again in `Engine.restore`; `journal.py` frames, writes and
reads them. A request is named by `key`, an integer unique within the journal, so that a step costs a few bytes a
row. Tokens are placed by index and the first journaled one wins, which makes a repeated record harmless.

Times (`at`, `deadline`) are seconds of the shell's steady wall clock (wall time at the start of the process plus
the monotonic time since), so that they can be compared after a restart and never jump within one life.
"""

import msgspec

from shared.messages.engine import SampleSpec, Submit
from shared.messages.front import Finish, TokenLogprob


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Base of the journal's records."""


class Accept(Record, frozen=True, tag="A"):
    """A request with all its parameters; written before Journaled is answered.

    `digest`: BLAKE2b-256 of the raw request. `ids`: the prompt, packed u32. `sample.seed`: the drawn seed when the
    client gave none. `deadline`: 0 for none.
    """

    key: int
    at: float
    id: str
    digest: bytes
    principal: str
    ids: bytes
    max_tokens: int
    sample: SampleSpec
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    salt: bytes = b""
    no_store: bool = False
    no_read: bool = False
    detached: bool = False
    deadline: float = 0.0


class Admit(Record, frozen=True, tag="I"):
    """First admission: the prompt tokens that came from each tier. Written once, so usage survives a restart."""

    key: int
    at: float
    device: int
    host: int
    disk: int


class StepRow(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens [start, start + n) of one request; `logprobs` one per token when they were asked for."""

    key: int
    start: int
    ids: bytes
    logprobs: tuple[TokenLogprob, ...] | None = None


class Step(Record, frozen=True, tag="S"):
    """What one step drew, written before any of it is emitted."""

    at: float
    rows: tuple[StepRow, ...]


class Ended(Record, frozen=True, tag="F"):
    """A request is over; `finish.usage.completion_tokens` cuts its output (a stop string may end before the last)."""

    key: int
    at: float
    finish: Finish


AnyRecord = Accept | Admit | Step | Ended
"""The union that a journal decodes."""


def accepted(now: float, key: int, submit: Submit, drawn_seed: int) -> Accept:
    """The record of a request that is taken; `drawn_seed` is its seed when the client gave none."""
    return Accept(
        key=key,
        at=now,
        id=submit.id,
        digest=submit.digest,
        principal=submit.principal,
        ids=submit.ids,
        max_tokens=submit.max_tokens,
        sample=submit.sample if submit.seeded else msgspec.structs.replace(submit.sample, seed=drawn_seed),
        stop_ids=submit.stop_ids,
        stop=submit.stop,
        salt=submit.salt,
        no_store=submit.no_store,
        no_read=submit.no_read,
        detached=submit.detached,
        deadline=now + submit.deadline_s if submit.deadline_s is not None else 0.0,
    )
