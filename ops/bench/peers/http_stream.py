"""Streams over HTTP as cheaply as can be: the client must not take from the engine the core that it measures.

Pieces of output are counted by a marker in the bytes of the event stream; nothing is parsed. Standard library only.
"""

import json
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ops.bench.peers.interface import Timeline
from ops.bench.peers.processes import Group

HOST = "127.0.0.1"
_PIECE = 1 << 16
AGAIN_S = 0.2
"""Between two questions whether a server is healthy."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def posted(port: int, path: str, body: Mapping[str, Any]) -> Any:
    """One whole answer, parsed; RuntimeError for anything but 200."""
    stream = _Stream(port, path, body, b"")
    with stream.socket:
        stream.send()
        while stream.read(0.0):
            pass
    head, _, rest = bytes(stream.kept).partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"{path}: {bytes(stream.kept)[:300]!r}")
    if b"chunked" in head.lower():
        rest = _joined(rest)
    return json.loads(rest)


def alive(port: int, path: str) -> bool:
    """Whether GET `path` is answered with 200."""
    try:
        with socket.create_connection((HOST, port), 5.0) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
            return connection.recv(_PIECE).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def wait_serving(group: Group, port: int, patience_s: float) -> None:
    """Returns once a server is healthy; RuntimeError, and nothing left running, when it ends or takes too long."""
    until = time.monotonic() + patience_s
    while not alive(port, "/health"):
        if group.ended_within(AGAIN_S) or time.monotonic() > until:
            group.stop()
            raise RuntimeError(f"the server does not serve:\n{group.tail()}")


def streamed(port: int, path: str, bodies: Sequence[Mapping[str, Any]], marker: bytes, tokens: int) -> list[Timeline]:
    """All requests at once; the connections are open before the clock starts. `marker`: once in each piece."""
    streams = [_Stream(port, path, body, marker) for body in bodies]
    begun = time.perf_counter()
    with selectors.DefaultSelector() as ready:
        for stream in streams:
            stream.send()
            ready.register(stream.socket, selectors.EVENT_READ, stream)
        while ready.get_map():
            for key, _ in ready.select():
                if not key.data.read(time.perf_counter() - begun):
                    ready.unregister(key.fileobj)
                    key.data.socket.close()
    for stream in streams:
        if not stream.kept.startswith(b"HTTP/1.1 200") or not stream.arrivals:
            raise RuntimeError(f"{path}: {bytes(stream.kept)[:300]!r}")
    return [Timeline(tuple(stream.arrivals), tokens) for stream in streams]


class _Stream:
    """One request. `kept`: the first bytes of the answer, all of it when there is no marker."""

    def __init__(self, port: int, path: str, body: Mapping[str, Any], marker: bytes) -> None:
        self.socket = socket.create_connection((HOST, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.arrivals: list[float] = []
        self.kept = bytearray()
        self._marker = marker
        self._tail = b""
        text = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode() + text

    def send(self) -> None:
        """The whole request."""
        self.socket.sendall(self._request)

    def read(self, now: float) -> bool:
        """Takes in what has come; False at the end."""
        piece = self.socket.recv(_PIECE)
        if not self._marker or len(self.kept) < 1024:
            self.kept += piece
        if self._marker:
            seen = self._tail + piece
            self.arrivals += [now] * seen.count(self._marker)
            self._tail = seen[-(len(self._marker) - 1) :]  # too short to hold one that has been counted
        return bool(piece)


def _joined(chunked: bytes) -> bytes:
    """A chunked body without the sizes between."""
    parts = []
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        count = int(size.split(b";")[0] or b"0", 16)
        parts.append(rest[:count])
        chunked = rest[count + 2 :] if count else b""
    return b"".join(parts)
