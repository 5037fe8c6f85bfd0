"""`perdure cache`: what becomes of cached KV on this home."""

import shutil

import click
import trio

from ops.admin import admin, reach
from ops.cli.exits import FAULT, fail, plain_errors
from shared.config import load_config
from shared.messages.store import ClearCache, Cleared
from shared.paths import Lock, Places, Taken, default_home
from shared.peers import DeadlinePassed, PeerGone, PeerSlow, ProtocolViolation, RequestFailed

REACH_S = 5.0
CLEAR_S = 60.0


@click.group()
def cache() -> None:
    """Manage cached KV."""


@cache.command()
def purge() -> None:
    """Remove all cached KV: through the store while it runs, else the arena and the disk tier's files."""
    with plain_errors():
        places = Places(default_home())
        config = load_config()
        try:
            lock = Lock(places.run / "store.lock", "the store of this home") if places.run.is_dir() else None
        except Taken:
            cleared = trio.run(_clear, places)
            if isinstance(cleared, str):
                fail(FAULT, f"the cache is not purged: {cleared}")
                raise AssertionError("unreachable") from None
            for tier, blocks in cleared.blocks.items():
                click.echo(f"{tier}: {blocks} blocks, {cleared.bytes[tier]} bytes cleared")
            return
        for tier, path in (("host", places.arena(config.store.arena_dir)), ("disk", places.store)):
            size = sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else 0
            size = path.stat().st_size if path.is_file() else size
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            click.echo(f"{tier}: {size} bytes removed ({path})")
        if lock is not None:
            lock.release()


async def _clear(places: Places) -> Cleared | str:
    """Through the scheduler, which clears the device tier and then the store; the store alone when it is away.

    Why it could not be done, if so: an exception would come out of here wrapped in a group.
    """
    async with admin(places) as node:
        peer = await reach(node, "scheduler", deadline_s=REACH_S) or await reach(node, "store", deadline_s=REACH_S)
        if peer is None:
            return "the store of this home runs but does not answer; try again, or stop the stack first"
        try:
            return await peer.ask(ClearCache(what="all"), Cleared, deadline_s=CLEAR_S)
        except (PeerGone, PeerSlow, DeadlinePassed, RequestFailed, ProtocolViolation) as error:
            return str(error)
