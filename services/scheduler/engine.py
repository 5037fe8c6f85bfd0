"""The scheduler's engine: a deterministic state machine from events to effects (`events.py` says which).

It owns the requests, from acceptance to the end of their retention; the parts that it is made of keep one concept
each: `policy` (who waits, who is next), `residence` (who has blocks), `steps` and `batch` (what a step does),
`loading` and `saving` (the store), `limits`, `recovery` (the journal). No clock, no randomness, no IO: the same
events give the same effects.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from services.scheduler.clearing import Clearing
from services.scheduler.counters import EngineStatistics
from services.scheduler.desk import Desk, Store
from services.scheduler.events import Advanced, Effect, Events, Forgotten
from services.scheduler.kv.manager import KVManager
from services.scheduler.limits import Refusal, Shares, deadly, hopeless, malformed, token_limit
from services.scheduler.policy import WaitingQueue
from services.scheduler.records import AnyRecord, Ended, accepted
from services.scheduler.recovery import fold
from services.scheduler.request import Request
from services.scheduler.residence import Residence
from services.scheduler.settings import Settings
from services.scheduler.steps import Steps
from services.scheduler.target import Target, target_of
from shared.identity import root as root_of
from shared.messages.engine import (
    CancelRequest,
    Journaled,
    KVFacts,
    Plan,
    Progress,
    Result,
    StopAt,
    Submit,
    Transferred,
)
from shared.messages.front import Cancelled, FinishReason, Rejected
from shared.messages.store import ClearCache, Committed, EngineOpened, Found, OpenEngine, Reserved, Staged


class Engine(Events):
    """Implements `events.Events`, where each method is described. `key`: the home's identity key, 32 bytes."""

    def __init__(self, settings: Settings, key: bytes) -> None:
        self._settings = settings
        self._key = key
        self._desk = Desk(settings)
        self._home = Residence(self._desk)
        self._clearing = Clearing(self._desk, self._home)
        self._waiting = WaitingQueue(settings)
        self._steps = Steps(self._desk, self._home, self._waiting, self._finish)
        self._requests: dict[str, Request] = {}
        self._by_key: dict[int, Request] = {}
        self._shares = Shares(settings.user_requests)
        self._ended: dict[int, Request] = {}
        """By key, in the order of their ends."""
        self._next_key = 1
        self._facts: KVFacts | None = None
        self._max_context = 0
        self._arena_key: str | None = None

    def take_effects(self) -> list[Effect]:
        """What is to be done, in order."""
        effects, self._desk.effects = self._desk.effects, []
        return effects

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(self, now: float, submit: Submit, drawn_seed: int) -> Journaled | Rejected:
        """A request."""
        known = self._requests.get(submit.id)
        same = (submit.digest, submit.principal)
        if known is not None and (known.accept.digest, known.accept.principal) == same:
            return Journaled(id=submit.id, known=True, prompt_tokens=known.prompt_tokens)
        request = Request.of(accepted(now, self._next_key, submit, drawn_seed))
        refusal = self._refusal(request, submit, known)
        if refusal is not None:
            self._desk.counters.rejected += 1
            code, reason, numbers = refusal
            return Rejected(id=submit.id, code=code, reason=reason, numbers=numbers)
        self._next_key += 1
        self._desk.counters.accepted += 1
        self._desk.counters.no_read += submit.no_read
        self._desk.counters.no_store += submit.no_store
        self._desk.journal(request.accept)
        self._register(request)
        self._waiting.add(request)
        self._steps.curtail()
        return Journaled(id=submit.id, known=False, prompt_tokens=request.prompt_tokens)

    def cancel(self, now: float, cancel: CancelRequest) -> Cancelled:
        """Ends a live request of this principal."""
        request = self._requests.get(cancel.id)
        if request is None or request.finish is not None or request.accept.principal != cancel.principal:
            return Cancelled(id=cancel.id, known=False)
        self._finish(now, request, "cancelled")
        return Cancelled(id=cancel.id, known=True)

    def stop_at(self, now: float, stop: StopAt) -> None:
        """A stop string is complete with output token `at` - 1."""
        request = self._requests.get(stop.id)
        if request is None or not 1 <= stop.at <= request.output_tokens:
            return
        if request.finish is None:
            self._finish(now, request, "stop", at=stop.at)
        elif request.finish.reason == "length" or (request.finish.reason == "stop" and stop.at < request.output_tokens):
            # the request ended while the news of its stop string was on its way: the text ends there, so must usage
            request.cut(stop.at)
            ended = request.end(request.ended_at, "stop")
            self._desk.journal(Ended(request.key, request.ended_at, ended))
            self._desk.effects.append(Advanced(request.id))

    def progress(self, id: str, start: int) -> Progress | None:
        """Output from token `start` on."""
        request = self._requests.get(id)
        return request.progress(start) if request else None

    def retained(self) -> list[str]:
        """Ids of all live and retained requests, oldest first."""
        return list(self._requests)

    def restore(self, now: float, records: Iterable[AnyRecord]) -> None:
        """The journal of earlier lives."""
        requests = fold(records)
        last = {request.id: request for request in requests}  # an id that was forgotten may have been used again
        for request in requests:
            self._next_key = max(self._next_key, request.key + 1)
            over = request.finish is not None and request.ended_at + self._settings.result_ttl_s <= now
            if request is last[request.id] and not over:
                self._register(request)
        live = [request for request in self._requests.values() if request.finish is None]
        ended = [request for request in self._requests.values() if request.finish is not None]
        for request in sorted(ended, key=lambda request: request.ended_at):
            request.trim()
            self._retain(request)
        for request in live:
            self._waiting.add(request)
            if reason := request.natural_end():  # its last step was journaled, its end was not
                self._finish(now, request, reason)

    def recall(self, rates: Mapping[str, Any]) -> None:
        """How quick computing and loading were in earlier lives."""
        self._home.loader.timing.recall(rates)

    def rates(self) -> dict[str, Any]:
        """How quick they are, to be saved."""
        return self._home.loader.timing.plain()

    # --- time ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Whatever has become due."""
        for kind, number in self._desk.timers.due(now):
            if kind == "deadline":
                self._finish(now, self._by_key[number], "deadline")
            elif kind == "pace":
                pass  # the next plan looks again at what it waits for
            elif kind == "forget":
                if number in self._ended:  # an end in this same tick may have taken its place
                    self._forget(number)
            elif kind in ("reserve", "commit", "retry"):
                self._home.saver.expire(now, kind, number)
            else:
                self._home.loader.expire(now, kind, number)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        return self._desk.timers.next()

    # --- worker -------------------------------------------------------------------------------------------------

    def worker_up(self, now: float, epoch: int, facts: KVFacts, max_context: int) -> None:
        """A worker with an empty pool that is ours."""
        self.worker_down(now)
        if epoch <= self._desk.epoch:
            raise ValueError(f"worker epoch {epoch} is not larger than the last one, {self._desk.epoch}")
        self._desk.epoch = epoch
        self._facts, self._max_context = facts, max_context
        self._home.worker_up(
            KVManager(facts.blocks, facts.block_tokens, self._key, prefix_cache=self._settings.prefix_cache),
            facts.fingerprint,
            facts.token_s,
        )
        for request in list(self._waiting):
            self._fit(request)
            refusal = hopeless(request, facts, max_context) if not request.output_tokens else None
            if refusal is not None:
                self._finish(now, request, "error", refusal[:2])
            elif reason := request.natural_end():
                self._finish(now, request, reason)

    def worker_down(self, now: float) -> None:
        """The worker's pool is gone."""
        if self._home.kv is None:
            return
        self._desk.counters.worker_losses += 1
        suspects = self._steps.worker_down()
        for request in self._home.worker_down(now):
            self._waiting.add(request)
        for request in suspects:
            request.losses += 1
            if request.finish is None and (error := deadly(request)):
                self._finish(now, request, "error", error)

    def next_plan(self, now: float) -> Plan | None:
        """The next step."""
        return self._steps.next_plan(now)

    def result(self, now: float, result: Result) -> None:
        """Outcome of a plan."""
        self._steps.result(now, result)

    def transferred(self, now: float, transferred: Transferred) -> None:
        """Outcome of copies."""
        ours = transferred.epoch == self._desk.epoch and self._home.kv is not None
        if not ours or not (
            self._home.loader.transferred(now, transferred) or self._home.saver.transferred(now, transferred)
        ):
            self._desk.counters.stale_results += 1

    # --- store --------------------------------------------------------------------------------------------------

    def open_engine(self) -> OpenEngine | None:
        """What a store that came up is told."""
        if self._facts is None:
            return None
        slots, generations = self._home.saver.held()
        return OpenEngine(slot_bytes=self._facts.block_bytes, held_slots=slots, held_generations=generations)

    def store_up(self, now: float, opened: EngineOpened, incarnation: int) -> None:
        """A store serves us."""
        if self._desk.store is not None:
            self.store_down(now)
        self._desk.store = Store(incarnation, opened.arena, opened.arena_key, opened.epoch)
        same_arena, self._arena_key = self._arena_key == opened.arena_key, opened.arena_key
        self._home.loader.breaker.reset()
        self._clearing.store_up(now, opened.epoch)
        self._home.saver.store_up(now, opened.kept, incarnation, same_arena=same_arena)

    def store_down(self, now: float) -> None:
        """The store is away."""
        self._desk.store = None
        self._home.loader.store_down(now)
        self._home.saver.store_down()

    def found(self, now: float, ticket: int, found: Found | None) -> None:
        """Answer to a Lookup."""
        if found is not None:
            self._clearing.heard(now, found.epoch)
        load = self._home.loader.found(now, ticket, found)
        if load is None:
            return
        if self._home.kv is None or len(self._home.running) >= self._settings.max_running:
            self._home.loader.refuse(load)
        elif self._home.admit_load(now, load.request, load):
            self._waiting.admitted(load.request)

    def staged(self, now: float, staged: Staged) -> None:
        """Blocks of a lease have arrived in the arena."""
        self._home.loader.staged(now, staged)

    def reserved(self, now: float, ticket: int, reserved: Reserved | None) -> None:
        """Answer to a Reserve."""
        self._home.saver.reserved(now, ticket, reserved)

    def committed(self, now: float, ticket: int, committed: Committed | None) -> None:
        """Answer to a Commit."""
        self._home.saver.committed(now, ticket, committed)

    def target(self, asked: ClearCache) -> Target:
        """What a clear means."""
        return target_of(asked, self._key, self._facts)

    def clear(self, now: float, target: Target) -> int:
        """Forgets cached blocks -> how many."""
        return self._clearing.clear(now, target)

    def cleared(self, now: float, epoch: int | None) -> None:
        """The store's answer to a clear."""
        self._clearing.cleared(epoch)

    # --- the whole ----------------------------------------------------------------------------------------------

    def statistics(self) -> EngineStatistics:
        """A picture of now, and the counters since the start."""
        home = self._home
        return EngineStatistics(
            waiting=len(self._waiting),
            running=len(home.running),
            loading=home.loader.active,
            leaving=len(home.leaving),
            retained=len(self._ended),
            in_flight=self._steps.in_flight,
            saving=home.saver.active,
            epoch=self._desk.epoch,
            store=self._desk.store is not None,
            breaker=home.loader.breaker.statistics(),
            load_block_s=home.loader.block_s,
            kv=home.kv.statistics() if home.kv else None,
            counters=self._desk.counters.as_dict(),
        )

    @property
    def idle(self) -> bool:
        """Nobody waits, runs, or has blocks in a step that is out."""
        return not (len(self._waiting) or self._home.running or self._home.leaving)

    def check_integrity(self) -> None:
        """Checks queues, pool and copies against each other; raises with the numbers. For idle times and tests."""
        live = {request.key for request in self._requests.values() if request.finish is None}
        waiting = {request.key for request in self._waiting}
        running = set(self._home.running)
        owned = Counter(request.accept.principal for request in self._requests.values() if request.finish is None)
        if owned != self._shares.live:
            raise RuntimeError(f"live requests of {owned}, counted are {self._shares.live}")
        if waiting & running or waiting | running != live or len(waiting) != len(self._waiting):
            raise RuntimeError(f"live {sorted(live)}, but waiting {sorted(waiting)} and running {sorted(running)}")
        self._home.check_integrity()

    # --- inside -------------------------------------------------------------------------------------------------

    def _refusal(self, request: Request, submit: Submit, known: Request | None) -> Refusal | None:
        if known is not None:
            return "conflict", "this id belongs to another request; choose a new id or send that one unchanged", {}
        refusal = malformed(request, submit.deadline_s)
        if refusal is None and self._facts is not None:
            refusal = hopeless(request, self._facts, self._max_context)
        if refusal is None:
            refusal = self._shares.refusal(submit.principal)
        if refusal is None and len(self._waiting) >= (most := self._settings.max_waiting):
            numbers: dict[str, float] = {"waiting": len(self._waiting), "max_waiting": most}
            return "overloaded", f"{len(self._waiting):,} requests wait, at most {most:,} may; try later", numbers
        return refusal

    def _register(self, request: Request) -> None:
        self._requests[request.id] = self._by_key[request.key] = request
        if request.finish is None:
            self._shares.begin(request.accept.principal)
            if request.accept.deadline:
                self._desk.timers.set(("deadline", request.key), request.accept.deadline)
            self._fit(request)

    def _fit(self, request: Request) -> None:
        """Names its blocks and limits its length by what the present worker is."""
        if self._facts is not None:
            root = root_of(self._key, self._facts.fingerprint, salt=request.accept.salt)
            if root != request.root:
                request.root, request.names = root, []
            request.limit = token_limit(request, self._facts, self._max_context)

    def _finish(
        self,
        now: float,
        request: Request,
        reason: FinishReason,
        error: tuple[str, str] | None = None,
        at: int | None = None,
    ) -> None:
        """Ends a live request, wherever it is; `at` cuts its output first."""
        if request.key in self._home.running:
            self._home.leave(now, request)
        else:
            self._home.loader.drop(now, request)
            self._waiting.remove(request)
        if at is not None:
            request.cut(at)
        finish = request.end(now, reason, error)
        self._shares.end(request.accept.principal)
        outgrown = reason == "length" and self._outgrown(request)
        request.trim()
        self._desk.timers.cancel(("deadline", request.key))
        self._desk.counters.finished[reason] += 1
        self._desk.counters.outgrown += outgrown
        self._desk.journal(Ended(request.key, now, finish))
        self._desk.effects.append(Advanced(request.id))
        self._retain(request)

    def _retain(self, request: Request) -> None:
        """Keeps an ended request for its time; with too many of them, those that ended first are forgotten."""
        self._ended[request.key] = request
        self._desk.timers.set(("forget", request.key), request.ended_at + self._settings.result_ttl_s)
        while len(self._ended) > self._settings.max_retained:
            self._forget(next(iter(self._ended)))

    def _forget(self, key: int) -> None:
        request = self._ended.pop(key)
        del self._by_key[key], self._requests[request.id]
        self._desk.timers.cancel(("forget", key))
        self._desk.effects.append(Forgotten(request.id, key))

    def _outgrown(self, request: Request) -> bool:
        wanted = request.prompt_tokens + request.accept.max_tokens
        return len(request.tokens) < min(wanted, self._max_context)
