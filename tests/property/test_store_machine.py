"""The whole store pair (arena, catalogue, disk tier, lane) on real files, with kills in mid-step and power losses.

The model knows which blocks were committed, which were told to be on disk, and which were cleared. Never wrong bytes;
what was committed is there after a kill, what was flushed after a power loss; what was cleared never comes back.
"""

import contextlib
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.durable_io import FAST, PAGE, Died, DurableIO
from tests.store_pair import Life, chain, identities, payload_of, root_of

ROOTS = (root_of("a"), root_of("b"))
labels = st.sampled_from("xyz")
chains = st.tuples(st.sampled_from(ROOTS), labels, st.integers(1, 4))


def doomed_by(root: bytes) -> set[bytes]:
    """All blocks that there can be of a root."""
    return {identity for label in "xyz" for identity in identities(chain(label, 4, root))}


class StoreMachine(RuleBasedStateMachine):
    """`held`: committed, and not cleared since. `flushed`: those that were on disk when a flush returned."""

    @initialize(host=st.sampled_from([0, 0, 5]), disk=st.sampled_from([0, 0, 6]))
    def begin(self, host: int, disk: int) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="perdure-test-", dir=FAST))
        self.caps = {"max_host": host, "max_disk": disk}
        self.boots = 0
        self.held: set[bytes] = set()
        self.flushed: set[bytes] = set()
        self.cleared: set[bytes] = set()
        self.open()

    def open(self) -> None:
        self.life = Life(self.place / "home", DurableIO(), boot=f"boot {self.boots}", **self.caps)
        self.pages = self.life.places.arena(str(self.place / "home")).read_bytes()

    def teardown(self) -> None:
        self.life.end()
        self.life.io.let_go()
        shutil.rmtree(self.place)

    @property
    def exact(self) -> bool:
        """Nothing is evicted."""
        return not any(self.caps.values())

    # --- work

    def save(self, drawn: tuple[bytes, str, int]) -> None:
        root, label, count = drawn
        blocks = chain(label, count, root)
        self.cleared -= set(identities(blocks))  # asked for again: it may be there again
        self.held |= set(self.life.save(blocks, root))

    def flush(self) -> None:
        self.life.flush()
        self.flushed = {identity for identity, (_, on_disk) in self.life.visible().items() if on_disk}

    def clear(self, root: bytes | None) -> None:
        doomed = set().union(*(doomed_by(each) for each in ROOTS if root in (None, each)))
        self.held -= doomed
        self.flushed -= doomed
        self.life.clear(root)
        self.cleared |= doomed

    @rule(drawn=chains)
    def saves(self, drawn: tuple[bytes, str, int]) -> None:
        self.save(drawn)

    @rule()
    def flushes(self) -> None:
        self.flush()

    @rule(root=st.sampled_from([None, *ROOTS]))
    def clears(self, root: bytes | None) -> None:
        self.clear(root)

    @rule(drawn=chains)
    def loads(self, drawn: tuple[bytes, str, int]) -> None:
        root, label, count = drawn
        names = identities(chain(label, count, root))
        got = self.life.load(names)
        assert got == [payload_of(identity) for identity in names[: len(got)]]
        if self.exact:
            there = next((n for n, identity in enumerate(names) if identity not in self.life.visible()), len(names))
            assert len(got) == there

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drops_a_clean_host_copy(self, data: st.DataObject) -> None:
        both = sorted(identity for identity, tiers in self.life.visible().items() if all(tiers))
        if both:
            entry = self.life.catalog.blocks.entries.map.get(data.draw(st.sampled_from(both)))
            self.life.catalog.blocks.drop_host(entry)

    # --- endings

    @rule(clean=st.booleans())
    def restarts(self, clean: bool) -> None:
        self.life.end(clean=clean)
        self.life.io.let_go()
        self.open()
        self.found(self.held)

    @rule(
        after=st.integers(1, 40),
        cut=st.integers(0, 160),
        torn=st.booleans(),
        power=st.booleans(),
        seed=st.integers(0, 1000),
        work=st.sampled_from(["save", "flush", "clear", "open"]),
        drawn=chains,
    )
    def crash(
        self, after: int, cut: int, torn: bool, power: bool, seed: int, work: str, drawn: tuple[bytes, str, int]
    ) -> None:
        """At the n-th step of some work, or right after it when it has fewer."""
        io, doomed = self.life.io, self.held & doomed_by(drawn[0])
        io.die_at, io.cut, io.torn = len(io.steps) + after, cut, torn
        works: dict[str, Callable[[], None]] = {
            "save": lambda: self.save(drawn),
            "flush": self.flush,
            "clear": lambda: self.clear(drawn[0]),
            "open": self.die_opening,
        }
        with contextlib.suppress(Died):
            works[work]()
        self.life.end()
        if power:
            self.lose_power(random.Random(seed))
        io.let_go()
        self.open()
        self.life.catalog.open_engine(("e0", 1), [])
        self.life.settle()
        if work == "clear" and not power and self.exact:
            left = doomed & set(self.life.visible())
            assert left in (set(), doomed), "a clear is half done"
            self.held = set(self.life.visible())
        self.found(self.flushed if power else self.held)
        if power:
            self.held &= set(self.life.visible())

    def die_opening(self) -> None:
        """A start that dies on the way."""
        self.life.end()
        io = self.life.io
        io.die_at = len(io.steps) + 1 + io.die_at % 12
        self.life = Life.__new__(Life)
        self.life.__init__(self.place / "home", io, boot=f"boot {self.boots}", **self.caps)  # type: ignore[misc]

    def lose_power(self, dice: random.Random) -> None:
        """What nothing synced is in any state; the arena is a file whose pages were written back at will."""
        self.life.io.lose_power(dice)
        self.boots += 1
        path = self.life.places.arena(str(self.place / "home"))
        if path.exists():
            with path.open("r+b") as file:
                for at in range(PAGE, len(self.pages), PAGE):
                    if dice.random() < 0.5:
                        file.seek(at)
                        file.write(self.pages[at : at + PAGE])

    def found(self, expected: set[bytes]) -> None:
        """After a start."""
        seen = set(self.life.visible())
        assert not seen & self.cleared, "a cleared block is back"
        if self.exact:
            assert expected <= seen, f"{len(expected - seen)} blocks are lost"

    @invariant()
    def tells_the_truth(self) -> None:
        self.life.check(exact=self.boots == 0)
        assert not set(self.life.visible()) & self.cleared


TestStore = StoreMachine.TestCase
if settings.get_current_profile_name() == "ci":  # a restart costs more here than a step elsewhere
    TestStore.settings = settings(max_examples=12, stateful_step_count=15)
