"""Everything that may come over a socket and is not what should: bytes, lies, repetitions, floods.

The same kit is turned against each real service, from outside its mailbox and from behind the links that it dials.
All draws are seeded, so that a failure comes again.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import trio
import zmq
from msgspec import inspect
from msgspec.structs import fields, replace

from shared.messages import MAX_FRAME, MESSAGES, BadMessage, Head, Message, decode, encode
from shared.messages.hello import Bye, Hello, Welcome
from shared.messages.store import Clear
from shared.paths import Places
from shared.sockets import Socket

INTS = (0, 1, -1, 2, 7, 255, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
FLOATS = (0.0, -1.0, 1e-9, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "x", "\0", "/nowhere/../at all", "ab" * 16, "é" * 300, "x" * 70_000, "%s%n", "\ud7ff\U0001f600")
BLOBS = (b"", b"\0", b"1234567", b"\xff" * 4, bytes(32), b"\xff" * 32, bytes(64), b"\x01\0\0\0" * 9, b"\xff" * 4097)
WORDS_OF_ADMINS = (Clear,)
"""What an admin, or whoever may say it, says in earnest: not tried, since it would be done."""


def drawn(kind: Any, rng: random.Random, depth: int = 0) -> Any:
    """A value of a type, as `msgspec.inspect` describes it, that decodes and means nothing good."""
    match kind:
        case inspect.IntType():
            return rng.choice(INTS)
        case inspect.FloatType():
            return rng.choice(FLOATS)
        case inspect.StrType():
            return rng.choice(TEXTS)
        case inspect.BytesType():
            return rng.choice(BLOBS)
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.NoneType():
            return None
        case inspect.LiteralType(values=values):
            return rng.choice(values)
        case inspect.UnionType(types=types):
            return drawn(rng.choice(types), rng, depth)
        case inspect.VarTupleType(item_type=item):
            return tuple(drawn(item, rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 9 if depth < 2 else 1))))
        case inspect.TupleType(item_types=items):
            return tuple(drawn(item, rng, depth + 1) for item in items)
        case inspect.DictType(key_type=key, value_type=value):
            return {drawn(key, rng, depth + 1): drawn(value, rng, depth + 1) for _ in range(rng.randrange(3))}
        case inspect.StructType(cls=cls):
            return extreme(cls, rng, depth + 1)
        case inspect.AnyType():
            return rng.choice((None, 1, "x", [[]], {"a": {}}))
    raise AssertionError(f"the kit knows no {kind}")


def extreme(cls: type[Any], rng: random.Random, depth: int = 0) -> Any:
    """A struct with all fields drawn."""
    described = inspect.type_info(cls)
    assert isinstance(described, inspect.StructType)
    return cls(**{field.name: drawn(field.type, rng, depth) for field in described.fields})


def extremes(rng: random.Random, each: int) -> Iterator[Message]:
    """`each` messages of every kind; those of the contract itself come in `lies`."""
    for kind in MESSAGES:
        if kind not in (Hello, Welcome, Bye, *WORDS_OF_ADMINS):
            for _ in range(each):
                yield extreme(kind, rng)


def mutants(message: Message, rng: random.Random, each: int) -> Iterator[Message]:
    """A real message with one field at a time drawn anew, so that the others lead far in."""
    described = inspect.type_info(type(message))
    assert isinstance(described, inspect.StructType)
    for field in described.fields:
        for _ in range(each):
            yield replace(message, **{field.name: drawn(field.type, rng)})
        value = getattr(message, field.name)
        inner = value[0] if isinstance(value, tuple) and value else value
        if isinstance(inner, msgspec.Struct):
            for part in fields(inner):
                described_part = next(one for one in _parts(inner) if one.name == part.name)
                changed = replace(inner, **{part.name: drawn(described_part.type, rng)})
                yield replace(message, **{field.name: (changed, *value[1:]) if isinstance(value, tuple) else changed})


def _parts(struct: msgspec.Struct) -> tuple[inspect.Field, ...]:
    described = inspect.type_info(type(struct))
    assert isinstance(described, inspect.StructType)
    return described.fields


def noise(rng: random.Random, real: Sequence[list[bytes]], count: int) -> Iterator[list[bytes]]:
    """Frames that are no envelope, or nearly one: random bytes, cuts, flips, wrong counts, lengths, nesting."""
    head = encode(Head(1, 1), Bye())[0]
    yield []
    yield [b""]
    yield [b"", b""]
    for lying in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"):
        yield [head, lying + b"\xff\xff\xff\xff"]
        yield [lying + b"\xff\xff\xff\xff", head]
        yield [head, b"\x82\xa4type\xa8Generate\xa8messages" + lying + b"\x7f\xff\xff\xff" + b"\x80" * 100]
    for nested in (b"\x91", b"\x81\xa1a", b"\x81\x91"):
        yield [head, nested * 100_000]
        yield [head, b"\x82\xa4type\xa8Snapshot\xa4data\x81\xa1a" + nested * 100_000]
        yield [nested * 100_000, head]
    for _ in range(count):
        yield [rng.randbytes(rng.randrange(1 << rng.randrange(12))) for _ in range(rng.randrange(1, 5))]
        frames = list(rng.choice(real))
        which = rng.randrange(len(frames))
        frame = bytearray(frames[which])
        match rng.randrange(4):
            case 0:
                del frame[rng.randrange(len(frame)) :]
            case 1:
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            case 2:
                frame += rng.randbytes(rng.randrange(1, 9))
            case _:
                frames *= 2
        frames[which] = bytes(frame)
        yield frames


def lies(role: str, engine: str, incarnation: int, pid: int, foreign_pid: int) -> Iterator[tuple[str, Hello]]:
    """Hellos that must be refused, with what is wrong: `role` is the mailbox's own partner, alive in process `pid`."""
    true = Hello(role=role, engine=engine, incarnation=incarnation, pid=pid)
    yield "another process", replace(true, pid=foreign_pid)
    yield "another process, newer", replace(true, pid=foreign_pid, incarnation=incarnation + 7)
    yield "older incarnation", replace(true, incarnation=incarnation - 1)
    yield "no process", replace(true, pid=0)
    yield "no process, negative", replace(true, pid=-1)
    yield "no process, huge", replace(true, pid=1 << 40)
    yield "incarnation out of range", replace(true, incarnation=-5)
    yield "incarnation beyond range", replace(true, incarnation=(1 << 64) - 1)
    yield "no engine", replace(true, engine="")
    yield "long engine", replace(true, engine="x" * 100_000)
    yield "unprintable engine", replace(true, engine="e0\n")
    if role == "worker":
        yield "another engine", replace(true, engine="e9")
    yield "another protocol", replace(true, protocol=999)
    yield "no such role", replace(true, role="x" * 1000)
    yield "a mailbox of its own kind", replace(true, role="gateway" if role != "client" else "worker")


class Stranger:
    """A raw DEALER at somebody's mailbox. What comes back is read and thrown away, or looked at with `heard`."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", places: Places, target: str, identity: bytes) -> None:
        self.socket = Socket(context, zmq.DEALER, max_frame=MAX_FRAME)
        self.socket.raw.setsockopt(zmq.ROUTING_ID, identity)
        self.socket.raw.connect(places.endpoint(target))

    async def send(self, frames: list[bytes]) -> None:
        """Waits for room, reading what has come."""
        while True:
            try:
                self.socket.send_nowait(frames or [b""])
                return
            except zmq.Again:
                self.drain()
                await trio.lowlevel.checkpoint()

    def drain(self) -> None:
        """Throws away what has come."""
        try:
            while True:
                self.socket.raw.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return

    async def heard(self) -> Message:
        """The next message that comes."""
        while True:
            for frames in await self.socket.recv_many(1):
                return decode(frames)[1]

    async def hello(self, hello: Hello) -> Message:
        """Says hello -> Welcome or Refused, or whatever comes first."""
        await self.send(encode(Head(), hello))
        with trio.fail_after(10):
            return await self.heard()

    def close(self) -> None:
        """Hangs up without a word."""
        self.socket.close()


class EvilMailbox:
    """A ROUTER where a service's mailbox should be: welcomes whoever dials, then says what the kit says."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        places: Places,
        welcome: Welcome,
        rng: random.Random,
        liar: Callable[[Message], Message | None] = lambda asked: None,
        at: str = "",
    ) -> None:
        role = welcome.role
        self.welcome = welcome
        self._rng = rng
        self._liar = liar
        self.received: deque[tuple[bytes, Head, Message]] = deque(maxlen=1000)
        self.callers: dict[bytes, int] = {}
        """Routing id -> incarnation of those who said hello."""
        self._socket = Socket(context, zmq.ROUTER, max_frame=MAX_FRAME)
        self._socket.raw.bind(places.endpoint(at or role))
        self._changed = trio.Event()

    async def run(self) -> None:
        """Until it is closed."""
        with suppress(trio.ClosedResourceError):
            while True:
                for identity, *frames in await self._socket.recv_many():
                    await self._one(identity, frames)

    async def _one(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            head, message = decode(frames)
        except BadMessage:
            return
        if isinstance(message, Hello):
            self.callers[identity] = message.incarnation
            self._socket.send_nowait([identity, *encode(Head(message.incarnation), self.welcome)])
        else:
            self.received.append((identity, head, message))
            await self._answer(identity, head, message)
        self._changed.set()
        self._changed = trio.Event()

    async def _answer(self, identity: bytes, head: Head, asked: Message) -> None:
        """Answers most questions with a message of the right kind and one wrong field."""
        if head.rid and self._rng.random() < 0.7 and (answer := self._liar(asked)) is not None:
            await self.send(identity, encode(Head(self.callers.get(identity, 0), 0, head.rid), answer))

    async def caller(self) -> bytes:
        """The routing id of the newest caller, as soon as there is one."""
        with trio.fail_after(10):
            while not self.callers:
                await self._changed.wait()
        return next(reversed(self.callers))

    async def wait_callers(self, count: int) -> None:
        """Returns once so many have said hello."""
        with trio.fail_after(10):
            while len(self.callers) < count:
                await self._changed.wait()

    async def send(self, identity: bytes, frames: list[bytes]) -> bool:
        """False when the caller has hung up."""
        while True:
            try:
                self._socket.send_nowait([identity, *frames])
                return True
            except zmq.Again:
                await trio.lowlevel.checkpoint()
            except zmq.ZMQError:
                self.callers.pop(identity, None)
                return False

    async def say(self, message: Message, rng: random.Random, *, rid: int = 0) -> None:
        """To one of the callers, as a push or as the answer to something that it asked."""
        await self.caller()
        identity = rng.choice(list(self.callers))
        rids = [head.rid for who, head, _ in list(self.received)[-50:] if head.rid and who == identity]
        re = rng.choice((0, 0, *rids[-3:]))
        await self.send(identity, encode(Head(self.callers[identity], rid, re), message))

    def close(self) -> None:
        """Leaves the endpoint to the real one."""
        self._socket.close()
