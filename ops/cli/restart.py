"""`perdure restart`: a planned restart of one service or of all, through their supervisors.

The same code, or newer code that still understands the old: service by service, nothing waits for long. Code with
other messages or another state format: all stop, then all start, because old and new must not meet; what was accepted
goes on from the journal.
"""

import os
import signal
from pathlib import Path

import click
import trio

from ops.admin import SERVICES, admin, snapshots, wait_serving
from ops.cli.exits import FAULT, NO_STACK, fail, plain_errors
from shared.config import load_config
from shared.lock_files import holder
from shared.node import Node
from shared.paths import Places, default_home
from shared.versions import Versions

POLL_S = 0.05


@click.command()
@click.argument("service", required=False, type=click.Choice(SERVICES))
@click.option("--all", "every", is_flag=True, help="All services, one after the other.")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds to wait until it serves again.")
def restart(service: str | None, every: bool, timeout: float) -> None:
    """Restart SERVICE as planned: it drains, exits, and starts again; requests in flight go on.

    All services stop and start together when the code on disk differs from theirs in messages or state format.
    """
    if (service is None) == (not every):
        raise click.UsageError("name one service, or --all")
    names = list(SERVICES) if every else [str(service)]
    with plain_errors():
        places, ours = Places(default_home()), Versions.announced(load_config().faults)
        supervisors = {name: supervisor_pid(places, name) for name in SERVICES}
        trouble = trio.run(_restart, places, ours, supervisors, names, timeout)
    if trouble:
        fail(FAULT, f"{trouble}; see the stack's own output")


async def _restart(
    places: Places, ours: Versions, supervisors: dict[str, int], names: list[str], timeout: float
) -> str:
    """What went wrong, or ""."""
    async with admin(places, protocol=ours.protocol) as node:
        theirs = await _others(node, ours)
        if theirs:
            click.echo(f"the code here has {ours}; running are {theirs}: all services stop, then all start")
            return await _restart_stack(node, list(supervisors.values()), timeout)
        for name in names:
            if not await _restart_one(node, name, supervisors[name], timeout):
                return f"{name} was told to restart and does not serve after {timeout:g} s"
        return ""


async def _others(node: Node, ours: Versions) -> str:
    """What running services have that we have not, in words; "" when all have what we have, or do not answer."""
    words = []
    for role, snapshot in (await snapshots(node)).items():
        refused = node.dial(role).refused_protocol
        if snapshot is None and refused not in (0, ours.protocol):
            words.append(f"{role} with messages {refused}")
        elif snapshot is not None and (theirs := Versions(snapshot.protocol, snapshot.state)) != ours:
            words.append(f"{role} with {theirs}")
    return ", ".join(words)


async def _restart_one(node: Node, name: str, supervisor: int, timeout: float) -> bool:
    old = (await snapshots(node))[name]
    os.kill(supervisor, signal.SIGHUP)
    with trio.move_on_after(timeout):
        while True:
            new = (await snapshots(node))[name]
            if new is not None and new.ready and (old is None or new.incarnation > old.incarnation):
                await wait_serving(node, deadline_s=timeout)
                click.echo(f"{name}: incarnation {old.incarnation if old else 0} -> {new.incarnation}")
                return True
            await trio.sleep(POLL_S)  # a poll of status, not a wait for an effect of ours
    return False


async def _restart_stack(node: Node, supervisors: list[int], timeout: float) -> str:
    """Every supervisor holds its service stopped until the last one has stopped. What went wrong, or ""."""
    for pid in supervisors:
        os.kill(pid, signal.SIGUSR1)
    with trio.move_on_after(timeout) as patience:
        while any(map(_has_child, supervisors)):  # noqa: ASYNC110 - of other processes
            await trio.sleep(POLL_S)
    for pid in supervisors:
        os.kill(pid, signal.SIGUSR2)
    if patience.cancelled_caught:
        return f"the services did not all stop within {timeout:g} s"
    if not await wait_serving(node, deadline_s=timeout):
        return f"the stack does not serve {timeout:g} s after its restart"
    for name, snapshot in (await snapshots(node)).items():
        click.echo(f"{name}: incarnation {snapshot.incarnation if snapshot else 0}")
    return ""


def _has_child(supervisor: int) -> bool:
    """Whether a supervisor has a service that has not provably exited; it starts its service from its main thread."""
    try:
        return bool(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text())
    except OSError:  # it is gone, and its service with it
        return False


def supervisor_pid(places: Places, name: str) -> int:
    """The process that holds the supervisor's lock; exit code 4 when there is none."""
    pid = holder(places.run / f"{name}.supervisor")
    if pid is None:
        fail(NO_STACK, f"no supervisor of {name} runs on {places.home}; start the stack with `perdure serve`")
        raise AssertionError("unreachable")
    return pid
