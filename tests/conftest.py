"""Fixtures and settings that every test shares."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog

from shared.paths import Places

# Before torch is imported: as in a worker, its OpenMP threads sleep at a barrier instead of spinning, or tests beside
# other work become many times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

hypothesis.settings.register_profile("ci", max_examples=60, deadline=None, stateful_step_count=40)
hypothesis.settings.register_profile("many", max_examples=2000, deadline=None, stateful_step_count=80)
hypothesis.settings.load_profile("many" if os.environ.get("PERDURE_HYPOTHESIS") == "many" else "ci")


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A command that a test runs in this process makes the logs quiet: for that test alone."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    """A home of the test's own; its run dir and arena are removed with it."""
    home = Places(tmp_path / "home")
    home.make()
    yield home
    home.arena().unlink(missing_ok=True)
    shutil.rmtree(home.run, ignore_errors=True)
