"""Plans as a file, so that a benchmark can replay the very steps that a worker executed. Off unless configured."""

from collections.abc import Iterator
from pathlib import Path

from shared.messages import Head, decode, encode
from shared.messages.engine import Plan


class Recorder:
    """Appends plans: a length (u32), then the message as it came over the socket."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, plan: Plan) -> None:
        """One plan, in one write."""
        _, body = encode(Head(), plan)
        with self._path.open("ab", buffering=0) as file:
            file.write(len(body).to_bytes(4, "little") + body)


def recorded(path: Path) -> Iterator[Plan]:
    """The plans of a file, in order; a torn last one is left out."""
    data = path.read_bytes()
    at = 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        body = data[at + 4 : at + 4 + size]
        if len(body) < size:
            return
        _, message = decode([encode(Head(), Plan(epoch=0, seq=0, rows=()))[0], body])
        if isinstance(message, Plan):
            yield message
        at += 4 + size
