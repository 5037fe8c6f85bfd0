"""What if X dies here: each row of the protocols' table, and the tests that prove it.

| X | at | then |
| --- | --- | --- |
| client | anywhere | attach lease ends; request cancelled after a grace unless detached |
| tokenizer | before Submit | client re-sends Generate: same id |
| tokenizer | after Journaled, before Accepted | re-send: answered Accepted |
| scheduler | before journal Accept | client re-sends |
| scheduler | after Result, before journal Step | recomputed from journaled tokens; nothing was emitted |
| scheduler | after journal Step, before Tokens | replayed to the detokenizer on hello |
| worker | in a step | pool empty; plan repeated after reload from the arena |
| worker | in a save copy | slot GRANTED, abandoned when the worker's exit is proven |
| worker | in a load copy | lease released by the scheduler; slot untouched |
| store | after GRANTED, before the grant arrives | scheduler times out; slot reclaimed by generation |
| store | after Commit arrives, before VALID | Commit sent again to the new incarnation, or a counted loss |
| store | in a disk write | slot still dirty in the arena; written again |
| store | between flush and LMDB | footer present, index absent: swept or rebuilt, never dangling |
| detokenizer | anywhere | scheduler replays; clients re-attach by token index |
| supervisor / honcho | anywhere | watchdog pipe closes: its child stops; nothing orphaned |
| all at once | anywhere | arena headers + segments + LMDB + journal; each rule above |
"""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

ROWS: dict[tuple[str, str], list[str]] = {
    ("client", "anywhere"): [
        "e2e/test_deaths.py::test_a_killed_client_ends_its_request_after_the_grace_unless_detached"
    ],
    ("tokenizer", "before Submit"): [
        "e2e/test_front_kills.py::test_the_tokenizer_dies_around_its_submit_and_the_client_sends_again",
    ],
    ("tokenizer", "after Journaled, before Accepted"): [
        "e2e/test_front_kills.py::test_the_tokenizer_dies_around_its_submit_and_the_client_sends_again",
        "service/test_tokenizer.py::test_the_same_generate_again_is_the_same_submit_again",
    ],
    ("scheduler", "before journal Accept"): [
        "service/test_scheduler_deaths.py::test_dying_at_each_named_step_loses_and_doubles_nothing",
        "unit/test_crash_points_journal.py::test_dying_at_every_step_of_a_journals_life",
    ],
    ("scheduler", "after Result, before journal Step"): [
        "service/test_scheduler_deaths.py::test_dying_at_each_named_step_loses_and_doubles_nothing",
        "unit/test_crash_points_journal.py::test_dying_at_every_step_of_a_journals_life",
    ],
    ("scheduler", "after journal Step, before Tokens"): [
        "service/test_scheduler_deaths.py::test_dying_at_each_named_step_loses_and_doubles_nothing",
        "property/test_journal_machine.py::JournalMachine",
    ],
    ("worker", "in a step"): [
        "e2e/test_deaths.py::test_death_at_a_step_loses_and_changes_nothing",
        "service/test_worker.py::test_killed_in_a_step_it_starts_with_an_empty_pool_and_the_arena_brings_its_blocks_back",
    ],
    ("worker", "in a save copy"): [
        "service/test_worker.py::test_killed_in_a_copy_its_exit_is_proven_and_nothing_was_answered",
        "unit/test_crash_points_store.py::test_p18_dying_at_every_step_of_the_store",
        "service/test_store.py::test_grants_of_a_dead_scheduler_wait_for_the_next_and_its_leases_end",
    ],
    ("worker", "in a load copy"): [
        "e2e/test_deaths.py::test_death_at_a_step_loses_and_changes_nothing",
        "service/test_store.py::test_a07_a_scheduler_that_opens_again_has_no_leases_left",
    ],
    ("store", "after GRANTED, before the grant arrives"): [
        "service/test_store_kill.py::test_killed_after_granting_the_slots_are_reclaimed",
        "unit/test_crash_points_store.py::test_p18_a_late_commit_of_an_older_generation_completes_nothing",
    ],
    ("store", "after Commit arrives, before VALID"): [
        "service/test_store_kill.py::test_killed_when_a_commit_arrives_the_engine_commits_to_the_next_store",
        "unit/test_crash_points_store.py::test_p18_dying_at_every_step_of_the_store",
    ],
    ("store", "in a disk write"): [
        "service/test_store_kill.py::test_p18_killed_while_it_writes_a_dirty_block_is_written_again",
        "unit/test_crash_points_store.py::test_p18_dying_at_every_step_of_the_store",
    ],
    ("store", "between flush and LMDB"): [
        "unit/test_disk_crash_points.py::test_p18_dying_at_every_step",
        "unit/test_disk_crash_points.py::test_dying_at_every_step_of_a_rebuild",
        "unit/test_crash_points_store.py::test_p18_losing_power_at_every_step_of_the_store",
    ],
    ("detokenizer", "anywhere"): [
        "e2e/test_front_kills.py::test_each_service_is_killed_in_turn_while_one_answer_streams",
    ],
    ("supervisor / honcho", "anywhere"): [
        "service/test_supervisor.py::test_i08_a_killed_supervisor_leaves_no_orphan",
        "e2e/test_deaths.py::test_honcho_killed_leaves_no_orphan",
    ],
    ("all at once", "anywhere"): [
        "e2e/test_deaths.py::test_everything_killed_at_once_goes_on_where_it_was",
        "unit/test_crash_points_store.py::test_dying_again_and_again_while_it_starts",
        "property/test_store_machine.py::StoreMachine",
    ],
}


def test_every_row_is_there() -> None:
    rows = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in str(__doc__).splitlines() if "|" in line]
    assert rows[2:] == list(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_the_tests_of_a_row_exist(row: tuple[str, str]) -> None:
    for reference in ROWS[row]:
        path, name = reference.split("::")
        assert re.search(rf"^(async )?(def|class) {name}\b", (TESTS / path).read_text(), re.MULTILINE), reference
