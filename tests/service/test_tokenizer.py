"""The front door over real sockets, with the scheduler's and the client's side played by hand."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import zmq

from services.tokenizer import actor as tokenizer_actor
from services.tokenizer.actor import Tokenizer
from services.tokenizer.encode import Encoder
from services.tokenizer.validate import BODY_BYTES
from shared.config import Config, ModelConfig
from shared.identity import namespace_salt
from shared.messages.base import Message, pack_u32, unpack_u32
from shared.messages.engine import CancelRequest, Journaled, Submit
from shared.messages.front import (
    AWAY_S,
    Accepted,
    Cancel,
    Cancelled,
    ChatMessage,
    Encode,
    Encoded,
    Generate,
    Rejected,
    Sampling,
)
from shared.messages.hello import Snapshot, Status
from shared.model.errors import BadModel
from shared.model.toy import EOS, MAX_CONTEXT
from shared.paths import Places
from shared.peers import DeadlinePassed, Peer, RequestFailed
from shared.testing import TestMailbox, TestPeer, dialled, mailbox_of, running
from tests.front_kit import config_with, free_ports, give_key, remote_peer
from tests.tiny_models import Tiny, write_directory

ID = "ab" * 16
TINY = Tiny()
CONFIG = Config(model=ModelConfig(source="toy:1"))
Scheduler = mailbox_of("scheduler", frozenset({"detokenizer", "tokenizer"}))


@asynccontextmanager
async def scheduler_and_client(places: Places, config: Config = CONFIG) -> AsyncIterator[tuple[TestMailbox, Peer]]:
    async with (
        running(Scheduler, places, config) as scheduler,
        running(Tokenizer, places, config),
        dialled("client", "tokenizer", places) as (_, peer),
    ):
        yield scheduler, peer


class Journaling:
    """A scheduler that journals whatever comes, in the background, and keeps what it got."""

    def __init__(self, scheduler: TestMailbox) -> None:
        self.scheduler = scheduler
        self.submits: list[Submit] = []

    async def run(self) -> None:
        while True:
            peer, head, submit = await self.scheduler.receive(Submit, deadline_s=60)
            self.submits.append(submit)
            known = len(self.submits) != len({one.id for one in self.submits})
            journaled = Journaled(id=submit.id, known=known, prompt_tokens=len(submit.ids) // 4)
            self.scheduler.answer(peer, head, journaled)


async def generate(peer: Peer, request: Generate, *, deadline_s: float = 10.0) -> Accepted | Rejected:
    answer: Accepted | Rejected = await peer.ask(request, (Accepted, Rejected), deadline_s=deadline_s)
    return answer


async def submitted(scheduler: TestMailbox, client: Peer, request: Generate) -> Submit:
    """The Submit that a request becomes."""
    journaling = Journaling(scheduler)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journaling.run)
        answer = await generate(client, request)
        nursery.cancel_scope.cancel()
    (submit,) = journaling.submits
    assert answer == Accepted(id=request.id, prompt_tokens=len(submit.ids) // 4)
    return submit


async def test_a_prompt_is_accepted_only_after_the_scheduler_has_journaled_it(places: Places) -> None:
    async with scheduler_and_client(places) as (scheduler, client), trio.open_nursery() as nursery:
        answers: list[Accepted | Rejected] = []

        async def ask() -> None:
            answers.append(await generate(client, Generate(id=ID, prompt="hé")))

        nursery.start_soon(ask)
        peer, head, submit = await scheduler.receive(Submit)
        assert list(unpack_u32(submit.ids)) == list("hé".encode())
        assert answers == []
        scheduler.answer(peer, head, Journaled(id=ID, known=False, prompt_tokens=3))
    assert answers == [Accepted(id=ID, prompt_tokens=3)]


async def test_defaults_of_the_model_are_resolved_and_the_clients_wishes_kept(places: Places) -> None:
    async with scheduler_and_client(places) as (scheduler, client):
        plain = await submitted(scheduler, client, Generate(id=ID, prompt="abc"))
        assert plain.max_tokens == MAX_CONTEXT - 3
        assert plain.stop_ids == (EOS,)
        assert (plain.sample.temperature, plain.sample.logprobs, plain.seeded) == (0.0, -1, False)
        assert (plain.principal, plain.salt, plain.detached, plain.deadline_s) == ("local", b"", False, None)
        wishes = Sampling(
            max_tokens=5,
            temperature=0.7,
            top_k=3,
            top_p=0.9,
            min_p=0.1,
            seed=-1,
            stop=("x",),
            logprobs=0,
            ignore_eos=True,
        )
        request = Generate(
            id="cd" * 16,
            prompt="abc",
            sampling=wishes,
            cache_salt="s",
            no_store=True,
            no_read=True,
            detached=True,
            deadline_s=9.0,
        )
        wished = await submitted(scheduler, client, request)
        assert (wished.max_tokens, wished.stop_ids, wished.stop) == (5, (), ("x",))
        sample = wished.sample
        assert (sample.temperature, sample.top_k, sample.top_p, sample.min_p) == (0.7, 3, 0.9, 0.1)
        assert (sample.seed, sample.logprobs, wished.seeded) == (2**64 - 1, 0, True)
        assert (wished.no_store, wished.no_read, wished.detached, wished.deadline_s) == (True, True, True, 9.0)
        key = places.identity_key.read_bytes()
        assert wished.salt == namespace_salt(key, "local", "s")
        assert wished.digest != plain.digest


async def test_chat_messages_go_through_the_models_template_and_ids_through_nothing(places: Places) -> None:
    async with scheduler_and_client(places) as (scheduler, client):
        turns = (ChatMessage(role="user", content="hi"), ChatMessage(role="assistant", content="ho"))
        chat = await submitted(scheduler, client, Generate(id=ID, messages=turns))
        assert bytes(unpack_u32(chat.ids).tolist()) == b"user: hi\nassistant: ho\nassistant:"
        given = pack_u32([0, 511, 256])
        assert (await submitted(scheduler, client, Generate(id="cd" * 16, ids=given))).ids == given


@pytest.mark.parametrize(
    ("request_", "code", "numbers"),
    [
        (Generate(id="short", prompt="a"), "bad_request", {}),
        (Generate(id=ID, prompt=""), "bad_request", {}),
        (Generate(id=ID, messages=()), "bad_request", {}),
        (Generate(id=ID, ids=b""), "bad_request", {}),
        (Generate(id=ID, ids=pack_u32([512])), "bad_request", {"token": 512, "vocab": 512}),
        (Generate(id=ID, prompt="a", choices=2), "unsupported", {"choices": 2}),
        (Generate(id=ID, prompt="a", sampling=Sampling(max_tokens=0)), "bad_request", {"max_tokens": 0}),
        (
            Generate(id=ID, prompt="a" * MAX_CONTEXT),
            "context_too_long",
            {"prompt_tokens": MAX_CONTEXT, "max_context": MAX_CONTEXT},
        ),
        (
            Generate(id=ID, prompt="a" * (10 * MAX_CONTEXT)),
            "context_too_long",
            {"prompt_tokens": 10 * MAX_CONTEXT, "max_context": MAX_CONTEXT},
        ),
        (
            Generate(id=ID, prompt="a" * (BODY_BYTES + 1)),
            "body_too_large",
            {"bytes": BODY_BYTES + 1, "limit": BODY_BYTES},
        ),
    ],
)
async def test_x01_x03_refusals_come_before_the_scheduler_hears_of_it_and_the_next_request_works(
    places: Places, request_: Generate, code: str, numbers: dict[str, float]
) -> None:
    async with scheduler_and_client(places) as (scheduler, client):
        refused = await generate(client, request_)
        assert isinstance(refused, Rejected)
        assert (refused.id, refused.code, refused.numbers) == (request_.id, code, numbers)
        assert (await submitted(scheduler, client, Generate(id=ID, prompt="ok"))).ids == pack_u32(list(b"ok"))


async def test_a_smaller_context_by_configuration_holds(places: Places) -> None:
    config = Config(model=ModelConfig(source="toy:1", max_context=10))
    async with scheduler_and_client(places, config) as (scheduler, client):
        refused = await generate(client, Generate(id=ID, prompt="a" * 10))
        assert isinstance(refused, Rejected)
        assert refused.numbers == {"prompt_tokens": 10, "max_context": 10}
        assert (await submitted(scheduler, client, Generate(id=ID, prompt="a" * 9))).max_tokens == 1


async def test_a_rejection_of_the_scheduler_reaches_the_client_as_it_is(places: Places) -> None:
    async with scheduler_and_client(places) as (scheduler, client), trio.open_nursery() as nursery:
        rejected = Rejected(id=ID, code="never_fits", reason="too many blocks", numbers={"blocks": 9.0, "pool": 8.0})
        answers: list[Accepted | Rejected] = []

        async def ask() -> None:
            answers.append(await generate(client, Generate(id=ID, prompt="a")))

        nursery.start_soon(ask)
        peer, head, _ = await scheduler.receive(Submit)
        scheduler.answer(peer, head, rejected)
    assert answers == [rejected]


async def test_a_request_waits_for_a_scheduler_that_is_away(places: Places) -> None:
    async with (
        running(Tokenizer, places, CONFIG),
        dialled("client", "tokenizer", places) as (_, client),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(generate, client, Generate(id=ID, prompt="a"))
        async with dialled("admin", "tokenizer", places) as (_, admin):
            while not (await admin.ask(Status(), Snapshot, deadline_s=5)).data["in_work"]:
                pass
        async with running(Scheduler, places, CONFIG) as scheduler:
            peer, head, _ = await scheduler.receive(Submit)
            scheduler.answer(peer, head, Journaled(id=ID, known=False, prompt_tokens=1))
            while nursery.child_tasks:
                await trio.lowlevel.checkpoint()


async def test_a_scheduler_that_stays_away_is_named_before_the_askers_deadline(places: Places) -> None:
    async with running(Tokenizer, places, CONFIG), dialled("client", "tokenizer", places) as (_, client):
        refused = await generate(client, Generate(id=ID, prompt="a"), deadline_s=0.4)
        assert isinstance(refused, Rejected)
        assert refused.code == "overloaded"
        assert AWAY_S in refused.numbers
        assert "scheduler" in refused.reason


async def test_a_submit_whose_scheduler_died_unanswered_goes_to_its_next_incarnation(places: Places) -> None:
    async with (
        running(Tokenizer, places, CONFIG),
        dialled("client", "tokenizer", places) as (_, client),
        trio.open_nursery() as nursery,
    ):
        answers: list[Accepted | Rejected] = []

        async def ask() -> None:
            answers.append(await generate(client, Generate(id=ID, prompt="a")))

        nursery.start_soon(ask)
        async with running(Scheduler, places, CONFIG, incarnation=1) as scheduler:
            _, _, first = await scheduler.receive(Submit)
        async with running(Scheduler, places, CONFIG, incarnation=2) as scheduler:
            peer, head, again = await scheduler.receive(Submit)
            assert again == first
            scheduler.answer(peer, head, Journaled(id=ID, known=True, prompt_tokens=1))
            while nursery.child_tasks:
                await trio.lowlevel.checkpoint()
        assert answers == [Accepted(id=ID, prompt_tokens=1)]


def deaf(tokenizer: Tokenizer, sends: int) -> None:
    """The scheduler was killed a moment ago: the first `sends` messages find no connection that would take them in."""
    peer = tokenizer._scheduler.peer
    assert peer is not None
    send, left = peer._send_frames, [sends]

    def send_frames(frames: list[bytes]) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise zmq.Again
        send(frames)

    peer._send_frames = send_frames


@pytest.mark.parametrize("message", [Generate(id=ID, prompt="a"), Cancel(id=ID)])
async def test_a_scheduler_that_was_killed_a_moment_ago_costs_a_try_and_no_request(
    places: Places, message: Generate | Cancel
) -> None:
    async with (
        running(Scheduler, places, CONFIG) as scheduler,
        running(Tokenizer, places, CONFIG) as tokenizer,
        dialled("client", "tokenizer", places) as (_, client),
        trio.open_nursery() as nursery,
    ):
        with trio.fail_after(10):
            await tokenizer._scheduler.wait_up()
        deaf(tokenizer, 3)
        answers: list[Message] = []

        async def ask() -> None:
            answers.append(await client.ask(message, (Accepted, Rejected, Cancelled), deadline_s=10))

        nursery.start_soon(ask)
        peer, head, asked = await scheduler.receive()
        known: Message = Journaled(id=ID, known=False, prompt_tokens=1)
        scheduler.answer(peer, head, known if isinstance(asked, Submit) else Cancelled(id=ID, known=True))
    assert answers in ([Accepted(id=ID, prompt_tokens=1)], [Cancelled(id=ID, known=True)])


async def test_the_same_generate_again_is_the_same_submit_again(places: Places) -> None:
    async with scheduler_and_client(places) as (scheduler, client):
        first = await submitted(scheduler, client, Generate(id=ID, prompt="a"))
        assert await submitted(scheduler, client, Generate(id=ID, prompt="a")) == first
        other = await submitted(scheduler, client, Generate(id=ID, prompt="b"))
        assert other.digest != first.digest


async def test_cancel_goes_to_the_scheduler_with_the_principal(places: Places) -> None:
    async with scheduler_and_client(places) as (scheduler, client), trio.open_nursery() as nursery:
        answers: list[Cancelled] = []

        async def ask() -> None:
            answers.append(await client.ask(Cancel(id=ID), Cancelled, deadline_s=5))

        nursery.start_soon(ask)
        peer, head, cancel = await scheduler.receive(CancelRequest)
        assert cancel == CancelRequest(id=ID, principal="local", reason="client")
        scheduler.answer(peer, head, Cancelled(id=ID, known=True))
    assert answers == [Cancelled(id=ID, known=True)]


async def test_i11_the_loop_answers_while_books_are_encoded(places: Places) -> None:
    """While big inputs are in work, status is answered and small requests overtake them."""
    book = "all work and no play makes jack a dull boy. " * 12_000  # 528 kB
    async with scheduler_and_client(places) as (scheduler, client), trio.open_nursery() as nursery:
        journaling = Journaling(scheduler)
        nursery.start_soon(journaling.run)
        done: list[str] = []

        async def ask(request: Generate) -> None:
            answer = await generate(client, request, deadline_s=60)
            done.append("small" if isinstance(answer, Accepted) else answer.code)

        async with trio.open_nursery() as asking, dialled("admin", "tokenizer", places) as (_, admin):
            for n in range(4):
                asking.start_soon(ask, Generate(id=f"{n:032x}", prompt=book))
            answered = 0
            while not (await admin.ask(Status(), Snapshot, deadline_s=5)).data["in_work"]:
                pass
            asking.start_soon(ask, Generate(id="ff" * 16, prompt="a"))
            while (await admin.ask(Status(), Snapshot, deadline_s=5)).data["in_work"]:
                answered += 1
        assert done == ["small", *["context_too_long"] * 4]
        assert answered > 10
        nursery.cancel_scope.cancel()


async def test_a_model_whose_template_is_broken_is_refused_by_name(places: Places, tmp_path: Path) -> None:
    path = write_directory(tmp_path / "odd", TINY, TINY.tensors())
    (path / "chat_template.jinja").write_text("{% for %}")
    tokenizer = Tokenizer(places, Config(model=ModelConfig(source=str(path))), incarnation=1)
    with pytest.raises(BaseExceptionGroup) as caught:
        await tokenizer.serve()
    assert caught.group_contains(BadModel, match="model odd: its chat template can't be used")


async def test_a_chat_is_never_rendered_on_the_loop_however_small(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates are the model's programs: one may take seconds on two words."""
    on_loop: list[bool] = []
    real = Encoder.encode

    def noting(self: Encoder, request: Generate) -> bytes:
        on_loop.append(threading.get_ident() == loop)
        return real(self, request)

    loop = threading.get_ident()
    monkeypatch.setattr(Encoder, "encode", noting)
    async with scheduler_and_client(places) as (scheduler, client):
        await submitted(scheduler, client, Generate(id=ID, messages=(ChatMessage(role="user", content="hi"),)))
        await submitted(scheduler, client, Generate(id="cd" * 16, prompt="hi"))
    assert on_loop == [False, True]


async def test_i11_a_text_that_cannot_fit_is_refused_by_a_lower_bound_instead_of_counted(places: Places) -> None:
    async with scheduler_and_client(places) as (_, client):
        refused = await generate(client, Generate(id=ID, prompt="a" * BODY_BYTES))
        assert isinstance(refused, Rejected)
        assert refused.code == "context_too_long"
        assert refused.numbers == {"prompt_tokens": -(-BODY_BYTES // len("<eos>")), "max_context": MAX_CONTEXT}
        assert "at least" in refused.reason


async def test_i11_a_body_of_27_mb_is_refused_before_it_is_encoded(places: Places) -> None:
    async with scheduler_and_client(places) as (_, client):
        refused = await generate(client, Generate(id=ID, prompt="a" * (27 << 20)))
        assert isinstance(refused, Rejected)
        assert refused.code == "body_too_large"
        assert refused.numbers == {"bytes": 27 << 20, "limit": BODY_BYTES}


async def test_i05_requests_beyond_the_bound_are_overloaded_and_the_others_are_served(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_actor, "MAX_IN_WORK", 3)
    async with scheduler_and_client(places) as (scheduler, client), trio.open_nursery() as nursery:
        answers: list[Accepted | Rejected] = []

        async def ask(n: int) -> None:
            answers.append(await generate(client, Generate(id=f"{n:032x}", prompt="a")))

        held = []
        for n in range(3):
            nursery.start_soon(ask, n)
            held.append(await scheduler.receive(Submit))
        refused = await generate(client, Generate(id=ID, prompt="a"))
        assert isinstance(refused, Rejected)
        assert refused.code == "overloaded"
        assert refused.numbers == {"in_work": 3, "limit": 3}
        for peer, head, submit in held:
            scheduler.answer(peer, head, Journaled(id=submit.id, known=False, prompt_tokens=1))
    assert [type(answer) for answer in answers] == [Accepted] * 3


@pytest.mark.parametrize("role", ["worker", "scheduler"])
async def test_the_front_door_takes_clients_only(places: Places, role: str) -> None:
    async with running(Tokenizer, places, CONFIG):
        node = TestPeer(role, places)
        async with trio.open_nursery() as nursery:
            node.nursery = nursery
            link = node.dial("tokenizer")
            while not link.refused:
                await trio.lowlevel.checkpoint()
            assert "takes no" in link.refused
            nursery.cancel_scope.cancel()
        node.close()


async def test_an_admin_may_look_but_not_generate(places: Places) -> None:
    async with running(Tokenizer, places, CONFIG), dialled("admin", "tokenizer", places) as (_, admin):
        with pytest.raises(RequestFailed, match="unsupported"):
            await generate(admin, Generate(id=ID, prompt="a"))


async def test_one_user_can_not_cancel_what_another_has_in_the_encoder(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not when both name the same id."""
    alice, bob, port = give_key(places, "alice"), give_key(places, "bob"), free_ports()
    begun, go_on = threading.Event(), threading.Event()
    encode = Encoder.encode

    def held(self: Encoder, request: Generate) -> bytes:
        begun.set()
        go_on.wait(10)
        return encode(self, request)

    monkeypatch.setattr(Encoder, "encode", held)
    turns = (ChatMessage(role="user", content="hi"),)
    async with (
        scheduler_and_client(places, config_with(port, CONFIG)) as (scheduler, _),
        remote_peer(places, port, "tokenizer", alice) as (_, hers),
        remote_peer(places, port, "tokenizer", bob) as (_, his),
        trio.open_nursery() as nursery,
    ):
        answers: list[Accepted | Rejected] = []

        async def ask() -> None:
            answers.append(await generate(hers, Generate(id=ID, messages=turns)))

        nursery.start_soon(ask)
        await trio.to_thread.run_sync(begun.wait, 10)
        nursery.start_soon(partial(his.ask, Cancel(id=ID), Cancelled, deadline_s=10))
        peer, head, cancel = await scheduler.receive(CancelRequest)
        assert cancel == CancelRequest(id=ID, principal="bob", reason="client")
        scheduler.answer(peer, head, Cancelled(id=ID, known=False))
        go_on.set()
        peer, head, submit = await scheduler.receive(Submit)
        assert submit.principal == "alice"
        scheduler.answer(peer, head, Journaled(id=ID, known=False, prompt_tokens=1))
    assert answers == [Accepted(id=ID, prompt_tokens=1)]


async def test_a_users_share_of_the_encoders_is_bounded_and_told(places: Places) -> None:
    alice, bob, port = give_key(places, "alice"), give_key(places, "bob"), free_ports()
    async with (
        scheduler_and_client(places, config_with(port, CONFIG, user_requests=2)) as (scheduler, _),
        remote_peer(places, port, "tokenizer", alice) as (_, hers),
        remote_peer(places, port, "tokenizer", bob) as (_, his),
        trio.open_nursery() as nursery,
    ):
        for n in range(2):  # the scheduler never answers these
            nursery.start_soon(generate, hers, Generate(id=f"{n:032x}", prompt="a"))
            await scheduler.receive(Submit)
        refused = await generate(hers, Generate(id=ID, prompt="a"))
        assert isinstance(refused, Rejected)
        assert (refused.code, refused.numbers) == ("overloaded", {"requests": 2, "user_requests": 2})
        nursery.start_soon(generate, his, Generate(id=ID, prompt="a"))
        _, _, submit = await scheduler.receive(Submit)
        assert submit.principal == "bob"
        nursery.cancel_scope.cancel()


async def test_u3_the_namespace_follows_the_users_key_and_not_what_the_client_writes(places: Places) -> None:
    port = free_ports()
    config = config_with(port, CONFIG)
    keys = [give_key(places, user) for user in ("alice", "alice", "bob")]  # two of the same user: one was rotated
    async with running(Scheduler, places, config) as scheduler, running(Tokenizer, places, config):
        salts: dict[tuple[int, str | None], bytes] = {}
        for number, key in enumerate(keys):
            async with remote_peer(places, port, "tokenizer", key, incarnation=1 + number) as (_, peer):
                for salt in (None, "", "s", "bob", "local"):
                    id = f"{len(salts):032x}"
                    submit = await submitted(scheduler, peer, Generate(id=id, prompt="abc", cache_salt=salt))
                    salts[number, salt] = submit.salt
        async with dialled("client", "tokenizer", places) as (_, peer):
            ours = await submitted(scheduler, peer, Generate(id="f" * 32, prompt="abc", cache_salt="s"))
    assert ours.salt not in salts.values()
    for salt in (None, "", "s", "bob", "local"):
        assert salts[0, salt] == salts[1, salt]
    assert len(set(salts.values())) == 2 * 5
    assert b"" not in salts.values()


async def test_a_command_learns_the_ids_of_a_prompt_and_nobody_else_does(places: Places) -> None:
    async with scheduler_and_client(places) as (_, client), dialled("admin", "tokenizer", places) as (_, admin):
        asked = Encode(request=Generate(id=ID, prompt="hé"))
        assert (await admin.ask(asked, Encoded, deadline_s=5)).ids == pack_u32(list("hé".encode()))
        refused = Encode(request=Generate(id=ID, prompt="x" * (BODY_BYTES + 1)))
        assert (await admin.ask(refused, Rejected, deadline_s=5)).code == "body_too_large"
        with pytest.raises((RequestFailed, DeadlinePassed)):
            await client.ask(asked, Encoded, deadline_s=0.2)
