"""The tokenizer's shell: Generate -> validate -> encode -> Submit -> Accepted or Rejected.

It keeps nothing: a client that hears nothing sends the same Generate again, and id and digest make it the same
request. When the scheduler dies between Submit and Journaled, the Submit goes to its next incarnation.
"""

import time
from functools import partial
from typing import Any, ClassVar

import trio

from services.tokenizer.encode import Encoder
from services.tokenizer.shares import Shares
from services.tokenizer.submission import submission
from services.tokenizer.validate import MAX_ID, Limits, Refusal, check, digest, is_id, resolve_max_tokens
from shared.actor import Actor, Reject, on
from shared.config import Config
from shared.identity import load_or_create_key, namespace_salt
from shared.messages import Head
from shared.messages.engine import CancelRequest, Journaled, Submit
from shared.messages.front import (
    AWAY_S,
    Accepted,
    Away,
    Cancel,
    Cancelled,
    Encode,
    Encoded,
    Generate,
    Rejected,
    WhoIsAway,
)
from shared.messages.hello import Snapshot, Status
from shared.model.chat import TemplateError
from shared.model.errors import BadModel
from shared.model.spec import open_model
from shared.paths import Places
from shared.peers import DeadlinePassed, Peer, PeerGone, PeerSlow, RequestFailed

MAX_IN_WORK = 4096
"""Requests between Generate and its answer; more are `overloaded`."""
MAX_BYTES_IN_WORK = 256 << 20
INLINE_BYTES = 2048
"""Texts up to this size are encoded on the loop (about a millisecond): a thread costs more. Never a chat, however
small: its template is the model's own program, and may take seconds.
"""
MARGIN_S = 0.1
"""Answers are sent this long before the asker's deadline, so that it learns why instead of nothing."""
ENGINE_ANSWER_S = 1.5
"""A scheduler that does not say how it is within this time counts as away."""
ENGINE_KNOWN_S = 1.0
"""How long its answer is good for all who ask."""
CLIENTS, ADMIN = frozenset({"client", "gateway"}), frozenset({"admin"})


class Tokenizer(Actor):
    """The front door."""

    role_name: ClassVar[str] = "tokenizer"
    accepts: ClassVar[frozenset[str]] = CLIENTS

    def __init__(self, places: Places, config: Config, *, incarnation: int) -> None:
        super().__init__(places, config, incarnation=incarnation)
        self._scheduler = self.dial("scheduler")
        self._threads = trio.CapacityLimiter(2)  # encoders; more would only fight over this machine's cores
        self._key: bytes
        self._encoder: Encoder
        self._limits: Limits
        self._in_work = 0
        self._encoding: dict[tuple[str, str], bool] = {}  # (principal, id) -> whether it was cancelled meanwhile
        self._shares = Shares(config.front.user_requests, MAX_BYTES_IN_WORK // 4)
        self._less_work = trio.Event()
        self._bytes_in_work = 0
        self._engine_away = Away()
        self._engine_asked = -ENGINE_KNOWN_S
        self._asking_engine = trio.Lock()
        self._counts = {"accepted": 0, "rejected": 0}

    async def start(self) -> None:
        """Reads the key, the vocabulary and the chat template."""
        self._key = load_or_create_key(self.places.identity_key)
        models = self.places.models(self.config.model.dir)
        source = await trio.to_thread.run_sync(open_model, self.config.model.source, models)
        spec, wanted = source.spec, self.config.model.max_context
        context = min(wanted, spec.max_context) if wanted else spec.max_context
        self._limits = limits = Limits(vocab=spec.vocab, max_context=context)
        try:
            self._encoder = await trio.to_thread.run_sync(lambda: Encoder(spec, source.tokenizer(), limits))
        except TemplateError as error:
            raise BadModel(f"model {spec.name}: its chat template can't be used: {error}") from error

    def snapshot(self) -> dict[str, Any]:
        """`in_work`, `bytes_in_work` now; `accepted`, `rejected` since the start; model and limits."""
        limits = self._limits if self.ready else None
        return self._counts | {
            "in_work": self._in_work,
            "bytes_in_work": self._bytes_in_work,
            "model": self.config.model.source,
            "max_context": limits.max_context if limits else 0,
            "body_bytes": limits.body_bytes if limits else 0,
        }

    @on(Generate, roles=CLIENTS)
    async def _generate(self, peer: Peer, message: Generate, head: Head) -> Accepted | Rejected:
        until = (head.deadline or time.monotonic() + self.config.supervise.recovery_timeout_s) - MARGIN_S
        size, key = _size(message), (peer.principal, message.id)
        answer: Accepted | Rejected
        try:
            check(message, self._limits)
            self._shares.check(peer.principal, size)
            if self._in_work >= MAX_IN_WORK or self._bytes_in_work + size > MAX_BYTES_IN_WORK:
                numbers: dict[str, float] = {"in_work": self._in_work, "limit": MAX_IN_WORK}
                reason = f"{self._in_work:,} requests ({self._bytes_in_work:,} bytes) are being read already; try again"
                raise Refusal("overloaded", reason, numbers)
            self._in_work += 1
            self._bytes_in_work += size
            self._shares.begin(peer.principal, size)
            try:
                self._encoding[key] = False
                inline = message.messages is None and size <= INLINE_BYTES
                submit = await self._encoded(message, peer.principal, until, inline=inline)
                if self._encoding.pop(key, False):
                    raise Refusal("not_found", "the request was cancelled before it was submitted")
                answer = await self._submitted(submit, until)
            finally:
                self._encoding.pop(key, None)
                self._shares.end(peer.principal, size)
                self._in_work -= 1
                self._bytes_in_work -= size
                self._less_work.set()
                self._less_work = trio.Event()
        except Refusal as refusal:
            answer = refusal.rejected(message.id)
        self._counts["accepted" if isinstance(answer, Accepted) else "rejected"] += 1
        return answer

    @on(Encode, roles=ADMIN)
    async def _encode(self, peer: Peer, message: Encode) -> Encoded | Rejected:
        """For commands that need the names of a prompt's blocks."""
        try:
            check(message.request, self._limits)
            work = partial(self._encoder.encode, message.request)
            return Encoded(ids=await trio.to_thread.run_sync(work, limiter=self._threads))
        except Refusal as refusal:
            return refusal.rejected(message.request.id)

    async def _encoded(self, request: Generate, principal: str, until: float, *, inline: bool) -> Submit:
        def work() -> Submit:
            if time.monotonic() > until:  # it may have waited long for its thread
                reason = "the input waited too long for its turn to be encoded; send the request again"
                raise Refusal("overloaded", reason, {AWAY_S: 0.0})
            ids = self._encoder.encode(request)
            max_tokens = resolve_max_tokens(len(ids) // 4, request.sampling.max_tokens, self._limits)
            salt = namespace_salt(self._key, principal, request.cache_salt)
            return submission(request, digest(request), principal, salt, ids, max_tokens, self._encoder.spec)

        return work() if inline else await trio.to_thread.run_sync(work, limiter=self._threads)

    async def _submitted(self, submit: Submit, until: float) -> Accepted | Rejected:
        """Hands the request to the scheduler, to its next incarnation if it dies meanwhile, until the deadline."""
        self.faults.at("tokenizer_before_submit")
        while True:
            with trio.move_on_at(trio.current_time() + until - time.monotonic()):
                scheduler = await self._scheduler.wait_up()
                try:
                    deadline_s = max(until - time.monotonic(), 0.0)
                    answer: Journaled | Rejected = await scheduler.ask(
                        submit, (Journaled, Rejected), deadline_s=deadline_s
                    )
                except (PeerGone, PeerSlow):  # slow: maybe killed just now, which the link has not noticed yet
                    await trio.sleep(0.02)
                    continue
                except DeadlinePassed:
                    break
                if isinstance(answer, Rejected):
                    return answer
                self.faults.at("tokenizer_after_journaled")
                return Accepted(id=submit.id, prompt_tokens=answer.prompt_tokens)
            break
        away = 0.0 if self._scheduler.peer else time.monotonic() - self._scheduler.down_since
        what = f"is away since {away:.0f} s" if away else "does not answer"
        raise Refusal("overloaded", f"the scheduler {what}; send the request again", {AWAY_S: away})

    @on(Cancel, roles=CLIENTS)
    async def _cancel(self, peer: Peer, message: Cancel, head: Head) -> Cancelled:
        until = (head.deadline or time.monotonic() + self.config.supervise.recovery_timeout_s) - MARGIN_S
        if not is_id(message.id):
            return Cancelled(id=message.id[:MAX_ID], known=False)
        key = (peer.principal, message.id)
        if key in self._encoding:  # its Submit would come after our CancelRequest
            self._encoding[key] = True
        request = CancelRequest(id=message.id, principal=peer.principal)
        with trio.move_on_at(trio.current_time() + until - time.monotonic()):
            while True:
                scheduler = await self._scheduler.wait_up()
                try:
                    return await scheduler.ask(request, Cancelled, deadline_s=max(until - time.monotonic(), 0.0))
                except (PeerGone, PeerSlow):
                    await trio.sleep(0.02)
                except DeadlinePassed:
                    break
        raise Reject("overloaded", "the scheduler is away, or does not answer; send the cancel again")

    @on(WhoIsAway, roles=CLIENTS)
    async def _who_is_away(self, peer: Peer, message: WhoIsAway) -> Away:
        async with self._asking_engine:
            if time.monotonic() - self._engine_asked > ENGINE_KNOWN_S:
                self._engine_away = await self._ask_engine()
                self._engine_asked = time.monotonic()
        return self._engine_away

    async def _ask_engine(self) -> Away:
        """A worker that is away is always starting, for all we know: its supervisor ends what never gets ready."""
        scheduler = self._scheduler.peer
        if scheduler is None:
            return Away(services=("scheduler",), starting="is starting" in self._scheduler.refused)
        try:
            snapshot = await scheduler.ask(Status(), Snapshot, deadline_s=ENGINE_ANSWER_S)
        except (PeerGone, PeerSlow, DeadlinePassed, RequestFailed):
            return Away(services=("scheduler",))
        return Away() if snapshot.data.get("worker_ready", True) else Away(services=("worker",), starting=True)

    async def drain(self) -> None:
        """Lets requests that are being read reach the scheduler; the supervisor's grace bounds it."""
        while self._in_work:
            await self._less_work.wait()


def _size(request: Generate) -> int:
    """About how many bytes of work and memory the input is; also a turn without content is some."""
    turns = sum(64 + len(turn.role) + len(turn.content) for turn in request.messages or ())
    return len(request.prompt or "") + len(request.ids or b"") + turns
