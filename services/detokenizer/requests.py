"""Which requests there are, who follows them, and what is sent to whom: the detokenizer's decisions, pure.

Events in, effects out; time, clients and reply tickets are injected. Per client and request there is one attachment:

    Attach ──► parked (id unknown) ──► attached: next token, credit ──► over (finish sent, client gone, forgotten)
                 └─ 5 s after the scheduler has told all it knows: not_found

A chunk costs one credit. A client without credit costs nothing but its number: when it gives credit again, one chunk
carries everything from its next token on. So memory is bounded by the outputs themselves, however slow a reader is.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field

from services.detokenizer.output import Output, Violation
from services.detokenizer.text import TokenBytes
from shared.identity import LOCAL
from shared.messages import Message
from shared.messages.engine import CancelRequest, Forget, Opening, Progress, StopAt
from shared.messages.front import Attach, Attached, Chunk, Credit, Rejected

PARK_S = 5.0
"""Seconds that an Attach to an unknown id waits for it to become known."""
PROGRESS_WINDOW = 1024
"""Progress messages that the scheduler may have on their way to us."""
MAX_CREDIT = 1024
MAX_PARKED = 4096
MAX_PARKED_EACH = 512
"""Of one user over TCP, so that nobody takes all the room."""
MAX_ID = 128
"""Characters of a request's id."""
MAX_FOLLOWERS = 64
"""Attachments of one request."""


@dataclass(frozen=True)
class ToClient:
    """Send to a client; when it can't be sent, `unsent` takes it back."""

    client: Hashable
    message: Chunk | Rejected


@dataclass(frozen=True)
class Answer:
    """Answer the request for which `ticket` stands."""

    client: Hashable
    ticket: object
    message: Attached | Rejected


@dataclass(frozen=True)
class ToScheduler:
    """Send to the scheduler; lost when it is away, and derived again from its replay."""

    message: Message


@dataclass(frozen=True)
class Complain:
    """Log a protocol violation."""

    reason: str


Effect = ToClient | Answer | ToScheduler | Complain


@dataclass
class _Follower:
    """One attachment: the client has, or will have, tokens [0, next)."""

    next: int
    credit: int


@dataclass
class _Request:
    output: Output
    lonely_since: float | None
    followers: dict[Hashable, _Follower] = field(default_factory=dict)
    cancel_sent: bool = False
    forgotten_since: float | None = None


@dataclass(frozen=True)
class _Parked:
    client: Hashable
    principal: str
    attach: Attach
    ticket: object
    since: float


@dataclass(frozen=True)
class Statistics:
    """Numbers for status."""

    requests: int
    live: int
    attachments: int
    stalled: int
    parked: int
    tokens: int
    violations: int
    synced: bool


class Requests:
    """All requests of the engine that the scheduler has told of and not yet made us forget."""

    def __init__(self, token_bytes: TokenBytes, *, grace_s: float, park_s: float = PARK_S) -> None:
        self._token_bytes = token_bytes
        self._grace_s = grace_s
        self._park_s = park_s
        self._requests: dict[str, _Request] = {}
        self._parked: dict[str, dict[Hashable, _Parked]] = {}  # id -> client -> what it asked
        self._parked_count = 0
        self._parked_by: Counter[str] = Counter()
        self._synced_at: float | None = None  # None: the scheduler is away or still replaying
        self._told: set[str] = set()  # ids heard of on the scheduler's present connection
        self._stalled: set[str] = set()  # ids with a chunk that found no room
        self._consumed = 0
        self._violations = 0

    # --- the scheduler's side ---------------------------------------------------------------------------------

    def scheduler_up(self) -> list[Effect]:
        """A connection to a scheduler stands; its replay follows."""
        self._synced_at = None
        self._told.clear()
        self._consumed = 0
        return [ToScheduler(Credit(chunks=PROGRESS_WINDOW))]

    def scheduler_down(self) -> None:
        """The scheduler is away: nothing is unknown for certain until the next has replayed."""
        self._synced_at = None

    def synced(self, now: float) -> list[Effect]:
        """The scheduler has told all it knows: what it did not name is over (its journal is gone)."""
        self._synced_at = now
        effects: list[Effect] = []
        for request_id in [known for known in self._requests if known not in self._told]:
            for client in self._requests.pop(request_id).followers:
                effects.append(ToClient(client, _not_found(request_id)))
        return effects

    def progress(self, message: Progress, now: float) -> list[Effect]:
        """Tokens, finish or first news of a request; idempotent by token index."""
        effects: list[Effect] = []
        self._consumed += 1
        if self._consumed >= PROGRESS_WINDOW // 4:
            effects.append(ToScheduler(Credit(chunks=self._consumed)))
            self._consumed = 0
        self._told.add(message.id)
        request = self._requests.get(message.id)
        if message.opening is not None:
            # First news, or a replay by a scheduler to which everything we sent before is unknown.
            if request is None or request.forgotten_since is not None:  # forgotten: the id is used anew
                effects += self._open(message.id, message.opening, now)
                request = self._requests[message.id]
            request.cancel_sent = False
        elif request is None:
            return [*effects, self._violated(f"progress of request {message.id}, which was never opened")]
        output = request.output
        stop_told = output.stop_at is not None and message.opening is None
        try:
            output.take(message)
        except Violation as violation:
            return [*effects, self._violated(f"request {message.id}: {violation}")]
        if output.stop_at is not None and not stop_told and message.finish is None:
            effects.append(ToScheduler(StopAt(id=message.id, at=output.stop_at)))
        return [*effects, *self._serve(request)]

    def _open(self, request_id: str, opening: Opening, now: float) -> list[Effect]:
        """Files a new request and lets the parked attaches follow it."""
        old = self._requests.get(request_id)
        effects: list[Effect] = [ToClient(client, _not_found(request_id)) for client in (old.followers if old else ())]
        request = _Request(Output(request_id, opening, self._token_bytes), lonely_since=now)
        self._requests[request_id] = request
        parked = self._parked.pop(request_id, {})
        self._parked_no_more(parked.values())
        for asked in parked.values():
            effects += self._follow(request, asked)
        return effects

    def forget(self, message: Forget, now: float) -> None:
        """Retention is over. The next tick removes it; while it is still being read, its last reader's end."""
        request = self._requests.get(message.id)
        if request is not None and request.forgotten_since is None:
            request.forgotten_since = now

    def _violated(self, reason: str) -> Complain:
        self._violations += 1
        return Complain(reason)

    # --- the clients' side ------------------------------------------------------------------------------------

    def attach(self, client: Hashable, principal: str, message: Attach, ticket: object, now: float) -> list[Effect]:
        """A client follows a request from a token index; again from elsewhere replaces its earlier attachment."""
        if message.start < 0 or not 1 <= message.credit <= MAX_CREDIT:
            reason = f"start is {message.start} and credit {message.credit}; start >= 0, credit 1 to {MAX_CREDIT}"
            return [Answer(client, ticket, Rejected(id=message.id, code="bad_request", reason=reason))]
        if len(message.id) > MAX_ID:  # no request has it, and it would be kept
            return [Answer(client, ticket, _not_found(f"{message.id[:MAX_ID]}..."))]
        request = self._requests.get(message.id)
        if request is not None:
            return self._follow(request, _Parked(client, principal, message, ticket, now))
        own = self._parked_by[principal]
        if self._parked_count >= MAX_PARKED or (own >= MAX_PARKED_EACH and principal != LOCAL):
            reason = f"{self._parked_count} attaches to unknown requests wait already, {own} of them yours"
            reason += f"; at most {MAX_PARKED} and {MAX_PARKED_EACH} may, try again"
            return [Answer(client, ticket, Rejected(id=message.id, code="overloaded", reason=reason))]
        here = self._parked.setdefault(message.id, {})
        if client not in here:
            self._parked_count += 1
            self._parked_by[principal] += 1
        here[client] = _Parked(client, principal, message, ticket, now)
        return []

    def _follow(self, request: _Request, asked: _Parked) -> list[Effect]:
        if asked.principal != request.output.opening.principal:  # no word on whether the id exists
            return [Answer(asked.client, asked.ticket, _not_found(asked.attach.id))]
        if asked.client not in request.followers and len(request.followers) >= MAX_FOLLOWERS:
            reason = f"request has {MAX_FOLLOWERS} followers already; end one of them"
            rejected = Rejected(id=asked.attach.id, code="overloaded", reason=reason)
            return [Answer(asked.client, asked.ticket, rejected)]
        request.followers[asked.client] = _Follower(asked.attach.start, asked.attach.credit)
        request.lonely_since = None
        return [Answer(asked.client, asked.ticket, Attached(id=asked.attach.id)), *self._serve(request)]

    def credit(self, client: Hashable, message: Credit) -> list[Effect]:
        """A client allows more chunks of a request; ignored when it follows none of that id."""
        request = self._requests.get(message.id)
        follower = request.followers.get(client) if request is not None else None
        if request is None or follower is None or message.chunks < 1:
            return []
        follower.credit = min(MAX_CREDIT, follower.credit + message.chunks)
        return list(self._serve(request))

    def gone(self, client: Hashable, now: float) -> None:
        """A client's connection is over: its attachments end, its requests go on for `grace_s`."""
        self._unpark(lambda parked: parked.client == client)
        for request in self._requests.values():
            if request.followers.pop(client, None) is not None and not request.followers:
                request.lonely_since = now

    def _unpark(self, which: Callable[[_Parked], bool]) -> list[_Parked]:
        """Takes out the parked attaches that `which` names; a pass over all of them."""
        out = [parked for here in self._parked.values() for parked in here.values() if which(parked)]
        for parked in out:
            here = self._parked[parked.attach.id]
            del here[parked.client]
            if not here:
                del self._parked[parked.attach.id]
        self._parked_no_more(out)
        return out

    def _parked_no_more(self, parked: Collection[_Parked]) -> None:
        self._parked_count -= len(parked)
        for one in parked:
            self._parked_by[one.principal] -= 1
            if not self._parked_by[one.principal]:
                del self._parked_by[one.principal]

    def unsent(self, client: Hashable, message: Chunk | Rejected) -> None:
        """A message for a client found no room: a chunk is made again at the next tick or credit."""
        request = self._requests.get(message.id)
        if request is not None and isinstance(message, Chunk):
            follower = request.followers.setdefault(client, _Follower(message.start, 0))
            follower.next = min(follower.next, message.start)
            follower.credit = min(MAX_CREDIT, follower.credit + 1)
            request.lonely_since = None
            self._stalled.add(message.id)

    def _serve(self, request: _Request) -> Iterator[Effect]:
        """Chunks for every follower that has credit; the one with the finish ends the attachment."""
        for client, follower in list(request.followers.items()):
            while follower.credit:
                chunk = request.output.chunk(follower.next)
                if chunk is None:
                    break
                follower.next = chunk.end
                follower.credit -= 1
                yield ToClient(client, chunk)
                if chunk.finish is not None:
                    del request.followers[client]
                    break

    # --- time -------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """What is due: parked attaches, leases of requests nobody follows, chunks that found no room, forgetting."""
        effects: list[Effect] = []
        if self._synced_at is not None:
            synced, horizon = self._synced_at, now - self._park_s
            due = self._unpark(lambda parked: max(parked.since, synced) <= horizon)
            effects += [Answer(parked.client, parked.ticket, _not_found(parked.attach.id)) for parked in due]
        stalled, self._stalled = self._stalled, set()
        for request_id in stalled & self._requests.keys():
            effects += self._serve(self._requests[request_id])
        for request_id, request in list(self._requests.items()):
            if request.forgotten_since is not None:
                if now >= request.forgotten_since + self._grace_s:
                    effects += [ToClient(client, _not_found(request_id)) for client in request.followers]
                    request.followers.clear()
                if not request.followers:
                    del self._requests[request_id]
                    self._told.discard(request_id)
            elif self._lease_over(request, now):
                request.cancel_sent = True
                principal = request.output.opening.principal
                effects.append(ToScheduler(CancelRequest(id=request_id, principal=principal, reason="abandoned")))
        return effects

    def _lease_over(self, request: _Request, now: float) -> bool:
        live = request.output.finish is None and not request.output.opening.detached and not request.cancel_sent
        return live and request.lonely_since is not None and now >= request.lonely_since + self._grace_s

    # --- looking at it ----------------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """A snapshot; costs a pass over all requests."""
        requests = self._requests.values()
        followers = [follower for request in requests for follower in request.followers.values()]
        return Statistics(
            requests=len(requests),
            live=sum(request.output.finish is None for request in requests),
            attachments=len(followers),
            stalled=sum(follower.credit == 0 for follower in followers),
            parked=self._parked_count,
            tokens=sum(len(request.output) for request in requests),
            violations=self._violations,
            synced=self._synced_at is not None,
        )

    def check_integrity(self) -> None:
        """AssertionError with the numbers when the books contradict themselves."""
        for request_id, request in self._requests.items():
            output = request.output
            if output.id != request_id:
                raise AssertionError(f"request {output.id} is filed under {request_id}")
            if not 0 <= output.end <= len(output):
                raise AssertionError(f"{request_id}: {output.end} tokens may be shown, {len(output)} are known")
            if output.finish is None and bool(request.followers) != (request.lonely_since is None):
                raise AssertionError(f"{request_id}: {len(request.followers)} followers, lonely {request.lonely_since}")
            for follower in request.followers.values():
                if not 0 <= follower.credit <= MAX_CREDIT or follower.next < 0:
                    raise AssertionError(f"{request_id}: follower at {follower.next} with credit {follower.credit}")
        if self._parked.keys() & self._requests.keys():
            raise AssertionError("an attach is parked although its request is known")
        if self._parked_count != sum(len(here) for here in self._parked.values()):
            raise AssertionError(f"{self._parked_count} parked attaches are counted, {self._parked} are there")


def _not_found(request_id: str) -> Rejected:
    reason = f"no request {request_id} is known; it was never accepted, is another's, or its retention is over"
    return Rejected(id=request_id, code="not_found", reason=reason)
