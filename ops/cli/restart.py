"""`perdure restart`: a planned restart of one service or of all, through their supervisors."""

import os
import signal

import click
import trio

from ops.admin import SERVICES, admin, snapshots, wait_serving
from ops.cli.exits import FAULT, NO_STACK, fail, plain_errors
from shared.lock_files import holder
from shared.paths import Places, default_home


@click.command()
@click.argument("service", required=False, type=click.Choice(SERVICES))
@click.option("--all", "every", is_flag=True, help="All services, one after the other.")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds to wait until it serves again.")
def restart(service: str | None, every: bool, timeout: float) -> None:
    """Restart SERVICE as planned: it drains, exits, and starts again; requests in flight go on."""
    if (service is None) == (not every):
        raise click.UsageError("name one service, or --all")
    names = list(SERVICES) if every else [str(service)]
    with plain_errors():
        for name in names:
            before, after = trio.run(_restart_one, Places(default_home()), name, timeout)
            click.echo(f"{name}: incarnation {before} -> {after}")


async def _restart_one(places: Places, name: str, timeout: float) -> tuple[int, int]:
    supervisor = supervisor_pid(places, name)
    async with admin(places) as node:
        old = (await snapshots(node))[name]
        os.kill(supervisor, signal.SIGHUP)
        with trio.move_on_after(timeout):
            while True:
                new = (await snapshots(node))[name]
                if new is not None and new.ready and (old is None or new.incarnation > old.incarnation):
                    await wait_serving(node, deadline_s=timeout)
                    return (old.incarnation if old else 0), new.incarnation
                await trio.sleep(0.05)  # a poll of status, not a wait for an effect of ours
    fail(FAULT, f"{name} was told to restart and does not serve after {timeout:g} s; see the stack's own output")
    raise AssertionError("unreachable")


def supervisor_pid(places: Places, name: str) -> int:
    """The process that holds the supervisor's lock; exit code 4 when there is none."""
    pid = holder(places.run / f"{name}.supervisor")
    if pid is None:
        fail(NO_STACK, f"no supervisor of {name} runs on {places.home}; start the stack with `perdure serve`")
        raise AssertionError("unreachable")
    return pid
