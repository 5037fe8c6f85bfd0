"""Any damage to the journal's bytes: what comes back is a prefix of what was written, or it says what is lost."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.journal import Journal, JournalFormat
from services.scheduler.journal_fold import Fold
from services.scheduler.journal_segment import segment_numbers, segment_path
from services.scheduler.records import AnyRecord
from shared.framing import frame, read_frames
from tests.journal_kit import accept, ended, filled, flat, step


@given(st.lists(st.binary(max_size=50), max_size=8), st.data())
def test_frames_are_read_up_to_the_first_that_is_none(payloads: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(map(frame, payloads))
    assert [bytes(p) for p in read_frames(whole).payloads] == payloads
    cut = data.draw(st.integers(0, len(whole)))
    part = [bytes(p) for p in read_frames(whole[:cut]).payloads]
    assert part == payloads[: len(part)]
    if whole:
        bit = data.draw(st.integers(0, 8 * len(whole) - 1))
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        part = [bytes(p) for p in read_frames(flipped).payloads]
        assert part == payloads[: len(part)]
        assert len(part) < len(payloads)


batches_of_requests = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=3), min_size=1, max_size=12
)


def story(steps: list[list[tuple[int, int]]]) -> list[list[AnyRecord]]:
    """Batches in which requests begin, draw tokens without a gap and end."""
    length: dict[int, int] = {}
    batches: list[list[AnyRecord]] = []
    for rows in steps:
        batch: list[AnyRecord] = [accept(key) for key, _ in dict(rows).items() if key not in length]
        placed = []
        for key, count in dict(rows).items():
            placed.append((key, length.get(key, 0), count))
            length[key] = length.get(key, 0) + count
        batches.append([*batch, step(*placed)])
    batches.append([ended(key, count) for key, count in length.items()])
    return batches


@given(batches_of_requests, st.integers(100, 600), st.sampled_from(["flip", "truncate", "extend", "drop"]), st.data())
def test_no_damage_gives_a_record_that_was_not_written_or_a_gap(
    steps: list[list[tuple[int, int]]], segment_bytes: int, how: str, data: st.DataObject
) -> None:
    batches = story(steps)
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "journal"
        filled(directory, batches, segment_bytes=segment_bytes)
        numbers = segment_numbers(directory)
        number = data.draw(st.sampled_from(numbers))
        first, newest = numbers[0], numbers[-1]
        path = segment_path(directory, number)
        content = bytearray(path.read_bytes())
        if how == "flip":
            bit = data.draw(st.integers(0, 8 * len(content) - 1))
            content[bit // 8] ^= 1 << bit % 8
        elif how == "truncate":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        elif how == "extend":
            content += data.draw(st.binary(min_size=1, max_size=64))
        path.write_bytes(content)
        if how == "drop":
            path.unlink()
        last = number == newest and how != "drop"
        journal = Journal(directory)
        try:
            recovered = journal.recover()
        except JournalFormat:
            raise AssertionError("a damaged header passed for another format") from None
        written = flat(batches)
        follows_without_gaps(recovered.records, batches)
        if recovered.records != written and not recovered.losses and not recovered.torn_bytes:
            assert last or (how == "drop" and number in (first, newest))  # cut at a frame's border: nothing could tell
        if last and how != "extend" and not recovered.losses:
            assert recovered.records == written[: len(recovered.records)]
        journal.append([accept(99)])
        journal.close()
        assert accept(99) in Journal(directory).recover().records


def follows_without_gaps(records: list[AnyRecord], batches: list[list[AnyRecord]]) -> None:
    """Every record was written (rows of a step may be fewer), in the old order, and no request has a gap."""
    written = iter(flat(batches))
    for record in records:
        assert any(record == old or is_part(record, old) for old in written)
    assert Fold().take(records) == records


def is_part(record: AnyRecord, old: AnyRecord) -> bool:
    rows, old_rows = getattr(record, "rows", None), getattr(old, "rows", None)
    return bool(rows) and bool(old_rows) and set(rows) <= set(old_rows)
