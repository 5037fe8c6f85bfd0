"""The worker's side of the shell: whose pool it is.

    WorkerReady ──► Quiesce(epoch) ──► Idle(epoch) ──► engine.worker_up      plans and copies flow
        gone, exit proven ─────────────────────────► engine.worker_down
        gone, no proof: nothing is planned; its exit is waited for, or its return (Quiesce again)

An epoch is larger than any before it, also of earlier schedulers: their plans are void for the worker after Quiesce.
"""

from typing import TYPE_CHECKING

import trio

from services.scheduler.outbox import Outbox
from services.scheduler.wellformed import ready_fault, transferred_fault
from shared.messages.base import pack_u64
from shared.messages.engine import Curtail, Idle, KVFacts, Plan, Quiesce, Transfer, Transferred, WorkerReady
from shared.peers import DeadlinePassed, Peer, PeerGone, PeerSlow, ProtocolViolation, RequestFailed, wait_exit

if TYPE_CHECKING:
    from services.scheduler.actor import Scheduler

QUIESCE_S = 30.0
EPOCHS_PER_LIFE = 1 << 20
RETRY_S = 0.1


class WorkerLink:
    """Knows the present worker, and whether its pool is ours."""

    def __init__(self, shell: "Scheduler") -> None:
        self._shell = shell
        self._epoch = shell.incarnation * EPOCHS_PER_LIFE
        self._peer: Peer | None = None
        self._introductions = 0
        self._copies: dict[int, int] = {}
        """Copies of each Transfer that is not answered."""
        self.outbox = Outbox()
        self.facts: KVFacts | None = None
        self.model = ""

    @property
    def ready(self) -> bool:
        """Whether plans may be sent."""
        return self.outbox.peer is not None

    def introduced(self, peer: Peer, ready: WorkerReady) -> None:
        """A worker has loaded its model; its pool becomes ours once it is quiet."""
        fault = ready_fault(ready)
        if fault:
            self._shell.dropped("malformed", f"WorkerReady: {fault}")
            return
        self._forget()
        self._peer = peer
        self._introductions += 1
        self._shell.nursery.start_soon(self._take_over, peer, ready, self._introductions)

    async def _take_over(self, peer: Peer, ready: WorkerReady, number: int) -> None:
        while peer.alive and self._peer is peer and self._introductions == number:
            self._epoch += 1
            epoch = self._epoch
            try:
                idle = await peer.ask(Quiesce(epoch=epoch), Idle, deadline_s=QUIESCE_S)
            except PeerGone:
                return
            except (PeerSlow, DeadlinePassed, RequestFailed, ProtocolViolation) as error:
                self._shell.dropped("no_idle", str(error))
                await trio.sleep(RETRY_S)
                continue
            if idle.epoch == epoch and self._peer is peer and peer.alive and self._introductions == number:
                self._stands(peer, ready, epoch)
                return

    def _stands(self, peer: Peer, ready: WorkerReady, epoch: int) -> None:
        shell, facts = self._shell, ready.kv
        self.outbox.connect(peer)
        self.facts, self.model = facts, ready.model
        shell.post(lambda now: shell.core.worker_up(now, epoch, facts, ready.max_context))
        shell.post(lambda _: shell.store.worker_up(facts.block_bytes))
        shell.log.info(
            "worker_up",
            model=ready.model,
            blocks=facts.blocks,
            block_tokens=facts.block_tokens,
            shortest_shared_prefix=facts.block_tokens,
            epoch=epoch,
        )

    def send(self, message: Plan | Curtail | Transfer) -> None:
        """Steps or copies."""
        if isinstance(message, Transfer) and self.ready:
            self._copies[message.seq] = len(message.copies)
        self.outbox.send(message)

    def checked(self, message: Transferred) -> Transferred:
        """The outcome of copies as the engine may see it: one that can't be read says that none of them held."""
        copies = self._copies.pop(message.seq, len(message.ok))
        fault = transferred_fault(message, copies)
        if not fault:
            return message
        self._shell.dropped("malformed", f"Transferred: {fault}")
        return Transferred(
            epoch=message.epoch, seq=message.seq, checksums=pack_u64([0] * copies), ok=bytes(copies), seconds=0.0
        )

    def gone(self, peer: Peer, exit_proven: bool) -> None:
        """A worker's connection is over."""
        if self._peer is not peer:
            return
        self._forget()
        self._peer = None
        if exit_proven:
            self._lost()
        elif peer.pid != self._shell.pid:
            self._shell.nursery.start_soon(self._await_exit, peer)

    async def _await_exit(self, peer: Peer) -> None:
        await wait_exit(peer.pid)
        if self._peer is None:  # else another one took over, which implies it
            self._lost()

    def _lost(self) -> None:
        shell = self._shell
        shell.post(lambda now: shell.core.worker_down(now))

    def _forget(self) -> None:
        self.outbox.connect(None)
        self._copies.clear()
