"""Events in, effects out: the border between the pure engine and its shell.

The shell calls one method of `Events` for each thing that happens, then `next_plan`, then `take_effects`, and
carries out what it gets: **first all `Journal` records in one write, then the rest in order, then the plan**.
Journal before emit is thereby one rule in one place. The engine reads no clock and draws no number: `now` is the
shell's steady wall clock in seconds (wall time at the start of the process plus monotonic time since), seeds come
with `submit`.

    socket ──► shell ──event(now, ...)──► engine
                 ▲                          │ take_effects(), next_plan(now)
                 └── journal, then sends ◄──┘

Everything that waits for an answer of the store carries a *ticket*. The engine watches its deadlines itself (see
`next_deadline`, `tick`); an answer that comes later is still welcome: what it leased or granted is given back.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.records import AnyRecord
from services.scheduler.target import Target
from shared.messages.engine import (
    CancelRequest,
    Curtail,
    Journaled,
    KVFacts,
    Plan,
    Progress,
    Result,
    StopAt,
    Submit,
    Transfer,
    Transferred,
)
from shared.messages.front import Cancelled, Rejected
from shared.messages.store import (
    Abandon,
    ClearCache,
    Commit,
    Committed,
    EngineOpened,
    Found,
    Lookup,
    OpenEngine,
    Release,
    Reserve,
    Reserved,
    Staged,
    Taken,
)


@dataclass(frozen=True, slots=True)
class Journal:
    """Append `record`; all of one batch of effects go in one write, before any other effect of it."""

    record: AnyRecord


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Send copies to the worker, beside its steps, answered by `Events.transferred`; or cut its plans short."""

    message: Transfer | Curtail


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the store; hand the answer to `found`, `reserved` or `committed` with this ticket.

    None is handed over when the question can't be sent, fails or times out. `deadline_s`: seconds to wait.
    """

    ticket: int
    message: Lookup | Reserve | Commit
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the store; no answer is awaited. Dropped without harm when the store is away (a new store forgets
    the leases, and asks for the grants in OpenEngine).
    """

    message: Abandon | Taken | Release


@dataclass(frozen=True, slots=True)
class Advanced:
    """The request has new tokens or has ended: send `Events.progress(id, sent)` to the detokenizer."""

    id: str


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The request's retention is over: drop the send index, send Forget, let the journal drop its segments."""

    id: str
    key: int


Effect = Journal | ToWorker | Ask | Tell | Advanced | Forgotten


class Events(Protocol):
    """What `engine.Engine` offers; every method is synchronous, deterministic and bounded."""

    # --- requests

    def submit(self, now: float, submit: Submit, drawn_seed: int) -> Journaled | Rejected:
        """A request. Journaled may be answered once the effects are carried out.

        Same id and digest again: Journaled(known=True), also when it is over. Codes of a rejection: conflict (id
        known with another digest), overloaded, never_fits (pool), context_too_long, bad_request (empty prompt,
        max_tokens < 1); all but conflict carry the numbers that clash. `drawn_seed` is used when it is unseeded.
        """

    def cancel(self, now: float, cancel: CancelRequest) -> Cancelled:
        """Ends a live request of this principal at once, whatever it is doing. `known`: there was one.

        It ends as `cancelled`, whatever the reason given.
        """

    def stop_at(self, now: float, stop: StopAt) -> None:
        """A stop string is complete: the output is cut to `at` tokens and ends with `stop`. Idempotent.

        A request that ended by length, or by a later stop, while this was on its way is corrected: a second Ended
        is journaled, the last one counts. Ignored for any other that is over, or unknown.
        """

    def progress(self, id: str, start: int) -> Progress | None:
        """Output from token `start` on, with `opening` when `start` is 0 and `finish` when it is over.

        None for an unknown id. The next `start` is the returned `start` plus its tokens.
        """

    def retained(self) -> list[str]:
        """Ids of all live and retained requests, oldest first: what a new detokenizer is told, from 0."""

    def restore(self, now: float, records: Iterable[AnyRecord]) -> None:
        """The journal of the scheduler's previous lives, in order. Call once, before any other event.

        Live requests wait again in their old order, with their tokens; their deadlines still hold.
        """

    # --- time

    def tick(self, now: float) -> None:
        """Time has passed: deadlines, retention, waits on the store. Call when `next_deadline` is reached."""

    def next_deadline(self) -> float | None:
        """The earliest time at which `tick` would do something; None for never."""

    # --- worker

    def worker_up(self, now: float, epoch: int, facts: KVFacts, max_context: int) -> None:
        """A worker has answered Idle(epoch): its pool is empty and ours. `epoch` is larger than any before it.

        Implies `worker_down` for the one before.
        """

    def worker_down(self, now: float) -> None:
        """The worker's exit is *proven*: its pool is gone. Running requests wait again at the front, with tokens.

        Those that were in outstanding plans run alone until they get further; one that has lost three workers in
        a row without getting further ends with the error `worker_lost`.

        Never call it for missed heartbeats: a copy of a living worker may still write into granted slots.
        """

    def next_plan(self, now: float) -> Plan | None:
        """The next step, or None when enough are out, there is no worker, or nothing can run.

        To be asked after every event, again until it says None: the worker may have two plans, the one that it works
        on and the next.
        """

    def result(self, now: float, result: Result) -> None:
        """Outcome of a plan; one of an older epoch, or a second one, is ignored. Results come in the order of the
        plans: one that comes before another's says that the other's is lost.
        """

    def transferred(self, now: float, transferred: Transferred) -> None:
        """Outcome of copies; one of an older epoch, or a second one, is ignored."""

    # --- store

    def open_engine(self) -> OpenEngine | None:
        """The message that opens this engine at a store that came up, listing the grants that it still holds.

        None before the first `worker_up` (slot size unknown): open the store after that, and again whenever
        `worker_up` brings another `block_bytes`.
        """

    def store_up(self, now: float, opened: EngineOpened, incarnation: int) -> None:
        """The answer to `open_engine()`: an incarnation of the store serves us."""

    def store_down(self, now: float) -> None:
        """The store's connection is gone. Leases are void, grants are held until `open_engine` lists them."""

    def found(self, now: float, ticket: int, found: Found | None) -> None:
        """Answer to a Lookup, None when there is none."""

    def staged(self, now: float, staged: Staged) -> None:
        """Blocks of a lease have arrived in the arena, or never will."""

    def reserved(self, now: float, ticket: int, reserved: Reserved | None) -> None:
        """Answer to a Reserve, None when there is none."""

    def committed(self, now: float, ticket: int, committed: Committed | None) -> None:
        """Answer to a Commit, None when there is none."""

    def target(self, asked: ClearCache) -> Target:
        """What to clear; NoTarget when that can't be told."""

    def clear(self, now: float, target: Target) -> int:
        """Forgets cached blocks -> how many device blocks. Running requests go on with theirs and no longer insert.
        Send Clear to the store afterwards and report its answer by `cleared`.
        """

    def cleared(self, now: float, epoch: int | None) -> None:
        """The store's new clear epoch; saves and loads of older ones are refused from now on.

        None when the store could not be asked. To be told once for each `clear`; until all are, nothing is looked up.
        """

    # --- out

    def take_effects(self) -> list[Effect]:
        """What is to be done, in order; the list is the caller's, the engine starts a new one."""
