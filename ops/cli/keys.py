"""`perdure keys`: who may come in over TCP. Every change acts on a running stack within two seconds."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from ops.cli.exits import USAGE, fail, plain_errors
from shared.config import load_config
from shared.curve.allowed import AllowedKey, changing, check_user, key_id, read_allowed, write_allowed
from shared.curve.door import tcp_endpoint
from shared.curve.keys import ClientKey, is_key, load_or_create_server_key, new_pair, write_new
from shared.paths import Places, default_home

out_option = click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Where the key file goes [default: USER-ID.key]."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def keys() -> None:
    """Manage the keys of clients over TCP (see `front.tcp`)."""


@keys.command("list")
@json_option
def list_keys(as_json: bool) -> None:
    """List the keys that may come in."""
    with plain_errors():
        found = _read(_places())
        if as_json:
            rows = [{"id": key.id, "user": key.user, "public": key.public, "added": key.added} for key in found]
            click.echo(json.dumps(rows))
            return
        for key in found:
            click.echo(f"{key.id}  {key.added}  {key.user}")
        if not found:
            click.echo("no client has a key; `perdure keys add USER` makes one", err=True)


@keys.command()
@click.argument("user")
@out_option
@click.option("--public", help="Allow this public key, whose secret half its owner keeps; no key file is written.")
def add(user: str, out: Path | None, public: str | None) -> None:
    """Give USER a key, beside those that USER has; write it to a file that only you can read."""
    with plain_errors():
        _give(_places(), check_user(user), out, public, lambda kept: kept)


@keys.command()
@click.argument("user")
@out_option
def rotate(user: str, out: Path | None) -> None:
    """Give USER a new key and remove those that USER had."""
    with plain_errors():
        places = _places()
        if not any(key.user == user for key in _read(places)):
            fail(USAGE, f"user {user} has no key to rotate; `perdure keys add {user}` makes one")
        _give(places, check_user(user), out, None, lambda kept: tuple(key for key in kept if key.user != user))


@keys.command()
@click.argument("user_or_id")
def remove(user_or_id: str) -> None:
    """Remove one key by its id, or all keys of a user. Who uses it is disconnected."""
    with plain_errors():
        places = _places()
        with changing(places.keys):
            found = _read(places)
            kept = tuple(key for key in found if user_or_id not in (key.user, key.id))
            if len(kept) == len(found):
                fail(USAGE, f"no key has the id or user {user_or_id}; `perdure keys list` shows them")
            write_allowed(places.allowed_keys, kept)
        click.echo(f"removed {len(found) - len(kept)}, {len(kept)} left")


@keys.command()
def export() -> None:
    """Print as JSON what a client that makes its own key pair needs: the server's public key and the address."""
    with plain_errors():
        places, address = _places(), load_config().front.tcp
        with changing(places.keys):
            server = load_or_create_server_key(places.server_key)
        connect = tcp_endpoint(address, "tokenizer") if address else None
        click.echo(json.dumps({"server": server.public, "connect": connect}))


def _places() -> Places:
    places = Places(default_home())
    places.make()
    return places


def _read(places: Places) -> tuple[AllowedKey, ...]:
    try:
        return read_allowed(places.allowed_keys)
    except FileNotFoundError:
        return ()


def _give(
    places: Places,
    user: str,
    out: Path | None,
    public: str | None,
    keep: Callable[[tuple[AllowedKey, ...]], tuple[AllowedKey, ...]],
) -> None:
    """A new key on the list, beside those that `keep` leaves. The file is written first: no key without its owner."""
    if public is not None and not is_key(public):
        fail(USAGE, f"{public[:60]!r} is no CURVE public key; it is Z85 text of 40 characters")
    if public is not None and out is not None:
        fail(USAGE, "with --public no key file is written; leave out --out")
    with changing(places.keys):
        server = load_or_create_server_key(places.server_key)
        found = _read(places)
        pair = new_pair() if public is None else None
        new = pair.public if pair is not None else public or ""
        if any(key.public == new for key in found):
            fail(USAGE, f"key {key_id(new)} is on the list already")
        if pair is not None:
            out = out if out is not None else Path(f"{user}-{key_id(new)}.key")
            client = ClientKey(user=user, public=pair.public, secret=pair.secret, server=server.public)
            try:
                write_new(out, msgspec.json.format(msgspec.json.encode(client)) + b"\n")
            except FileExistsError:
                fail(USAGE, f"{out} exists; it is left alone, give another --out")
            except OSError as error:
                fail(USAGE, f"{out} can't be written: {error.strerror}; give another --out")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_allowed(places.allowed_keys, (*keep(found), AllowedKey(user=user, public=new, added=now)))
    click.echo(f"{key_id(new)}  {user}" + (f"  {out}" if out is not None else ""))
