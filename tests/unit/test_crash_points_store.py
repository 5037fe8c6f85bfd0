"""The store dies at every single step of what it does with arena and disk together, then another takes over.

Each row of the protocols' table of deaths and its tests: `test_protocol_rows.py`.
"""

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.store.catalog.integrity import check_integrity
from shared.messages.store import COMMIT_DONE, COMMIT_STALE
from tests.durable_io import FAST, PAGE, Died, DurableIO
from tests.store_pair import Life, chain, identities, payload_of, root_of

A, B = root_of("a"), root_of("b")
OLD = chain("old", 3, A)
"""On both tiers."""
FRESH = chain("fresh", 2, A)
"""On the host only."""
OTHER = chain("other", 2, B)
"""On both tiers, of another root."""
NEW = chain("new", 1, A)
BOOT = "boot"


def prepared(home: Path, io: DurableIO, **options: int) -> Life:
    """A life with the blocks above."""
    life = Life(home, io, **options)
    life.save(OLD, A)
    life.save(OTHER, B)
    life.flush()
    life.save(FRESH, A)
    return life


@dataclass
class Action:
    """What a store does while it dies. `gone`: blocks that need not be there afterwards."""

    name: str
    do: Callable[[Life], None]
    gone: tuple[bytes, ...] = ()
    options: tuple[tuple[str, int], ...] = ()


def save(life: Life) -> None:
    life.save(NEW, A)


def write_behind(life: Life) -> None:
    life.flush()


def save_and_flush(life: Life) -> None:
    life.save(NEW, A)
    life.flush()


def clear_root(life: Life) -> None:
    life.clear(B)


def clear_all(life: Life) -> None:
    life.clear(None)


def abandon(life: Life) -> None:
    for grant in life.reserve(NEW, A):
        life.catalog.abandon(("e0", 1), grant.slot, grant.generation)


def load(life: Life) -> None:
    """From disk: what is clean leaves the host first."""
    for identity in identities(OLD):
        life.catalog.blocks.drop_host(life.catalog.blocks.entries.map.get(identity))
    assert life.load(identities(OLD)) == [payload_of(identity) for identity in identities(OLD)]


def quarantine(life: Life) -> None:
    """A block whose bytes went bad in memory."""
    assert life.arena is not None
    entries = life.catalog.blocks.entries
    offset = life.catalog.blocks.headers.offset(entries.host[entries.map.get(FRESH[1][0])])
    life.arena.payload(offset, 1)[0] ^= 1
    assert life.load(identities(FRESH)) == [payload_of(FRESH[0][0])]


def evict_host(life: Life) -> None:
    """More than fits: clean ones go, free of cost."""
    life.save(chain("more", 2, A), A)


def lose_dirty(life: Life) -> None:
    """A dirty leaf goes: the counted loss."""
    life.catalog.blocks.lose(life.catalog.blocks.entries.map.get(FRESH[1][0]))


def evict_disk(life: Life) -> None:
    """More than fits on disk."""
    life.save(chain("more", 2, A), A)
    life.flush()


def reopen(life: Life) -> None:
    """An orderly stop."""
    life.end(clean=True)


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """In memory where there is room: LMDB's own syncs are real, and on a disk most of the time."""
    with tempfile.TemporaryDirectory(prefix="perdure-test-", dir=FAST) as place:
        yield Path(place)


EVERYTHING = (*identities(OLD), *identities(FRESH), *identities(OTHER))
ACTIONS = [
    Action("save", save),
    Action("abandon", abandon),
    Action("write behind", write_behind),
    Action("load", load),
    Action("quarantine", quarantine, (FRESH[1][0],)),
    Action("evict host", evict_host, (), (("max_host", 7),)),
    Action("lose a dirty block", lose_dirty, (FRESH[1][0],)),
    Action("evict disk", evict_disk, EVERYTHING, (("max_disk", 6),)),
    Action("clear a root", clear_root, tuple(identities(OTHER))),
    Action("clear all", clear_all, EVERYTHING),
    Action("stop", reopen),
]
CUTS = tuple(range(8, 160, 8))
"""Bytes into a store: at each border of the 8 bytes that reach memory together."""


def steps_of(home: Path, action: Action) -> tuple[int, list[str]]:
    """(steps before the action, names of its steps)."""
    io = DurableIO()
    life = prepared(home, io, **dict(action.options))
    before = len(io.steps)
    action.do(life)
    steps = io.steps[before:]
    life.end()
    io.let_go()
    return before, steps


def deaths(before: int, steps: list[str], cuts: Sequence[int]) -> list[DurableIO]:
    """One for each step not done, one half done, and for a long store into the arena one for each cut."""
    every = []
    for number, name in enumerate(steps, before + 1):
        every.append(DurableIO(die_at=number))
        if name.startswith("put"):
            size = int(name.split()[1])
            every += [DurableIO(die_at=number, cut=cut) for cut in cuts if cut < size]
        elif name in ("write", "pwritev", "punch"):
            every.append(DurableIO(die_at=number, torn=True))
    return every


def after(home: Path, boot: str = BOOT, **options: int) -> dict[bytes, tuple[bool, bool]]:
    """The next life, and what it has; it works, and what it works on is there in the life after it."""
    life = Life(home, DurableIO(), boot=boot, **options)
    life.catalog.open_engine(("e0", 1), [])
    life.settle()
    seen = life.check(exact=boot == BOOT)
    later = chain("later", 2, A)
    assert life.save(later, A) == identities(later)
    life.flush()
    assert [life.load([identity]) for identity in identities(later)] == [[payload_of(i)] for i in identities(later)]
    check_integrity(life.catalog)
    life.end()
    life.io.let_go()
    return seen


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.name)
def test_p18_dying_at_every_step_of_the_store(fast_path: Path, action: Action) -> None:
    options = dict(action.options)
    before, steps = steps_of(fast_path / "count", action)
    assert steps, "an action without steps proves nothing"
    cuts = CUTS if action.do in (save, lose_dirty) else (112, 136)  # elsewhere: before the checksum, before the CRC
    for number, io in enumerate(deaths(before, steps, cuts)):
        home = fast_path / str(number)
        life = prepared(home, io, **options)
        with pytest.raises(Died):
            action.do(life)
        life.end()
        io.let_go()
        seen = after(home, **options)
        lost = [i.hex()[:8] for i in EVERYTHING if i not in seen and i not in action.gone]
        assert not lost, (
            f"died at {steps[io.die_at - before - 1]} ({io.die_at - before}, cut {io.cut}): {lost} are lost"
        )


def lose_pages(arena: Path, before: bytes, dice: random.Random | None) -> None:
    """An arena after a power loss: gone with the memory it lay in, or a file whose pages were written back at will."""
    if dice is None or not arena.exists():
        arena.unlink(missing_ok=True)
        return
    with arena.open("r+b") as file:
        for at in range(PAGE, len(before), PAGE):  # not the superblock: the worst case, a file that looks whole
            if dice.random() < 0.5:
                file.seek(at)
                file.write(before[at : at + PAGE])


@pytest.mark.parametrize("ending", ["killed", "power lost"])
@pytest.mark.parametrize("root", [B, None], ids=["a root", "all"])
def test_what_was_cleared_stays_cleared(fast_path: Path, root: bytes | None, ending: str) -> None:
    """A clear that was answered, then death at any step of what comes next."""
    cleared = EVERYTHING if root is None else identities(OTHER)

    def cleared_life(home: Path, io: DurableIO) -> tuple[Life, bytes]:
        life = prepared(home, io)
        pages = life.places.arena(str(home)).read_bytes()
        life.clear(root)
        return life, pages

    counting = DurableIO()
    life, _ = cleared_life(fast_path / "count", counting)
    before = len(counting.steps)
    save_and_flush(life)
    life.end()
    for number in range(before + 1, len(counting.steps) + 1):
        home, io = fast_path / str(number), DurableIO(die_at=number, torn=True)
        life, pages = cleared_life(home, io)
        with pytest.raises(Died):
            save_and_flush(life)
        life.end()
        boot = BOOT
        if ending == "power lost":
            dice, boot = random.Random(number), "the next boot"
            io.lose_power(dice)
            lose_pages(life.places.arena(str(home)), pages, dice)
        io.let_go()
        assert not set(after(home, boot=boot)) & set(cleared), f"a cleared block is back after step {number}"


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.name)
def test_p18_losing_power_at_every_step_of_the_store(fast_path: Path, action: Action) -> None:
    """With a new boot: what had been flushed is there; the arena is gone, or a file that looks whole, by turns."""
    options = dict(action.options)
    before, steps = steps_of(fast_path / "count", action)
    for number in range(1, len(steps) + 1):
        home = fast_path / str(number)
        io = DurableIO(die_at=before + number, torn=True)
        life = prepared(home, io, **options)
        pages = life.places.arena(str(home)).read_bytes()
        with pytest.raises(Died):
            action.do(life)
        life.end()
        dice = random.Random(number)
        io.lose_power(dice)
        lose_pages(life.places.arena(str(home)), pages, dice if number % 2 else None)
        seen = after(home, boot="the next boot", **options)
        lost = [i.hex()[:8] for i in (*identities(OLD), *identities(OTHER)) if i not in seen and i not in action.gone]
        assert not lost, f"died at {steps[number - 1]} ({number}): {lost} are lost"


def test_dying_again_and_again_while_it_starts(fast_path: Path) -> None:
    """A start dies at each step, the next one step later, with a torn header and an orphan on disk to begin with."""
    count = DurableIO()
    life = prepared(fast_path / "home", count)
    first = len(count.steps)
    life.save(NEW, A)
    life.flush()
    at = next(n for n, name in enumerate(count.steps, 1) if n > first and name == "index transaction")
    life.end()
    io = DurableIO(die_at=at)
    life = prepared(fast_path / "again", io)
    with pytest.raises(Died):
        save_and_flush(life)
    life.end()
    io.let_go()
    deaths = 0
    for step in range(1, 200):
        io = DurableIO(die_at=step, torn=step % 2 == 0)
        dying = Life.__new__(Life)
        try:
            dying.__init__(fast_path / "again", io)  # type: ignore[misc]
        except Died:
            deaths += 1
            dying.end()
            io.let_go()
            continue
        dying.end()
        io.let_go()
        break
    assert deaths > 5
    seen = after(fast_path / "again")
    assert set(EVERYTHING) | set(identities(NEW)) <= set(seen)


def test_p18_a_late_commit_of_an_older_generation_completes_nothing(fast_path: Path) -> None:
    """A grant of a dead store's; its slot has been granted again since."""
    life = Life(fast_path, DurableIO())
    (old,) = life.reserve(NEW[:1], A)
    life.end()
    life = Life(fast_path, DurableIO())
    life.catalog.open_engine(("e0", 1), [])  # nobody holds it any more
    (new,) = life.reserve(FRESH[:1], A)
    assert (new.slot, new.offset) == (old.slot, old.offset)
    assert new.generation > old.generation
    assert life.catalog.commit(("e0", 1), old.slot, old.generation, 7) == COMMIT_STALE
    assert not life.catalog.abandon(("e0", 1), old.slot, old.generation)
    assert life.load([FRESH[0][0]]) == []
    checksum = life.copy(FRESH[0][0], new)
    assert life.catalog.commit(("e0", 1), new.slot, new.generation, checksum) == COMMIT_DONE
    assert life.load([FRESH[0][0]]) == [payload_of(FRESH[0][0])]
    life.check()
    life.end()
