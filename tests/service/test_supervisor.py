"""The supervisor with a real service process."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from ops.admin import admin, reach
from ops.supervise.supervisor import session_nice
from shared.config import Config, StoreConfig, SuperviseConfig
from shared.messages.hello import Snapshot, Status
from shared.niceness import lower_process, yield_session
from shared.paths import Places
from shared.peers import Peer, wait_exit
from shared.testing import ended
from shared.welcome import SERVICES

SERVICE = "detokenizer"


def environ(places: Places, **settings: str) -> dict[str, str]:
    toy = {"PERDURE_HOME": str(places.home), "PERDURE_MODEL__SOURCE": "toy:1"}
    return os.environ | toy | settings


def launch(places: Places, *prefix: str, **settings: str) -> "subprocess.Popen[bytes]":
    command = [*prefix, sys.executable, "-m", "ops.supervise", SERVICE]
    return subprocess.Popen(command, env=environ(places, **settings), start_new_session=True)


@asynccontextmanager
async def supervised(places: Places, **settings: str) -> AsyncIterator["subprocess.Popen[bytes]"]:
    process = launch(places, **settings)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


async def next_life(places: Places, after: int) -> Snapshot:
    """The snapshot of the first incarnation above `after` that is ready."""
    with trio.fail_after(30):
        while True:
            async with admin(places) as node:
                peer = await reach(node, SERVICE, deadline_s=30)
                assert peer is not None
                if peer.incarnation > after:
                    snapshot = await peer.ask(Status(), Snapshot, deadline_s=10)
                    if snapshot.ready:
                        return snapshot
                await Peer.wait_gone(peer) if peer.incarnation <= after else await trio.sleep(0.02)


async def test_i07_a_killed_service_starts_again_alone(places: Places) -> None:
    async with supervised(places):
        first = await next_life(places, 0)
        os.kill(first.pid, signal.SIGKILL)
        second = await next_life(places, first.incarnation)
        assert (first.incarnation, second.incarnation) == (1, 2)
        assert second.pid != first.pid


async def test_a_hung_service_is_killed_and_started_again(places: Places) -> None:
    async with supervised(places, PERDURE_SUPERVISE__HANG_S="2"):
        first = await next_life(places, 0)
        os.kill(first.pid, signal.SIGSTOP)
        second = await next_life(places, first.incarnation)
        assert second.incarnation == 2


async def uptime_of(places: Places, *, at_least: float) -> Snapshot:
    """Its snapshot once the service has been up for so many seconds."""
    async with admin(places) as node:
        with trio.fail_after(30):
            while True:
                peer = await reach(node, SERVICE, deadline_s=30)
                assert peer is not None
                snapshot = await peer.ask(Status(), Snapshot, deadline_s=10)
                if snapshot.uptime_s >= at_least:
                    return snapshot
                await trio.sleep(0.05)  # a poll of the service's own clock


async def test_a_supervisor_that_was_stopped_itself_does_not_kill_a_healthy_service(places: Places) -> None:
    async with supervised(places, PERDURE_SUPERVISE__HANG_S="1.5") as process:
        first = await next_life(places, 0)
        for _ in range(2):
            process.send_signal(signal.SIGSTOP)
            snapshot = await uptime_of(places, at_least=(await uptime_of(places, at_least=0)).uptime_s + 2.5)
            process.send_signal(signal.SIGCONT)
            snapshot = await uptime_of(places, at_least=snapshot.uptime_s + 1)
            assert snapshot.incarnation == first.incarnation


async def test_sighup_is_a_planned_restart(places: Places) -> None:
    async with supervised(places) as process:
        first = await next_life(places, 0)
        process.send_signal(signal.SIGHUP)
        assert (await next_life(places, first.incarnation)).incarnation == 2


async def test_a_death_needs_no_new_interpreter_and_a_planned_restart_reads_the_code_anew(
    places: Places, tmp_path: Path
) -> None:
    starts = tmp_path / "starts"
    (tmp_path / "sitecustomize.py").write_text(f"open({str(starts)!r}, 'a').write('x')\n")  # once an interpreter
    async with supervised(places, PYTHONPATH=str(tmp_path)) as process:
        first = await next_life(places, 0)
        os.kill(first.pid, signal.SIGKILL)
        second = await next_life(places, first.incarnation)
        assert starts.read_text() == "x"
        process.send_signal(signal.SIGHUP)
        third = await next_life(places, second.incarnation)
        assert starts.read_text() == "xx"
        assert third.incarnation == 3


async def test_a_service_is_held_stopped_until_its_supervisor_may_become_the_next(places: Places) -> None:
    async with supervised(places) as process:
        first = await next_life(places, 0)
        process.send_signal(signal.SIGUSR2)  # nobody asked it to hold: nothing happens
        process.send_signal(signal.SIGUSR1)
        with trio.fail_after(30):
            await wait_exit(first.pid)
        process.send_signal(signal.SIGUSR2)
        second = await next_life(places, first.incarnation)
        assert second.incarnation == 2
        assert (places.run / f"{SERVICE}.supervisor").read_text() == f"{process.pid}\n"
        process.send_signal(signal.SIGUSR1)
        with trio.fail_after(30):
            await wait_exit(second.pid)
            process.terminate()  # a stop goes before a hold
            assert await ended(process) == 0


async def test_i08_sigterm_leaves_no_process_and_no_socket(places: Places) -> None:
    async with supervised(places) as process:
        first = await next_life(places, 0)
        process.terminate()
        with trio.fail_after(15):
            await wait_exit(process.pid)
            await wait_exit(first.pid)
        assert process.wait() == 0
        assert not (places.run / f"{SERVICE}.sock").exists()


async def test_i08_a_service_killed_at_the_end_of_its_grace_leaves_no_socket(places: Places) -> None:
    async with supervised(places, PERDURE_SUPERVISE__GRACE_S="0.2") as process:
        first = await next_life(places, 0)
        os.kill(first.pid, signal.SIGSTOP)  # it can't obey
        process.terminate()
        with trio.fail_after(15):
            await wait_exit(process.pid)
            await wait_exit(first.pid)
        assert not (places.run / f"{SERVICE}.sock").exists()


async def test_i08_a_killed_supervisor_leaves_no_orphan(places: Places) -> None:
    async with supervised(places) as process:
        first = await next_life(places, 0)
        process.kill()
        with trio.fail_after(15):
            await wait_exit(first.pid)


async def test_i08_when_the_parent_is_killed_everything_stops(places: Places) -> None:
    script = "import subprocess, sys; subprocess.Popen(sys.argv[1:]); sys.stdin.read()"
    command = [sys.executable, "-c", script, sys.executable, "-m", "ops.supervise", SERVICE]
    parent = subprocess.Popen(command, env=environ(places), stdin=subprocess.PIPE)  # noqa: ASYNC220
    first = await next_life(places, 0)
    supervisor = int((places.run / f"{SERVICE}.supervisor").read_text())
    parent.kill()
    with trio.fail_after(15):
        await wait_exit(supervisor)
        await wait_exit(first.pid)
    parent.communicate()


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"PERDURE_KV__POOL_BITES": "1"}, 2), ({"PERDURE_MODEL__SOURCE": "/nonexistent.gguf"}, 2)],
)
async def test_what_cannot_start_is_given_up_at_once(places: Places, settings: dict[str, str], code: int) -> None:
    async with supervised(places, **settings) as process:
        with trio.fail_after(60):
            await wait_exit(process.pid)
        assert process.wait() == code


async def test_i03_a_second_supervisor_of_one_home_is_refused(places: Places) -> None:
    async with supervised(places):
        await next_life(places, 0)
        second = launch(places)
        with trio.fail_after(30):
            await wait_exit(second.pid)
        assert second.wait() == 4


async def test_i08_a_stopped_service_does_not_outlive_its_killed_supervisor(places: Places) -> None:
    async with supervised(places) as process:
        first = await next_life(places, 0)
        os.kill(first.pid, signal.SIGSTOP)
        process.kill()
        with trio.fail_after(15):
            await wait_exit(first.pid)


async def test_a_yielding_service_gives_way_with_all_its_threads_once_it_is_ready(places: Places) -> None:
    async with supervised(places, PERDURE_SUPERVISE__NICE="7"):
        first = await next_life(places, 0)
        threads = [int(name) for name in os.listdir(f"/proc/{first.pid}/task")]
        assert len(threads) > 1
        with trio.fail_after(30):
            while {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} != {7}:  # noqa: ASYNC110
                await trio.sleep(0.02)  # a poll of the kernel: the supervisor hears of ready a moment later


def test_a_process_gives_way_with_its_threads_and_with_its_session() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    lower_process(process.pid, 7)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == 7
    group = Path(f"/proc/{process.pid}/autogroup")
    while not yield_session(process.pid, 7):  # the kernel takes one such change at a time
        os.sched_yield()
    assert not group.exists() or "nice 7" in group.read_text()
    process.communicate(b"\n")
    lower_process(process.pid, 7)  # gone: no error
    assert yield_session(process.pid, 7)


def test_front_services_yield_and_the_store_by_its_own_key_but_not_who_makes_the_steps() -> None:
    config = Config(supervise=SuperviseConfig(nice=7), store=StoreConfig(nice=3))
    found = {service: session_nice(service, config) for service in SERVICES}
    assert found == {"scheduler": 0, "worker": 0, "store": 3, "tokenizer": 7, "detokenizer": 7} | (
        {"gateway": 7} if "gateway" in SERVICES else {}
    )
