"""The journal dies at every step of appending, rotating, syncing, forgetting, recovering; by a kill, with the power."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.scheduler.journal import Journal
from services.scheduler.records import AnyRecord
from tests.durable_io import Died, DurableIO
from tests.journal_kit import accept, ended, flat, history, step
from tests.property.test_journal_damage import follows_without_gaps

BATCHES = [*history(3), [ended(1, 5)], [accept(7), step((7, 0, 1))], [step((7, 1, 2))]]
FORGOTTEN = (0, 1, 2)
"""Requests that are over, and forgotten once all of this has been appended; 7 lives on."""


@dataclass
class Story:
    """What had been told when it ended: batches appended, batches synced, requests forgotten."""

    appended: int = 0
    synced: int = 0
    forgotten: list[int] = field(default_factory=list)


def tell(directory: Path, io: DurableIO, story: Story) -> None:
    """A life: each batch fills a file or two; a sync after every third; some are forgotten; then a second life."""
    journal = Journal(directory, io=io, segment_bytes=400)
    journal.recover()
    for number, batch in enumerate(BATCHES, 1):
        journal.append(batch)
        story.appended = number
        if number % 3 == 0:
            journal.sync()
            story.synced = number
    for key in FORGOTTEN:
        story.forgotten.append(key)
        journal.forget(key)
    journal.sync()
    story.synced = story.appended
    journal.close()
    again = Journal(directory, io=io, segment_bytes=400)
    again.recover()
    again.append([step((7, 3, 1))])
    again.close()


def lives(records: list[AnyRecord], *, without: list[int]) -> list[AnyRecord]:
    """The records that speak of no forgotten request."""
    kept: list[AnyRecord] = []
    for record in records:
        rows = getattr(record, "rows", None)
        keys = {record.key} if rows is None else {row.key for row in rows}  # type: ignore[union-attr]
        if not keys & set(without):
            kept.append(record)
    return kept


def check(directory: Path, story: Story, *, power_lost: bool) -> None:
    """What comes back, comes back again, and the journal takes more."""
    journal = Journal(directory)
    recovered = journal.recover()
    written = [*BATCHES, [step((7, 3, 1))]]
    promised = written[: story.synced if power_lost else story.appended]
    expected = lives(flat(promised), without=story.forgotten)
    found = lives(recovered.records, without=story.forgotten)
    follows_without_gaps(recovered.records, written)
    assert found[: len(expected)] == expected, "a record that was promised is lost"
    if not power_lost:
        assert not recovered.losses
        assert len(found) <= len(lives(flat(written[: story.appended + 1]), without=story.forgotten))
    journal.append([accept(99)])
    journal.close()
    again = Journal(directory)
    assert again.recover().records == [*recovered.records, accept(99)]
    again.close()


def endings(directory: Path) -> int:
    io = DurableIO()
    tell(directory, io, Story())
    assert {"create", "write", "fdatasync", "sync_dir", "unlink"} <= set(io.steps)
    return len(io.steps)


@pytest.mark.parametrize("torn", [False, True])
def test_dying_at_every_step_of_a_journals_life(tmp_path: Path, torn: bool) -> None:
    for at in range(1, endings(tmp_path / "count") + 1):
        directory, story = tmp_path / str(at), Story()
        with pytest.raises(Died):
            tell(directory, DurableIO(die_at=at, torn=torn), story)
        check(directory, story, power_lost=False)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_losing_power_at_every_step_costs_at_most_what_was_not_synced(tmp_path: Path, seed: int) -> None:
    for at in range(1, endings(tmp_path / "count") + 1):
        directory, story = tmp_path / str(at), Story()
        io = DurableIO(die_at=at, torn=True)
        with pytest.raises(Died):
            tell(directory, io, story)
        io.lose_power(random.Random(seed * 1000 + at))
        check(directory, story, power_lost=True)


def test_dying_again_and_again_while_it_recovers(tmp_path: Path) -> None:
    """A torn tail and a new file are waiting; each start dies one step later than the one before."""
    story = Story()
    io = DurableIO(die_at=17, torn=True)
    with pytest.raises(Died):
        tell(tmp_path / "journal", io, story)
    for at in range(1, 30):
        dying = DurableIO(die_at=at, torn=True)
        journal = Journal(tmp_path / "journal", io=dying, segment_bytes=400)
        try:
            journal.recover()
            journal.append([step((7, 90 + at, 1))])  # behind a gap: never more than noise
        except Died:
            continue
        break
    check(tmp_path / "journal", story, power_lost=False)
