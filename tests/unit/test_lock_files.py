"""A pid in a lock file counts only while its process holds the lock."""

import os
from pathlib import Path

from shared.lock_files import holder
from shared.paths import Lock


def test_the_holder_is_known_while_it_holds_the_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "lock", "a test")
    assert holder(tmp_path / "lock") == os.getpid()
    lock.release()
    assert holder(tmp_path / "lock") is None


def test_a_pid_that_was_given_out_again_is_nobody(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(f"{os.getppid()}\n")
    assert holder(tmp_path / "lock") is None


def test_no_file_and_no_pid_are_nobody(tmp_path: Path) -> None:
    assert holder(tmp_path / "lock") is None
    (tmp_path / "lock").write_text("soon")
    assert holder(tmp_path / "lock") is None
