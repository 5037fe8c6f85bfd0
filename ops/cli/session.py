"""A client for one command: dials the stack, says whom it waits for, turns Ctrl-C into Cancel and exit 130."""

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import trio

from ops.cli.exits import DEADLINE, FAULT, INTERRUPTED, NO_STACK, OK, REJECTED, fail
from ops.cli.waiting_line import WaitingLine
from ops.client import Client, KeyRefused, Server, ServiceAway, connected
from ops.waiting import stack_runs
from shared.config import Config, load_config
from shared.messages.front import Finish
from shared.paths import Places, default_home
from shared.peers import ProtocolViolation, RequestFailed


def say(text: str) -> None:
    """A line for people, on stderr."""
    click.echo(f"perdure: {text}", err=True)


class Interrupts:
    """Ctrl-C cancels `scope` (the session, or the answer that is being shown); a second one ends the process."""

    def __init__(self, scope: trio.CancelScope) -> None:
        self.scope = scope

    async def listen(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """For ever."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                if self.scope.cancel_called:  # it did not help: stdout may be stuck
                    os._exit(INTERRUPTED)
                self.scope.cancel()


Command = TypeVar("Command", bound=Callable[..., Any])
Work = Callable[[Client, Interrupts], Awaitable[int]]


def remote_options(command: Command) -> Command:
    """Adds --connect and --key; the command takes them as `connect` and `key` and hands them to `run_session`."""
    for option in (
        click.option(
            "--key",
            envvar="PERDURE_KEY",
            type=click.Path(path_type=Path),
            help="With --connect: the key file that `perdure keys add` wrote [env: PERDURE_KEY].",
        ),
        click.option(
            "--connect",
            envvar="PERDURE_CONNECT",
            metavar="tcp://HOST:PORT",
            help="Ask a stack over TCP instead of this home's [env: PERDURE_CONNECT].",
        ),
    ):
        command = option(command)
    return command


def run_session(work: Work, connect: str | None = None, key: Path | None = None) -> None:
    """Runs `work` with a client and ends the process with the code that it returns."""
    config = load_config()
    places = Places(default_home())
    server: Server | None = None
    if connect is not None:
        if key is None:
            raise click.UsageError("--connect needs --key FILE (or PERDURE_KEY); `perdure keys add` makes one")
        server = Server.at(connect, key)
    elif not stack_runs(places):
        fail(NO_STACK, f"no stack runs on {places.home}; start one with `perdure serve`")
    try:
        code = trio.run(_session, work, config, places, server)
    except ServiceAway as away:
        fail(NO_STACK, str(away))
    except KeyRefused as refused:
        fail(REJECTED, str(refused))
    except (RequestFailed, ProtocolViolation) as error:
        fail(FAULT, f"a service failed: {error}")
    if code == INTERRUPTED:
        os._exit(code)  # a thread may still wait for stdin or a pager; a clean exit would wait for it too
    sys.exit(code)


async def _session(work: Work, config: Config, places: Places, server: Server | None) -> int:
    timeout = config.supervise.recovery_timeout_s
    with trio.CancelScope() as scope:
        waiting = WaitingLine()
        try:
            async with connected(
                places, notice=waiting.notice, loading=waiting.loading, recovery_timeout_s=timeout, server=server
            ) as client:
                interrupts = Interrupts(scope)
                await client.nursery.start(interrupts.listen)
                return await work(client, interrupts)
        finally:
            waiting.end()
    return INTERRUPTED


def exit_code(finish: Finish) -> int:
    """How a command ends whose request ended so."""
    if finish.reason == "error":
        code, reason = finish.error or ("error", "unknown")
        say(f"the request failed ({code}): {reason}")
        return FAULT
    if finish.reason == "deadline":
        say("the deadline passed")
        return DEADLINE
    return INTERRUPTED if finish.reason == "cancelled" else OK
