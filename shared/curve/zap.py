"""The judge of CURVE handshakes (RFC 27/ZAP): a client key that is on the list comes in, nothing else does.

libzmq asks over inproc and holds the connection until it is answered. Of our own, because pyzmq's authenticator is a
thread beside the loop and allows any client key unless told otherwise.
"""

from collections.abc import Callable

import zmq
from zmq.utils import z85

from shared.curve.allowed import KEY_REFUSED, Allowed, key_id
from shared.sockets import Socket

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"perdure"
MAX_FRAME = 4096
VERSION = b"1.0"


class Judge:
    """Answers every question of this context's sockets. The User-Id of a connection let in is its public key."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        allowed: Allowed,
        dropped: Callable[[str, str], object],
    ) -> None:
        self._allowed = allowed
        self._dropped = dropped
        self._socket = Socket(context, zmq.ROUTER, max_frame=MAX_FRAME)

    def bind(self) -> None:
        """Before any socket that asks: without a judge libzmq would have nobody to ask."""
        self._socket.raw.bind(ENDPOINT)

    async def run(self) -> None:
        """For ever."""
        while True:
            for frames in await self._socket.recv_many():
                answer = self.answer(frames)
                if answer:
                    try:
                        self._socket.send_nowait(answer)
                    except zmq.ZMQError as error:  # the connection has ended meanwhile
                        self._dropped("unanswered", f"handshake: {error}")

    def answer(self, frames: list[bytes]) -> list[bytes]:
        """The answer to one question, [] for what is none."""
        if len(frames) < 8 or frames[1] != b"" or frames[2] != VERSION:
            self._dropped("bad_zap", f"{len(frames)} frames")
            return []
        asker, _, _, request, domain, address, _, mechanism, *credentials = frames
        public = ""
        if mechanism != b"CURVE" or domain != DOMAIN or len(credentials) != 1 or len(credentials[0]) != 32:
            reason = f"mechanism {mechanism[:16]!r} is not taken"
        else:
            public = z85.encode(credentials[0]).decode()
            self._allowed.refresh()
            reason = "" if self._allowed.user_of(public) is not None else f"key {key_id(public)} is not on the list"
        if reason:
            self._dropped("refused_key", f"{address[:64].decode(errors='replace')}: {reason}")
            return [asker, b"", VERSION, request, b"400", KEY_REFUSED.encode(), b"", b""]
        return [asker, b"", VERSION, request, b"200", b"OK", public.encode(), b""]

    def close(self) -> None:
        """Ends the judge; `run` ends with it."""
        self._socket.close()
