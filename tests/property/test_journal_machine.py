"""The journal in long lives: requests come, draw, end and are forgotten; kills in mid-step, power losses, damage.

The model is the list of what was appended. After a kill all of it is there; after a power loss what a sync covered;
and always each request is a gapless prefix of its history, or it is gone with its Accept.
"""

import contextlib
import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.scheduler.journal import Journal
from services.scheduler.records import Accept, Ended, Step
from tests.durable_io import FAST, Died, DurableIO
from tests.journal_kit import accept, ended, step


class JournalMachine(RuleBasedStateMachine):
    """`tokens`: of each request that is in the journal for sure; `sure`: those a sync covered, with that many."""

    @initialize(segment=st.sampled_from([1, 400, 2000]))
    def begin(self, segment: int) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="perdure-test-", dir=FAST))
        self.segment = segment
        self.number = 0
        self.tokens: dict[int, int] = {}
        self.over: set[int] = set()
        self.sure: dict[int, int] = {}
        self.doubtful: set[int] = set()
        self.forgotten: set[int] = set()
        self.open()

    def open(self) -> None:
        self.io = DurableIO()
        self.journal = Journal(self.place / "journal", io=self.io, segment_bytes=self.segment)
        self.records = self.journal.recover().records

    def teardown(self) -> None:
        self.io.dead = False
        self.io.let_go()
        shutil.rmtree(self.place)

    @property
    def live(self) -> list[int]:
        return sorted(set(self.tokens) - self.over)

    # --- work: the model changes once the call has returned

    @rule(count=st.integers(1, 3))
    def accepts(self, count: int) -> None:
        keys = [self.number + n for n in range(count)]
        self.number += count
        self.doubtful |= set(keys)
        self.journal.append([accept(key) for key in keys])
        self.tokens |= dict.fromkeys(keys, 0)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def draws(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(self.live), min_size=1, max_size=4, unique=True))
        self.journal.append([step(*((key, self.tokens[key], 2) for key in keys))])
        for key in keys:
            self.tokens[key] += 2

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.live))
        self.journal.append([ended(key, self.tokens[key])])
        self.over.add(key)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def forgets(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.over)))
        self.over.discard(key)
        del self.tokens[key]
        self.sure.pop(key, None)
        self.forgotten.add(key)
        self.journal.forget(key)

    @rule()
    def syncs(self) -> None:
        self.journal.sync()
        self.sure = dict(self.tokens)

    # --- endings

    @rule(clean=st.booleans())
    def restarts(self, clean: bool) -> None:
        if clean:
            self.journal.close()
        self.io.let_go()
        self.open()
        self.check(self.tokens)

    @rule(after=st.integers(1, 4), torn=st.booleans(), power=st.booleans(), seed=st.integers(0, 999))
    def crash(self, after: int, torn: bool, power: bool, seed: int) -> None:
        """In mid-append or mid-sync, some steps from now."""
        self.io.die_at, self.io.torn = len(self.io.steps) + after, torn
        with contextlib.suppress(Died):
            self.accepts(1)
            self.syncs()
            self.accepts(2)
        if power:
            self.io.lose_power(random.Random(seed))
        self.io.let_go()
        self.open()
        self.check(self.sure if power else self.tokens, exact=False)
        if power:  # what is there now is all there is
            found = self.read()
            self.tokens = {key: count for key, (count, _) in found.items() if key not in self.forgotten}
            self.over = {key for key, (_, over) in found.items() if over and key in self.tokens}
            self.sure = dict(self.tokens)

    # --- what must hold

    def read(self) -> dict[int, tuple[int, bool]]:
        """Tokens of each request that came back, and whether it is over; AssertionError for a gap."""
        found: dict[int, tuple[int, bool]] = {}
        for record in self.records:
            if isinstance(record, Accept):
                found[record.key] = (0, False)
            elif isinstance(record, Step):
                for row in record.rows:
                    there, over = found[row.key]
                    assert row.start <= there, f"request {row.key}: {there} tokens, then {row.start}"
                    found[row.key] = (max(there, row.start + len(row.ids) // 4), over)
            elif isinstance(record, Ended):
                there, _ = found[record.key]
                assert record.finish.usage.completion_tokens <= there
                found[record.key] = (there, True)
        return found

    def check(self, promised: dict[int, int], *, exact: bool = True) -> None:
        found = self.read()
        for key, count in promised.items():
            assert key in found, f"request {key} is lost"
            assert found[key][0] >= count, f"request {key} lost tokens: {found[key][0]} of {count}"
        known = set(promised) | self.forgotten | (set() if exact else self.doubtful | set(self.tokens))
        assert set(found) <= known, "a request that nobody made"


TestJournal = JournalMachine.TestCase
