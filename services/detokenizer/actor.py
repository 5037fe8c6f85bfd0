"""The detokenizer's shell: sockets, time and the model's vocabulary around the pure `Requests`."""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, ClassVar

import trio

from services.detokenizer.requests import PARK_S, Answer, Complain, Effect, Requests, ToClient, ToScheduler
from services.detokenizer.text import TokenBytes
from services.detokenizer.vocabulary import token_bytes_of
from shared.actor import Actor, on
from shared.config import Config
from shared.messages import Head, Message
from shared.messages.engine import Forget, Progress, Synced
from shared.messages.front import Attach, Credit
from shared.model.spec import open_model
from shared.paths import Places
from shared.peers import Peer, PeerGone, PeerSlow

TICK_S = 0.25
CLIENTS = frozenset({"client", "gateway"})
SCHEDULER = frozenset({"scheduler"})


class Detokenizer(Actor):
    """Turns Progress into Chunks. Persists nothing: the scheduler replays after any restart of either."""

    role_name: ClassVar[str] = "detokenizer"
    accepts: ClassVar[frozenset[str]] = CLIENTS

    def __init__(self, places: Places, config: Config, *, incarnation: int, park_s: float = PARK_S) -> None:
        super().__init__(places, config, incarnation=incarnation)
        self._token_bytes: TokenBytes
        grace_s = config.scheduler.grace_s
        self.requests = Requests(lambda token: self._token_bytes(token), grace_s=grace_s, park_s=park_s)
        self._scheduler = self.dial("scheduler")
        self._for_scheduler: deque[Message] = deque()

    async def start(self) -> None:
        """Reads the vocabulary."""
        models = self.places.models(self.config.model.dir)
        source = await trio.to_thread.run_sync(open_model, self.config.model.source, models)
        tokenizer = await trio.to_thread.run_sync(source.tokenizer)
        self._token_bytes = token_bytes_of(tokenizer)
        self.nursery.start_soon(self._tick)

    def snapshot(self) -> dict[str, Any]:
        """Counts of `requests.Statistics`."""
        return asdict(self.requests.statistics())

    async def _tick(self) -> None:
        while True:
            await trio.sleep(TICK_S)
            self._do(self.requests.tick(time.monotonic()))

    def peer_up(self, peer: Peer) -> None:
        """A scheduler's replay begins; clients say what they want by Attach."""
        if peer.role == "scheduler":
            self._for_scheduler.clear()
            self._do(self.requests.scheduler_up())

    def peer_down(self, peer: Peer, exit_proven: bool) -> None:
        """A client's attachments end with its connection."""
        if peer.role == "scheduler":
            self.requests.scheduler_down()
        else:
            self.requests.gone(peer, time.monotonic())

    @on(Progress, roles=SCHEDULER)
    def _progress(self, peer: Peer, message: Progress) -> None:
        self.faults.at("detokenizer_in_progress")
        self._do(self.requests.progress(message, time.monotonic()))

    @on(Forget, roles=SCHEDULER)
    def _forget(self, peer: Peer, message: Forget) -> None:
        self.requests.forget(message, time.monotonic())

    @on(Synced, roles=SCHEDULER)
    def _synced(self, peer: Peer, message: Synced) -> None:
        self._do(self.requests.synced(time.monotonic()))

    @on(Attach, roles=CLIENTS)
    def _attach(self, peer: Peer, message: Attach, head: Head) -> None:
        self._do(self.requests.attach(peer, peer.principal, message, head, time.monotonic()))

    @on(Credit, roles=CLIENTS)
    def _credit(self, peer: Peer, message: Credit) -> None:
        self._do(self.requests.credit(peer, message))

    def _do(self, effects: Iterable[Effect]) -> None:
        """Carries effects out, in order. A chunk that finds no room, and those after it, are made again later."""
        full: set[tuple[Peer, str]] = set()
        for effect in effects:
            match effect:
                case ToClient(client=Peer() as peer, message=message):
                    if (peer, message.id) not in full:
                        try:
                            peer.send(message)
                            continue
                        except PeerGone:
                            continue  # peer_down ends its attachments
                        except PeerSlow:
                            full.add((peer, message.id))
                    self.requests.unsent(peer, message)
                case Answer(client=Peer() as peer, ticket=Head() as head, message=answer):
                    self.answer(peer, head, answer)
                case ToScheduler(message=message):
                    self._for_scheduler.append(message)
                case Complain(reason=reason):
                    self.dropped("violation", reason)
                case _:
                    raise TypeError(f"no such effect: {effect!r}")
        self._flush_to_scheduler()

    def _flush_to_scheduler(self) -> None:
        """Sends what waits; what is meant for a scheduler that has gone is derived again from the next replay."""
        peer = self._scheduler.peer
        while peer is not None and self._for_scheduler:
            try:
                peer.send(self._for_scheduler[0])
            except PeerSlow:
                return
            except PeerGone:
                self._for_scheduler.clear()
                return
            self._for_scheduler.popleft()
