"""The actor contract over real sockets."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import structlog
import trio
import trio.lowlevel
import trio.testing
import zmq

from shared.actor import Actor, Peer, Reject, on
from shared.config import Config
from shared.messages import MAX_FRAME, Head, Message, decode, encode
from shared.messages.engine import Idle, Quiesce
from shared.messages.front import Cancel, Cancelled
from shared.messages.hello import Bye, Failed, Hello, Refused, Snapshot, Status, Welcome
from shared.paths import Lock, Places, Taken
from shared.peers import DeadlinePassed, PeerGone, RequestFailed
from shared.sockets import Socket
from shared.testing import dialled, mailbox_of, running


class Echo(Actor):
    role_name = "scheduler"
    accepts = frozenset({"tokenizer", "worker"})

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.downs: list[tuple[str, bool]] = []
        self.never = trio.Event()

    def peer_down(self, peer: Peer, exit_proven: bool) -> None:
        self.downs.append((peer.name, exit_proven))

    @on(Cancel, roles=frozenset({"tokenizer"}))
    async def cancel(self, peer: Peer, message: Cancel) -> Cancelled:
        if message.id == "hang":
            await self.never.wait()
        if message.id == "reject":
            raise Reject("not_found", "there is no such request")
        return Cancelled(id=message.id, known=True)

    @on(Quiesce)
    def quiesce(self, peer: Peer, message: Quiesce) -> Idle:
        if message.epoch == 13:
            raise RuntimeError("a handler's own fault")
        return Idle(epoch=message.epoch)


async def test_request_reply_and_failures(places: Places) -> None:
    async with running(Echo, places) as echo, dialled("tokenizer", "scheduler", places) as (_, peer):
        assert (await peer.ask(Quiesce(epoch=7), Idle, deadline_s=5)).epoch == 7
        assert (await peer.ask(Cancel(id="x"), Cancelled, deadline_s=5)).known
        with pytest.raises(RequestFailed, match="not_found"):
            await peer.ask(Cancel(id="reject"), Cancelled, deadline_s=5)
        with pytest.raises(RequestFailed, match="a handler's own fault"):
            await peer.ask(Quiesce(epoch=13), Idle, deadline_s=5)
        with pytest.raises(DeadlinePassed):
            await peer.ask(Cancel(id="hang"), Cancelled, deadline_s=0.05)
        assert (await peer.ask(Quiesce(epoch=8), Idle, deadline_s=5)).epoch == 8
        assert echo.drops["handler_failed"] == 1


async def test_messages_only_from_the_roles_that_may_send_them(places: Places) -> None:
    async with running(Echo, places), dialled("worker", "scheduler", places) as (_, peer):
        with pytest.raises(RequestFailed, match="takes no Cancel from a worker"):
            await peer.ask(Cancel(id="x"), Cancelled, deadline_s=5)


async def test_status_is_answered_to_admins(places: Places) -> None:
    async with running(Echo, places, incarnation=5), dialled("admin", "scheduler", places) as (_, peer):
        snapshot = await peer.ask(Status(), Snapshot, deadline_s=5)
        assert (snapshot.role, snapshot.incarnation, snapshot.ready) == ("scheduler", 5, True)


async def test_a_restarted_service_is_a_new_peer_and_old_messages_do_not_reach_it(places: Places) -> None:
    link_peers = []
    async with running(mailbox_of("worker", frozenset()), places):  # any node may own the dialling link
        node_class = mailbox_of("tokenizer", frozenset())
        async with running(node_class, places) as node:
            async with running(Echo, places, incarnation=1):
                link = node.dial("scheduler")
                link_peers.append(await link.wait_up())
            with trio.fail_after(5):
                await link_peers[0].wait_gone()
            with pytest.raises(PeerGone):
                link_peers[0].send(Quiesce(epoch=1))
            async with running(Echo, places, incarnation=2):
                with trio.fail_after(5):
                    second = await link.wait_up()
                assert second.incarnation == 2
                assert (await second.ask(Quiesce(epoch=2), Idle, deadline_s=5)).epoch == 2


async def test_envelopes_for_another_incarnation_are_dropped(places: Places) -> None:
    async with running(Echo, places, incarnation=2) as echo, dialled("tokenizer", "scheduler", places) as (_, peer):
        peer.incarnation = 1
        with pytest.raises(DeadlinePassed):
            await peer.ask(Quiesce(epoch=1), Idle, deadline_s=0.05)
        assert echo.drops["other_incarnation"] == 1


async def test_i03_a_second_stack_on_one_home_is_refused(places: Places) -> None:
    async with running(Echo, places):
        with pytest.raises(Taken, match=str(os.getpid())):
            Echo(places, Config(), incarnation=2)


async def test_i03_a_plain_file_at_the_socket_path_is_not_deleted(places: Places) -> None:
    path = places.run / "scheduler.sock"
    path.write_text("mine")
    actor = Echo(places, Config(), incarnation=1)
    with pytest.raises(ExceptionGroup) as caught:
        await actor.serve()
    assert caught.group_contains(FileExistsError, match="is no socket")
    assert path.read_text() == "mine"


CHILD = """
import sys, trio
from pathlib import Path
from shared.paths import Places
from shared.testing import dialled
async def main():
    async with dialled("worker", "scheduler", Places(Path(sys.argv[1])), incarnation=3):
        print("up", flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


async def test_i01_a_killed_process_is_a_proven_exit_at_once(places: Places) -> None:
    async with running(Echo, places) as echo:
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(places.home)], stdout=subprocess.PIPE)  # noqa: ASYNC220
        assert child.stdout is not None
        await trio.to_thread.run_sync(child.stdout.readline)
        (peer,) = echo.mailbox.of_role("worker")
        child.send_signal(signal.SIGKILL)
        with trio.fail_after(5):
            await peer.wait_gone()
        assert echo.downs == [("worker/e0/3", True)]
        child.wait()
        child.stdout.close()


async def test_garbage_is_counted_and_survived(places: Places) -> None:
    rng = random.Random(1)
    async with running(Echo, places) as echo, dialled("tokenizer", "scheduler", places) as (node, peer):
        raw = Socket(node.context, zmq.DEALER, max_frame=MAX_FRAME)
        raw.raw.connect(places.endpoint("scheduler"))
        for size in range(200):
            frames = [rng.randbytes(rng.randrange(size + 1)) for _ in range(rng.randrange(1, 4))]
            raw.send_nowait(frames)
        raw.send_nowait([encode(Head(), Idle(epoch=1))[0], b"\x91" * 200_000])
        raw.send_nowait(encode(Head(to=1, rid=1), Quiesce(epoch=1)))  # no hello
        (frames,) = await raw.recv_many(1)
        assert b"say hello first" in frames[1]
        raw.close()
        assert (await peer.ask(Quiesce(epoch=8), Idle, deadline_s=5)).epoch == 8
        assert echo.drops["bad_message"] >= 200


async def test_i10_cancelled_receives_lose_and_reorder_nothing(places: Places) -> None:
    """10,000 messages while the receive is cancelled at random moments: all arrive once, in order."""
    count, rng = 10_000, random.Random(7)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    left, right = (Socket(context, zmq.PAIR, max_frame=1 << 20) for _ in range(2))
    left.raw.bind("inproc://i10")
    right.raw.connect("inproc://i10")
    got: list[int] = []

    async def send() -> None:
        for number in range(count):
            while True:
                try:
                    left.send_nowait([number.to_bytes(4, "little")])
                    break
                except zmq.Again:
                    await trio.lowlevel.checkpoint()
            if number % 50 == 0:
                await trio.lowlevel.checkpoint()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            while len(got) < count:
                with trio.move_on_after(rng.random() * 0.005):
                    for frames in await right.recv_many(rng.randrange(1, 20)):
                        got.append(int.from_bytes(frames[0], "little"))
    assert got == list(range(count))
    left.close()
    right.close()
    context.term()


async def test_answers_to_nobody_are_failed_not_silent(places: Places) -> None:
    async with running(Echo, places), dialled("tokenizer", "scheduler", places) as (_, peer):
        with pytest.raises(RequestFailed, match="unsupported"):
            await peer.ask(Failed(code="x", reason="y"), Idle, deadline_s=5)


def test_a_service_may_open_more_files_than_a_soft_limit_of_a_thousand() -> None:
    program = """
import resource
from shared.actor import FILES, allow_files
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
allow_files()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == (FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.stdout == b"True\n", done.stderr


REFUSING = """
import sys
from shared.actor import Actor, run
from shared.config import ConfigError
from shared.identity import KeyDamaged
from shared.model.errors import BadModel, ModelError
class Refusing(Actor):
    role_name = "scheduler"
    async def start(self):
        raise eval(sys.argv[1])
run(Refusing)
"""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("ConfigError('two words')", 2),
        ("BadModel('two words')", 2),
        ("ExceptionGroup('g', [KeyDamaged('two words'), ModelError('x')])", 2),
        ("FileExistsError('two words')", 4),
        ("ValueError('two words')", 1),
        ("UnicodeDecodeError('utf-8', b'two words', 0, 1, 'two words')", 1),
        ("ExceptionGroup('g', [ConfigError('x'), ValueError('two words')])", 1),
    ],
)
def test_only_what_a_person_must_put_right_exits_as_wrong_and_the_rest_is_a_crash(
    places: Places, error: str, code: int
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    environ |= {"PERDURE_HOME": str(places.home)}
    done = subprocess.run([sys.executable, "-c", REFUSING, error], capture_output=True, env=environ, timeout=60)
    told = done.stderr.decode()
    assert done.returncode == code, told
    assert "two words" in told
    assert ("Traceback" in told) == (code == 1)
    assert len(told.splitlines()) == 1 or code == 1


async def test_i03_a_hello_that_finds_no_queue_is_tried_again(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connect that is refused at once can take the DEALER's queue away before the hello: EAGAIN, once."""
    send, refused = Socket.send_nowait, []

    def once_refused(self: Socket, frames: list[bytes]) -> None:
        if not refused and b"Hello" in frames[-1]:
            refused.append(True)
            raise zmq.Again
        send(self, frames)

    monkeypatch.setattr(Socket, "send_nowait", once_refused)
    async with running(Echo, places), dialled("tokenizer", "scheduler", places) as (node, peer):
        assert (await peer.ask(Quiesce(epoch=7), Idle, deadline_s=5)).epoch == 7
        assert refused
        assert node.drops["connect"] == 1


async def test_what_goes_wrong_again_and_again_is_counted_and_logged_once_a_second(places: Places) -> None:
    async with running(Echo, places) as echo, dialled("tokenizer", "scheduler", places) as (_, peer):
        with structlog.testing.capture_logs() as logs:
            begun = time.monotonic()
            for _ in range(300):
                peer.send(Quiesce(epoch=13))  # whose handler fails
                peer.send(Idle(epoch=1))  # which has none
                peer._send_frames([b"\xc1", b"\xc1"])
            assert (await peer.ask(Quiesce(epoch=8), Idle, deadline_s=10)).epoch == 8
            seconds = 1 + time.monotonic() - begun
        assert echo.drops["handler_failed"] == echo.drops["unexpected"] == echo.drops["bad_message"] == 300
        said = Counter((log["event"], log.get("why")) for log in logs if log["log_level"] in ("warning", "error"))
        assert said.keys() == {("handler_failed", None), ("dropped", "unexpected"), ("dropped", "bad_message")}
        assert max(said.values()) <= seconds


async def test_messages_in_work_are_bounded_and_the_surplus_is_told(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.node.MAX_HANDLERS_A_PEER", 5)
    async with (
        running(Echo, places) as echo,
        dialled("tokenizer", "scheduler", places) as (_, peer),
    ):
        for _ in range(5):
            peer.send(Cancel(id="hang"), rid=1 << 40)
        with pytest.raises(RequestFailed, match="overloaded: 5 messages of yours are in work"):
            await peer.ask(Cancel(id="x"), Cancelled, deadline_s=5)
        assert echo.drops["busy"] == 1
        echo.never.set()
        assert (await peer.ask(Quiesce(epoch=8), Idle, deadline_s=5)).epoch == 8
        await trio.testing.wait_all_tasks_blocked()
        assert (await peer.ask(Cancel(id="x"), Cancelled, deadline_s=5)).known


@pytest.mark.parametrize("deadline", [float("nan"), float("inf"), -1.0])
async def test_a_deadline_that_is_none_is_refused_before_any_handler(places: Places, deadline: float) -> None:
    async with running(Echo, places) as echo, dialled("tokenizer", "scheduler", places) as (_, peer):
        peer.send(Quiesce(epoch=13), deadline=deadline)
        assert (await peer.ask(Quiesce(epoch=8), Idle, deadline_s=5)).epoch == 8
        assert (echo.drops["bad_message"], echo.drops["handler_failed"]) == (1, 0)


async def test_many_connections_of_one_process_cost_one_watch(places: Places) -> None:
    """A flood of hellos with ever new identities: a pidfd each would leave the actor without files."""
    async with running(Echo, places) as echo, dialled("tokenizer", "scheduler", places) as (node, peer):
        before = len(os.listdir("/proc/self/fd"))
        raw = [Socket(node.context, zmq.DEALER, max_frame=MAX_FRAME) for _ in range(20)]
        opened = len(os.listdir("/proc/self/fd"))
        parent = os.getppid()
        for one in raw:
            one.raw.connect(places.endpoint("scheduler"))
            one.send_nowait(encode(Head(), Hello(role="admin", engine="e0", incarnation=1, pid=parent)))
            await one.recv_many()
        assert len(echo.mailbox.of_role("admin")) == 20
        assert echo.mailbox._exits.keys() == {parent}
        assert len(os.listdir("/proc/self/fd")) <= opened + 2 * 20 + 1  # both ends of the connections, and the watch
        for one in raw:
            one.send_nowait(encode(Head(1), Bye()))
        while echo.mailbox.of_role("admin"):
            assert (await peer.ask(Quiesce(epoch=8), Idle, deadline_s=5)).epoch == 8
        assert not echo.mailbox._exits
        for one in raw:
            one.close()
        assert before <= opened


async def hello_of(places: Places, hello: Hello, identity: bytes) -> Message:
    """What a mailbox says to a raw hello of the test's own making."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    raw = Socket(context, zmq.DEALER, max_frame=MAX_FRAME)
    try:
        raw.raw.setsockopt(zmq.ROUTING_ID, identity)
        raw.raw.connect(places.endpoint("scheduler"))
        raw.send_nowait(encode(Head(), hello))
        with trio.fail_after(10):
            (frames,) = await raw.recv_many(1)
        return decode(frames)[1]
    finally:
        raw.close()
        context.term()


async def test_a_newer_incarnation_of_another_process_waits_for_the_proven_exit_of_the_one_before(
    places: Places,
) -> None:
    """Else whoever says that it is the next one would have the first one's leases and slots given away."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as first:  # noqa: ASYNC220
        async with running(Echo, places) as echo:
            old = Hello(role="worker", engine="e0", incarnation=3, pid=first.pid)
            assert isinstance(await hello_of(places, old, b"worker/e0/3"), Welcome)
            (peer,) = echo.mailbox.of_role("worker")
            for newer in (3, 4, 1 << 40):
                new = Hello(role="worker", engine="e0", incarnation=newer, pid=os.getpid())
                answer = await hello_of(places, new, f"worker/e0/{newer}.9".encode())
                assert isinstance(answer, Refused)
                assert f"incarnation 3 is here (process {first.pid}); its exit is not proven" in answer.reason
            assert peer.alive
            first.kill()
            with trio.fail_after(10):
                await peer.wait_gone()
            assert echo.downs == [("worker/e0/3", True)]
            new = Hello(role="worker", engine="e0", incarnation=4, pid=os.getpid())
            assert isinstance(await hello_of(places, new, b"worker/e0/4"), Welcome)


async def test_who_does_not_hold_a_services_lock_is_not_that_service_while_somebody_does(places: Places) -> None:
    lock = Lock(places.run / "worker.lock", "the worker")
    async with running(Echo, places):
        impostor = Hello(role="worker", engine="e0", incarnation=9, pid=os.getppid())
        answer = await hello_of(places, impostor, b"worker/e0/9")
        assert isinstance(answer, Refused)
        assert f"is process {os.getpid()}, not {os.getppid()}" in answer.reason
        true = Hello(role="worker", engine="e0", incarnation=8, pid=os.getpid())
        assert isinstance(await hello_of(places, true, b"worker/e0/8"), Welcome)
    lock.release()


async def test_an_actor_whose_supervisor_dies_before_it_is_ready_still_ends_as_planned(places: Places) -> None:
    read, write = os.pipe()
    os.close(read)
    places.make()
    actor, ready = Echo(places, Config(), incarnation=1), trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: actor.serve(on_ready=ready, supervisor_fd=write))
        with trio.fail_after(30):
            await ready.wait()
        actor.request_stop()  # what its watchdog brings about
    os.close(write)
