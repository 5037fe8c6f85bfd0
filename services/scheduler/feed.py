"""What the connected detokenizer has been sent, and what it still lacks; pure.

Nothing is queued for it: per request there is the number of tokens sent on this connection, and a mark that there is
more. A message is made from the engine's tokens only when there is credit, so a detokenizer that is stopped, slow or
away costs memory for marks, never for tokens (I05), and many steps become one message.

    connect ──► every retained request, from 0 ──► Synced ──► what advances
"""

from collections.abc import Callable, Iterable

from shared.messages import Message
from shared.messages.base import unpack_u32
from shared.messages.engine import Forget, Progress, Synced

Source = Callable[[str, int], Progress | None]
"""`Events.progress`: (id, first token) -> what to send."""


class Feed:
    """The state of one connection after another; `send` may raise to say that nothing more fits now."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._sent: dict[str, int] = {}
        self._due: dict[str, None] = {}
        """Ids with news, oldest first; the empty id stands for Synced."""
        self._forget: dict[str, None] = {}
        self.connected = False
        self.credit = 0

    @property
    def synced(self) -> bool:
        """Whether this connection has been told everything once."""
        return self.connected and "" not in self._due

    @property
    def due(self) -> int:
        """Messages that wait for credit or room."""
        return len(self._due) + len(self._forget)

    def connect(self, retained: Iterable[str]) -> None:
        """A new connection, to which nothing is known."""
        self.disconnect()
        self.connected = True
        self._due = dict.fromkeys([*retained, ""])

    def disconnect(self) -> None:
        """It is gone, and what it knew with it."""
        self.connected = False
        self.credit = 0
        self._sent.clear()
        self._due.clear()
        self._forget.clear()

    def give(self, credit: int) -> None:
        """So many more Progress messages may be on their way."""
        self.credit += max(0, credit)

    def advanced(self, id: str) -> None:
        """There is something new about a request."""
        if self.connected:
            self._due.setdefault(id)

    def forgotten(self, id: str) -> None:
        """Its retention is over; a detokenizer that heard of it is told."""
        self._due.pop(id, None)
        if self._sent.pop(id, None) is not None:
            self._forget[id] = None

    def flush(self, send: Callable[[Message], None]) -> None:
        """Sends what there is credit for, oldest first. An exception of `send` leaves its message to the next flush."""
        for id in list(self._forget):
            send(Forget(id=id))
            del self._forget[id]
        while self._due:
            id = next(iter(self._due))
            if not id:
                send(Synced())
            elif not self.credit:
                return
            else:
                progress = self._source(id, self._sent.get(id, 0))
                if progress is not None:
                    send(progress)
                    self.credit -= 1
                    self._sent[id] = progress.start + len(unpack_u32(progress.ids))
            del self._due[id]
