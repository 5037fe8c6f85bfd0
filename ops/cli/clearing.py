"""Clearing through a running stack: the scheduler if it is there, since the device tier is its, else the store."""

from ops.admin import admin, reach
from shared.messages.front import Encode, Encoded, Generate, Rejected
from shared.messages.store import Clear, ClearCache, Cleared
from shared.paths import Places
from shared.peers import DeadlinePassed, PeerGone, PeerSlow, ProtocolViolation, RequestFailed

REACH_S = 5.0
CLEAR_S = 75.0
"""More than the scheduler waits for the store."""
ENCODE_S = 10.0


class NotCleared(Exception):
    """The text says why; `refused`: what was asked for makes no sense here, and asking again will not help."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


async def encoded(places: Places, request: Generate) -> bytes:
    """Token ids of a request's input, packed u32, as the running tokenizer makes them. NotCleared."""
    failure = ""
    answer: Encoded | Rejected | None = None
    async with admin(places) as node:
        peer = await reach(node, "tokenizer", deadline_s=REACH_S)
        try:
            if peer is not None:
                answer = await peer.ask(Encode(request=request), (Encoded, Rejected), deadline_s=ENCODE_S)
        except (PeerGone, PeerSlow, DeadlinePassed, RequestFailed, ProtocolViolation) as error:
            failure = str(error)
    if isinstance(answer, Encoded):
        return answer.ids
    if isinstance(answer, Rejected):
        raise NotCleared(answer.reason, refused=True)
    raise NotCleared(failure or "the tokenizer is away; try again, or give the prefix as ids")


async def clear_cache(places: Places, asked: ClearCache) -> Cleared:
    """What was dropped, or NotCleared; raised after `admin`, out of which an exception would come in a group."""
    refused, cleared = None, None
    async with admin(places) as node:
        peer = await reach(node, "scheduler", deadline_s=REACH_S)
        message: Clear | ClearCache = asked
        if peer is None and asked.what == "all":
            peer, message = await reach(node, "store", deadline_s=REACH_S), Clear()
        try:
            if peer is not None:
                cleared = await peer.ask(message, Cleared, deadline_s=CLEAR_S)
        except RequestFailed as error:
            refused = NotCleared(error.reason, refused=error.code == "bad_request")
        except (PeerGone, PeerSlow, DeadlinePassed, ProtocolViolation) as error:
            refused = NotCleared(str(error))
    if cleared is not None:
        return cleared
    who = "the store of this home runs but does not answer" if asked.what == "all" else "the scheduler is away"
    raise refused or NotCleared(f"{who}; try again, or stop the stack first and run `perdure cache purge`")


__all__ = ["Cleared", "NotCleared", "clear_cache", "encoded"]
