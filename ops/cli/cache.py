"""`perdure cache`: what becomes of cached KV on this home."""

import json
import shutil
import sys
from pathlib import Path

import click
import trio
from rich.console import Console

from ops.admin import admin, snapshots
from ops.cli.clearing import Cleared, NotCleared, clear_cache, encoded
from ops.cli.exits import FAULT, NO_STACK, REJECTED, fail, plain_errors
from ops.cli.inputs import chat_messages, decoded, parse_ids
from ops.cli.sampling import text
from ops.cli.tiers import show_tiers, tiers_of
from ops.client import new_id
from ops.waiting import stack_runs
from shared.config import Config, load_config
from shared.identity import LOCAL
from shared.messages.front import Generate
from shared.messages.store import ClearCache
from shared.paths import Lock, Places, Taken, default_home


@click.group()
def cache() -> None:
    """Manage cached KV."""


@cache.command()
@click.option("--model", is_flag=True, help="All of the model that runs, and nothing of others.")
@click.option("--user", metavar="NAME", help="All of a user of `perdure keys`; with --salt or a prefix: of theirs.")
@click.option("--salt", metavar="TEXT", help="What requests with this cache salt left.")
@click.option("--prefix", metavar="TEXT", help="What begins as this text does; see docs/cache.md.")
@click.option("--prefix-ids", metavar="IDS", help="The same as token ids, separated by commas or blanks.")
@click.option(
    "--prompt-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The same from a file."
)
@click.option("--chat", is_flag=True, help="The prefix is a user's message, through the model's chat template.")
@click.option("--system", help="A system message before it (implies --chat).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def clear(
    model: bool,
    user: str | None,
    salt: str | None,
    prefix: str | None,
    prefix_ids: str | None,
    prompt_file: Path | None,
    chat: bool,
    system: str | None,
    as_json: bool,
) -> None:
    """Drop cached KV on all tiers of the running stack: everything, or what the options name."""
    prompts = [given for given in (prefix, prefix_ids, prompt_file) if given is not None]
    if len(prompts) > 1 or (model and (prompts or user is not None or salt is not None)):
        raise click.UsageError("--model stands alone; of --prefix, --prefix-ids and --prompt-file give one")
    if (chat or system is not None) and (not prompts or prefix_ids is not None):
        raise click.UsageError("--chat and --system need the text of a prefix")
    with plain_errors():
        what = "prefix" if prompts else "salt" if salt is not None else "tenant" if user is not None else "all"
        asked = ClearCache(
            what="model" if model else what,  # type: ignore[arg-type]  # one of the literals
            principal=LOCAL if user is None else user,
            cache_salt=None if salt is None else text(salt),
            ids=parse_ids(prefix_ids) if prefix_ids is not None else b"",
        )
        request = None
        if prefix is not None or prompt_file is not None:
            said = text(prefix) if prefix is not None else decoded(prompt_file.read_bytes(), str(prompt_file))  # type: ignore[union-attr]
            source = {"messages": chat_messages(said, system)} if chat or system is not None else {"prompt": said}
            request = Generate(id=new_id(), **source)
        places = Places(default_home())
        if not stack_runs(places):
            fail(NO_STACK, f"no stack runs on {places.home}; start one, or remove all with `perdure cache purge`")
        try:
            cleared = trio.run(_clear, places, asked, request)
        except NotCleared as error:
            fail(REJECTED if error.refused else FAULT, f"the cache is not cleared: {error}")
            raise AssertionError("unreachable") from None
        _tell(cleared, as_json)


async def _clear(places: Places, asked: ClearCache, request: Generate | None) -> Cleared:
    if request is not None:
        asked = ClearCache(
            what=asked.what,
            principal=asked.principal,
            cache_salt=asked.cache_salt,
            ids=await encoded(places, request),
        )
    return await clear_cache(places, asked)


def _tell(cleared: Cleared, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"blocks": cleared.blocks, "bytes": cleared.bytes, "epoch": cleared.epoch}))
        return
    for tier, blocks in cleared.blocks.items():
        click.echo(f"{tier}: {blocks} blocks, {cleared.bytes[tier]} bytes cleared")


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def stats(as_json: bool) -> None:
    """Show what each tier holds, serves, saves and loses."""

    async def ask() -> dict[str, object]:
        async with admin(places) as node:
            found = await snapshots(node)
        return tiers_of({role: found[role].data if found[role] else {} for role in ("scheduler", "store")})  # type: ignore[union-attr]

    with plain_errors():
        places = Places(default_home())
        if not stack_runs(places):
            fail(NO_STACK, f"no stack runs on {places.home}; start one with `perdure serve`")
        tiers = trio.run(ask)
    if as_json:
        click.echo(json.dumps(tiers))
    else:
        show_tiers(tiers, Console())
    if tiers["away"]:
        sys.exit(NO_STACK)


@cache.command()
def purge() -> None:
    """Remove all cached KV: the files of arena and disk tier, or through the store while a stack runs."""
    with plain_errors():
        places = Places(default_home())
        config = load_config()
        if not places.home.is_dir():
            click.echo(f"{places.home} does not exist: nothing is cached")
            return
        locks: list[Lock] = []
        try:
            locks.append(Lock(places.lock, f"the stack on {places.home}"))
            if places.run.is_dir():
                locks.append(Lock(places.run / "store.lock", "the store of this home"))
            _remove(places, config)
        except Taken:
            try:
                _tell(trio.run(clear_cache, places, ClearCache(what="all")), as_json=False)
            except NotCleared as error:
                fail(FAULT, f"the cache is not purged: {error}")
        finally:
            for lock in reversed(locks):
                lock.release()


def _remove(places: Places, config: Config) -> None:
    """Nobody holds the home but us."""
    for tier, path in (("host", places.arena(config.store.arena_dir)), ("disk", places.store)):
        size = sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else 0
        size = path.stat().st_size if path.is_file() else size
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        click.echo(f"{tier}: {size} bytes removed ({path})")
