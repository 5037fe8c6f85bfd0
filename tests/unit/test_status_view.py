"""What `perdure status` says in words: nothing on a good day, and each trouble by its name."""

import io

import pytest
from rich.console import Console

from ops.cli.status_view import model, show, size, troubles
from shared.messages.hello import Snapshot


def a_snapshot(role: str, *, ready: bool = True, **data: object) -> Snapshot:
    facts = {"links": {}, "drops": {}, "faults": False} | data
    return Snapshot(role=role, engine="e0", incarnation=1, pid=7, uptime_s=3.0, ready=ready, data=facts)


def test_a_good_day_has_no_trouble() -> None:
    found = {
        "store": a_snapshot("store", tiers={"host": {"reason": ""}, "disk": {"reason": ""}}, notes=[]),
        "scheduler": a_snapshot("scheduler", worker_ready=True, store_open=True, store={"breaker": "closed"}),
        "worker": a_snapshot("worker", links={"scheduler": {"up": True}}, drops={"refused": 3}),
    }
    assert list(troubles(found)) == []


def test_each_trouble_is_told() -> None:
    found = {
        "store": a_snapshot(
            "store",
            tiers={"host": {"reason": "", "losses": 3, "quarantined": 2}, "disk": {"reason": "the disk is full"}},
            notes=["the arena is a file"],
        ),
        "scheduler": a_snapshot(
            "scheduler", worker_ready=False, store_open=False, store={"breaker": "open"}, ledger={"lost": 4}
        ),
        "worker": a_snapshot("worker", links={"scheduler": {"up": False}}),
        "tokenizer": a_snapshot("tokenizer", drops={"bad_message": 1200}),
        "detokenizer": None,
    }
    said = "\n".join(troubles(found))
    for words in (
        "disk tier: the disk is full",
        "3 blocks had to go",
        "2 damaged blocks",
        "the arena is a file",
        "no worker",
        "no store",
        "breaker open",
        "lacks 4 requests",
        "the worker does not reach the scheduler",
        "bad_message 1,200",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("exact", "said"), [(True, "numerics cpu-1/int8-1, exact;"), (False, "numerics cpu-1/int8-1, to a tolerance;")]
)
def test_the_model_is_shown_with_what_its_arithmetic_promises(exact: bool, said: str) -> None:
    facts = {"model": "m", "architecture": "llama", "backend": "cpu", "numerics": "cpu-1/int8-1", "exact": exact}
    worker = facts | {"kv_dtype": "fp16", "max_context": 8192}
    assert said in model({"worker": worker, "scheduler": {}})


def test_a_stack_that_is_starting_or_away_is_shown_with_what_there_is() -> None:
    out = io.StringIO()
    found = {"scheduler": a_snapshot("scheduler", ready=False), "worker": None, "store": a_snapshot("store")}
    show(found, Console(file=out, width=100))
    assert "starting" in out.getvalue()
    assert "away" in out.getvalue()


def test_sizes_are_for_people() -> None:
    assert [size(count) for count in (0, 1023, 1024, 1 << 20, 3 << 29, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.0 MiB",
        "1.5 GiB",
        "5.0 TiB",
    ]
