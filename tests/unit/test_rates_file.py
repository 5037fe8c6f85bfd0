"""The file of measured rates: nothing wrong with it is an error, and the old one stands until there is a new one."""

from pathlib import Path

import pytest

from services.scheduler.rates_file import MOST_BYTES, read_rates, write_rates

RATES = {"ab12": {"prefill": [[1.0, 0.5]], "host": [], "disk": [[8.0, 1e-3]], "compute_drag": 1.0, "load_drag": 1.5}}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    assert read_rates(path) == {}
    assert write_rates(path, RATES)
    assert read_rates(path) == RATES
    assert write_rates(path, {})
    assert read_rates(path) == {}
    assert [file.name for file in tmp_path.iterdir()] == ["rates.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b" " * (MOST_BYTES + 1)])
def test_what_is_no_such_file_counts_for_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rates.json"
    path.write_bytes(content)
    assert read_rates(path) == {}


def test_where_nothing_can_be_written_the_old_one_stands(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    assert write_rates(path, RATES)
    path.with_name("rates.json.part").mkdir()
    assert not write_rates(path, {})
    assert read_rates(path) == RATES
