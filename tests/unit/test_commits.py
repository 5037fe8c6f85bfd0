"""What a killed run's recorded commits say that a revived store can serve."""

from pathlib import Path

from services.store.commits import FIRST, CommitLog, whole_chains


def name(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_only_chains_down_to_a_first_block_count(tmp_path: Path) -> None:
    log = CommitLog(str(tmp_path / "commits"))
    log.append([(name(1), FIRST), (name(2), name(1)), (name(9), name(8)), (name(10), name(9))])
    log.append([(name(4), name(2))])
    with (tmp_path / "commits").open("ab") as file:
        file.write(name(5) + name(1)[:20])  # killed in mid-write
    assert whole_chains(tmp_path / "commits") == {name(1), name(2), name(4)}


def test_a_parent_that_was_published_later_completes_its_children(tmp_path: Path) -> None:
    CommitLog(str(tmp_path / "commits")).append([(name(3), name(2)), (name(2), name(1)), (name(1), FIRST)])
    assert whole_chains(tmp_path / "commits") == {name(1), name(2), name(3)}


def test_nothing_recorded_is_nothing_complete(tmp_path: Path) -> None:
    assert whole_chains(tmp_path / "commits") == set()
