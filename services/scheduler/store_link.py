"""The store's side of the shell: opened once an incarnation, asked, told, listened to.

Answers and pushes reach the engine in the order in which the store sent them (a Staged may follow its Found at
once), which is why questions are calls with a ticket and not tasks. The engine keeps the deadlines.
"""

from functools import partial
from typing import TYPE_CHECKING

import trio

from services.scheduler.events import Ask
from services.scheduler.outbox import Outbox
from services.scheduler.wellformed import found_fault, reserved_fault, staged_fault
from shared.messages import Message
from shared.messages.base import IDENTITY_BYTES
from shared.messages.hello import Failed
from shared.messages.store import (
    Abandon,
    Clear,
    Cleared,
    Commit,
    Committed,
    EngineOpened,
    Found,
    Lookup,
    Release,
    Reserve,
    Reserved,
    Staged,
    Taken,
)
from shared.peers import DeadlinePassed, Peer, PeerGone, PeerSlow, ProtocolViolation, RequestFailed

if TYPE_CHECKING:
    from services.scheduler.actor import Scheduler

OPEN_S = 10.0
RETRY_S = 0.2
CLEAR_S = 60.0


class StoreLink:
    """Knows the present store, and whether this engine is opened there."""

    def __init__(self, shell: "Scheduler") -> None:
        self._shell = shell
        self._link = shell.dial("store")
        self._opening: Peer | None = None
        self._slot_bytes = 0
        """Of the slots that the store gives us."""
        self._block_bytes = 0
        """Of the present worker's blocks."""
        self.outbox = Outbox()

    @property
    def opened(self) -> bool:
        """Whether the store serves us."""
        return self.outbox.peer is not None

    # --- coming and going

    def came(self, peer: Peer) -> None:
        """An incarnation of the store is there."""
        self._shell.nursery.start_soon(self._open, peer)

    def gone(self) -> None:
        """The connection is over; what was asked will not be answered."""
        self._opening = None
        self._close()

    def worker_up(self, slot_bytes: int) -> None:
        """The size of our slots is known, or has changed."""
        self._block_bytes = slot_bytes
        if self.opened and slot_bytes == self._slot_bytes:
            return
        self._close()
        if self._link.peer is not None:
            self._shell.nursery.start_soon(self._open, self._link.peer)

    def _close(self) -> None:
        if self.opened:
            self.outbox.connect(None)
            self._shell.post(lambda now: self._shell.core.store_down(now))

    async def _open(self, peer: Peer) -> None:
        if self._opening is peer:
            return
        self._opening = peer
        while peer.alive and self._opening is peer:
            message = self._shell.core.open_engine()
            if message is None:
                break  # again when there has been a worker
            try:
                opened = await peer.ask(message, EngineOpened, deadline_s=OPEN_S)
            except PeerGone:
                break
            except (PeerSlow, DeadlinePassed, RequestFailed, ProtocolViolation) as error:
                self._shell.dropped("store_not_opened", str(error))
                await trio.sleep(RETRY_S)
                continue
            if message.slot_bytes != self._block_bytes:
                continue  # another worker came meanwhile, whose blocks would run over these slots
            if peer.alive and self._opening is peer:
                self._stands(peer, opened, message.slot_bytes)
        if self._opening is peer:
            self._opening = None

    def _stands(self, peer: Peer, opened: EngineOpened, slot_bytes: int) -> None:
        self._opening = None
        self._slot_bytes = slot_bytes
        self.outbox.connect(peer)
        self._shell.post(lambda now: self._shell.core.store_up(now, opened, peer.incarnation))
        self._shell.log.info("store_opened", peer=peer.name, arena=opened.arena, epoch=opened.epoch)

    # --- asking and telling

    def ask(self, ask: Ask) -> None:
        """A question of the engine; it hears at once when it can't be sent."""
        peer = self.outbox.peer
        try:
            if peer is None:
                raise PeerGone("the store is away")
            peer.call(ask.message, partial(self._answered, ask), deadline_s=ask.deadline_s)
        except (PeerGone, PeerSlow):
            self._answered(ask, None)

    def _answered(self, ask: Ask, reply: Message | None) -> None:
        engine, ticket = self._shell.core, ask.ticket
        reply = self._checked(ask.message, reply)
        match ask.message:
            case Lookup():
                found = reply if isinstance(reply, Found) else None
                self._shell.post(lambda now: engine.found(now, ticket, found))
            case Reserve():
                reserved = reply if isinstance(reply, Reserved) else None
                self._shell.post(lambda now: engine.reserved(now, ticket, reserved))
            case Commit():
                committed = reply if isinstance(reply, Committed) else None
                self._shell.post(lambda now: engine.committed(now, ticket, committed))

    def _checked(self, asked: Lookup | Reserve | Commit, reply: Message | None) -> Message | None:
        match reply:
            case None:
                return None
            case Found():
                blocks = len(asked.identities) // IDENTITY_BYTES if isinstance(asked, Lookup) else 0
                fault = found_fault(reply, blocks)
            case Reserved():
                fault = reserved_fault(reply)
            case Failed():
                self._shell.dropped("store_failed", f"{type(asked).__name__}: {reply.reason}")
                return None
            case _:
                fault = ""
        if fault:
            self._shell.dropped("malformed", f"{type(reply).__name__}: {fault}")
            return None
        return reply

    def staged(self, peer: Peer, message: Staged) -> None:
        """Blocks of a lease have arrived in the arena."""
        fault = staged_fault(message) if peer is self.outbox.peer else "from a store that is not opened"
        if fault:
            self._shell.dropped("malformed", f"Staged: {fault}")
            return
        self._shell.post(lambda now: self._shell.core.staged(now, message))

    def tell(self, message: Abandon | Taken | Release) -> None:
        """Something that needs no answer; dropped when the store is away."""
        self.outbox.send(message)

    async def clear(self, message: Clear) -> Cleared | str:
        """Clears host and disk tier, also while no worker has told the size of our slots; or why it was not done."""
        peer = self._link.peer
        if peer is None:
            return "the store is away"
        try:
            return await peer.ask(message, Cleared, deadline_s=CLEAR_S)
        except (PeerGone, PeerSlow, DeadlinePassed, RequestFailed, ProtocolViolation) as error:
            self._shell.dropped("store_not_cleared", str(error))
            return error.reason if isinstance(error, RequestFailed) else str(error)
