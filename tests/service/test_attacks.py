"""The attack kit against every real service: outside its mailbox, in each role it takes, behind each link it dials.

A whole engine on the toy model runs in this one process, on real sockets, so that an exception in any actor ends the
test. Afterwards, and meanwhile where a test says so, real requests get the model's own tokens.
"""

import gc
import itertools
import os
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import zmq

from ops import waiting
from ops.client import Client, RequestRejected, connected
from services.detokenizer.actor import Detokenizer
from services.scheduler.actor import Scheduler
from services.store.actor import Store
from services.tokenizer.actor import Tokenizer
from services.worker.actor import Worker
from services.worker.sessions import keys_of
from shared.actor import Actor
from shared.config import Config, KVConfig, ModelConfig, StoreConfig
from shared.messages import BadMessage, Head, Message, decode, encode
from shared.messages.engine import (
    CancelRequest,
    Idle,
    Journaled,
    Plan,
    Quiesce,
    Result,
    RowResult,
    Submit,
    Transfer,
    Transferred,
)
from shared.messages.front import Accepted, Attach, Attached, Cancel, Cancelled, Generate, Sampling
from shared.messages.hello import Bye, Hello, Ping, Refused, Snapshot, Status, Welcome
from shared.messages.store import Commit, Committed, EngineOpened, Found, Lookup, OpenEngine, Reserve, Reserved
from shared.model.toy import toy_generate
from shared.paths import Places
from shared.peers import Peer, ProtocolViolation, RequestFailed
from shared.sockets import Socket
from shared.testing import dialled, running
from tests.attack_kit import EvilMailbox, Stranger, extreme, extremes, lies, mutants, noise

CONFIG = Config(
    model=ModelConfig(source="toy:7"),
    kv=KVConfig(pool_bytes=1 << 20),
    store=StoreConfig(host_bytes=4 << 20, disk_bytes=16 << 20),
)
SERVICES: dict[str, type[Actor]] = {
    "store": Store,
    "scheduler": Scheduler,
    "worker": Worker,
    "tokenizer": Tokenizer,
    "detokenizer": Detokenizer,
}
PARTNER = {
    "store": "scheduler",
    "scheduler": "worker",
    "tokenizer": "client",
    "detokenizer": "client",
    "worker": "admin",
}
"""Somebody whom the mailbox takes."""
INIT = 1
"""A process that is none of ours."""
SLACK_BYTES = 96 << 20
FLOOD = 100_000


class Tape:
    """What the services say to each other while it runs: the kit's material, and what is replayed."""

    def __init__(self) -> None:
        self.frames: list[list[bytes]] = []
        self.messages: list[Message] = []

    def note(self, frames: list[bytes]) -> None:
        """One envelope, without its routing id."""
        try:
            _, message = decode(frames[-2:])
        except BadMessage:
            return
        self.frames.append(list(frames[-2:]))
        self.messages.append(message)

    def of_each_kind(self, most: int) -> list[Message]:
        """The first few messages of every kind."""
        kinds: dict[type[Message], list[Message]] = {}
        for message in self.messages:
            kinds.setdefault(type(message), []).append(message)
        return [message for some in kinds.values() for message in some[:most]]


async def running_engine(stack: AsyncExitStack, places: Places, *but: str) -> dict[str, Actor]:
    """Starts all services but some."""
    actors: dict[str, Actor] = {}
    for role, kind in SERVICES.items():
        if role not in but:
            actors[role] = await stack.enter_async_context(running(kind, places, CONFIG))
    return actors


async def asked(client: Client, number: int, tokens: int = 40) -> None:
    """One request, and its only right answer."""
    prompt = [(number * 31 + i * (number + 1)) % 256 for i in range(70)]
    wanted = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    with trio.fail_after(30):
        async with client.generate(ids=prompt, sampling=wanted) as stream:
            assert list((await stream.result()).ids) == toy_generate(7, prompt, tokens)


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Tape:
    """A short and peaceful conversation of a whole engine."""
    tape = Tape()
    places = Places(tmp_path_factory.mktemp("tape") / "home")
    send = Socket.send_nowait

    def noted(self: Socket, frames: list[bytes]) -> None:
        tape.note(frames)
        send(self, frames)

    async def talk() -> None:
        places.make()
        async with AsyncExitStack() as stack:
            await running_engine(stack, places)
            async with connected(places) as client:
                for number in (1, 1, 2):
                    await asked(client, number, 20)
                await client.cancel("ab" * 16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Socket, "send_nowait", noted)
        trio.run(talk)
    places.arena().unlink(missing_ok=True)
    assert len(tape.of_each_kind(1)) > 20
    return tape


@asynccontextmanager
async def context() -> AsyncIterator["zmq.Context[zmq.Socket[bytes]]"]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield made
    finally:
        made.destroy(linger=0)


async def status(admin: Peer) -> Snapshot:
    return await admin.ask(Status(), Snapshot, deadline_s=10)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def files(places: Places) -> int:
    """Open files of this process but for those of its home: a store may open a segment at any time."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found += not os.readlink(f"/proc/self/fd/{fd}").startswith(str(places.home))
    return found


def _greets(frames: list[bytes]) -> bool:
    """Whether garbage has come out as a hello, which a mailbox may well believe: see the lies."""
    try:
        return isinstance(decode(frames)[1], Hello)
    except BadMessage:
        return False


@pytest.mark.parametrize("target", SERVICES)
async def test_strangers_at_a_mailbox_are_counted_and_real_traffic_goes_on(
    places: Places, tape: Tape, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage, replays in and out of order, lies about who one is, and floods: 10^5 messages, and nobody is slowed."""
    rng = random.Random(target)
    monkeypatch.setattr(waiting, "QUIET_S", 3600.0)  # else the client may ask who is away, over more connections
    async with (
        AsyncExitStack() as stack,
        context() as ctx,
    ):
        actor = (await running_engine(stack, places))[target]
        client = await stack.enter_async_context(connected(places))
        _, admin = await stack.enter_async_context(dialled("admin", target, places))
        await asked(client, 3)
        stranger = Stranger(ctx, places, target, b"\0stranger")
        await stranger.send([b"knock knock"])
        assert isinstance(await stranger.hello(Hello(role="x", engine="e0", incarnation=1, pid=1)), Refused)
        gc.collect()
        before, peers, open_files = resident_bytes(), len(actor.mailbox.peers), files(places)
        async with trio.open_nursery() as nursery:

            async def traffic() -> None:
                for number in range(4, 7):
                    await asked(client, number)

            nursery.start_soon(traffic)
            for frames in noise(rng, tape.frames, 300):
                if not _greets(frames):
                    await stranger.send(frames)
            for frames in (*tape.frames, *reversed(tape.frames)):
                if b"Hello" not in frames[1]:  # a replayed hello is a hello: see the lies
                    await stranger.send(frames)
            refused = await _lie(ctx, places, actor)
            await _flood(stranger, admin)
        with trio.fail_after(30):
            while (drops := (await status(admin)).data["drops"]).get("no_hello", 0) < FLOOD:
                pass
        assert drops["bad_message"] >= 300
        assert drops["refused"] >= refused
        stranger.close()
        await asked(client, 7)
        with trio.fail_after(10):
            while len(actor.mailbox.peers) > peers or files(places) > open_files:
                await status(admin)
        gc.collect()
        assert resident_bytes() - before < SLACK_BYTES


async def _lie(ctx: "zmq.Context[zmq.Socket[bytes]]", places: Places, actor: Actor) -> int:
    """Every lie of the kit is refused, by name, and the true partner stays."""
    role = PARTNER[actor.role]
    partners = {peer.name for peer in actor.mailbox.of_role(role)}
    count = 0
    for what, hello in lies(role, "e0", 1, os.getpid(), INIT):
        if role in ("client", "admin") and (what.startswith("another process") or what.startswith("older")):
            continue  # of these there may be any number
        liar = Stranger(ctx, places, actor.role, f"{role}/e0/1.{count + 77}".encode())
        answer = await liar.hello(hello)
        assert isinstance(answer, Refused), what
        assert len(answer.reason) < 300, what
        liar.close()
        count += 1
    assert {peer.name for peer in actor.mailbox.of_role(role)} >= partners
    return count


async def _flood(stranger: Stranger, admin: Peer) -> None:
    """10^5 messages of somebody who never said hello; status is answered all the while."""
    ping = encode(Head(1), Ping())
    answered = 0
    async with trio.open_nursery() as nursery:

        async def look() -> None:
            nonlocal answered
            while True:
                await status(admin)
                answered += 1

        nursery.start_soon(look)
        for _ in range(FLOOD):
            await stranger.send(ping)
        nursery.cancel_scope.cancel()
    assert answered > 10


ROLES = [
    ("tokenizer", "client"),
    ("detokenizer", "client"),
    ("scheduler", "tokenizer"),
    ("scheduler", "worker"),
    ("scheduler", "detokenizer"),
    ("store", "scheduler"),
]


@pytest.mark.parametrize(("target", "role"), ROLES)
async def test_whatever_a_welcome_peer_says_the_service_lives_and_serves(
    places: Places, tape: Tape, target: str, role: str
) -> None:
    """Well-formed messages with wrong content, in every role that the mailbox takes; then real traffic."""
    rng = random.Random(f"{target} {role}")
    async with AsyncExitStack() as stack:
        actor = await stack.enter_async_context(running(SERVICES[target], places, CONFIG))
        _, admin = await stack.enter_async_context(dialled("admin", target, places))
        if target == "scheduler":  # so that there is something to plan
            async with dialled("tokenizer", target, places) as (_, tokenizer):
                for real in tape.of_each_kind(3):
                    if isinstance(real, Submit):
                        await tokenizer.ask(real, Journaled, deadline_s=5)
        await _say_everything(rng, tape, places, role, target, admin)
        assert actor.drops["unexpected"] > 0
        await running_engine(stack, places, target)
        client = await stack.enter_async_context(connected(places))
        for number in range(3):
            await asked(client, number)


async def _say_everything(rng: random.Random, tape: Tape, places: Places, role: str, target: str, admin: Peer) -> None:
    async with dialled(role, target, places) as (node, peer), trio.open_nursery() as nursery:

        async def play() -> None:
            """Answers what the service asks, in kind and mostly wrong, so that it goes on to the next step."""
            while True:
                _, head, asked = await node.receive_request(deadline_s=60)
                answer = _played(asked, rng)
                if answer is not None:
                    node._push(peer, answer, re=head.rid)

        nursery.start_soon(play)
        content = [one for one in tape.messages if not isinstance(one, Hello | Welcome | Bye | Refused)]
        for said, message in enumerate(_wrong(rng, tape) + content[::-1] + content):
            peer.send(message, rid=rng.choice((0, 0, said + 1_000)), re=rng.choice((0, 0, 0, said)))
            if said % 50 == 0:
                await status(admin)
            if isinstance(message, Submit):  # or the real traffic would wait behind it
                peer.send(CancelRequest(id=message.id, principal=message.principal))
        await status(admin)
        nursery.cancel_scope.cancel()


def _played(asked: Message, rng: random.Random) -> Message | None:
    """A worker that takes its scheduler's hand and then lies."""
    right: Message
    match asked:
        case Quiesce(epoch=epoch):
            return Idle(epoch=epoch)
        case Plan(epoch=epoch, seq=seq):
            right = Result(epoch=epoch, seq=seq, rows=tuple(RowResult(key, 7) for key in keys_of(asked)), forward_s=0.0)
        case Transfer(epoch=epoch, seq=seq, copies=copies):
            n = len(copies)
            right = Transferred(epoch=epoch, seq=seq, checksums=bytes(8 * n), ok=b"\1" * n, seconds=0.0)
        case _:
            return None
    return rng.choice((right, *(one for one in mutants(right, rng, 2))))


def _wrong(rng: random.Random, tape: Tape) -> list[Message]:
    made = list(extremes(rng, 12))
    for real in tape.of_each_kind(2):
        if not isinstance(real, Hello | Welcome | Bye | Refused):
            made += mutants(real, rng, 3)
    rng.shuffle(made)
    return made


ANSWER: dict[type[Message], type[Message]] = {
    OpenEngine: EngineOpened,
    Lookup: Found,
    Reserve: Reserved,
    Commit: Committed,
    Submit: Journaled,
    CancelRequest: Cancelled,
    Generate: Accepted,
    Cancel: Cancelled,
    Attach: Attached,
}


@pytest.mark.parametrize(("role", "diallers"), [("scheduler", 3), ("store", 1), ("tokenizer", 1), ("detokenizer", 1)])
async def test_whatever_answers_where_a_partner_should_be_the_diallers_live_and_serve(
    places: Places, tape: Tape, role: str, diallers: int
) -> None:
    """Garbage and wrong content behind a link, as pushes and as answers to what was asked; then the real partner.

    An engine whose store lies goes on without it: every token right.
    """
    rng = random.Random(role)
    right = {kind: [one for one in tape.messages if isinstance(one, kind)] for kind in ANSWER.values()}

    def lie(asked: Message) -> Message | None:
        kind = ANSWER.get(type(asked))
        if kind is None:
            return None
        return rng.choice(list(mutants(rng.choice(right[kind]), rng, 2))) if right[kind] else extreme(kind, rng)

    async with AsyncExitStack() as stack, context() as ctx:
        actors = await running_engine(stack, places, role)
        client = await stack.enter_async_context(connected(places))
        admins = [(await stack.enter_async_context(dialled("admin", one, places)))[1] for one in actors]
        async with trio.open_nursery() as nursery:
            welcome = Welcome(role=role, engine="e0", incarnation=1, pid=os.getpid())
            evil = EvilMailbox(ctx, places, welcome, rng, lie)
            nursery.start_soon(evil.run)
            nursery.start_soon(_traffic, client, role == "store")
            await evil.wait_callers(diallers)
            for frames in noise(rng, tape.frames, 100):
                for caller in list(evil.callers):
                    await evil.send(caller, frames or [b""])
            callees = [actor for actor in (*actors.values(), client) if role in actor.links]
            with trio.fail_after(30):  # some noise is a message, and may end the connection: others are lost then
                while any(node.drops["bad_message"] < 50 for node in callees):
                    for caller in list(evil.callers):
                        await evil.send(caller, [b"garbage"])
                    for admin in admins:
                        await status(admin)
            for said, message in enumerate(_wrong(rng, tape)):
                await evil.say(message, rng, rid=rng.choice((0, said)))
                if said % 50 == 0:
                    for admin in admins:
                        await status(admin)
            if role == "store":
                await asked(client, 77)
            for admin in admins:
                await status(admin)
            nursery.cancel_scope.cancel()
        evil.close()
        deceived = [actor for actor in (*actors.values(), client) if role in actor.links]
        assert len(deceived) == diallers
        for node in deceived:
            assert node.drops["bad_message"] >= 50, (node.role, node.drops)
        await stack.enter_async_context(running(SERVICES[role], places, CONFIG, incarnation=2))
        for number in range(80, 83):
            await asked(client, number)


async def _traffic(client: Client, right: bool) -> None:
    """Requests that are asked for in earnest; whether they must be answered rightly is another matter."""
    for number in itertools.count(20):
        if right:
            await asked(client, number)
            continue
        with trio.move_on_after(0.2), suppress(RequestRejected, RequestFailed, ProtocolViolation):
            async with client.generate(prompt=f"{number}", sampling=Sampling(max_tokens=5)) as stream:
                await stream.result()


@pytest.mark.parametrize(("dialler", "role"), [("tokenizer", "scheduler"), ("scheduler", "store")])
@pytest.mark.parametrize("wrong", [{"role": "nobody"}, {"pid": -1}, {"pid": 1 << 50}, {"protocol": 77}], ids=str)
async def test_a_welcome_that_lies_is_refused_and_the_next_one_is_asked(
    places: Places, dialler: str, role: str, wrong: dict[str, Any]
) -> None:
    async with (
        running(SERVICES[dialler], places, CONFIG) as actor,
        dialled("admin", dialler, places) as (_, admin),
        context() as ctx,
        trio.open_nursery() as nursery,
    ):
        fields: dict[str, Any] = {"role": role, "engine": "e0", "incarnation": 1, "pid": os.getpid()} | wrong
        evil = EvilMailbox(ctx, places, Welcome(**fields), random.Random(1), at=role)
        nursery.start_soon(evil.run)
        with trio.fail_after(10):
            while actor.drops["bad_welcome"] < 2:
                await status(admin)
        assert actor.links[role].peer is None
        nursery.cancel_scope.cancel()
        evil.close()
