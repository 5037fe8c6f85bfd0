"""Chaos notices: each check is shown something that is wrong, and something that is right."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ops.chaos.campaign import Campaign
from ops.chaos.customers import Customers, Record
from ops.chaos.inspection import Inspection, Look, _imbalance, crashes
from ops.chaos.mix import Item, Mix, Order
from ops.chaos.models import Oracle, catalogue, toy
from ops.chaos.report import facts_of, spread, together, write
from ops.stack import Stack
from shared.messages.front import Finish, FinishReason, Timing, Usage
from shared.model.toy import toy_decode
from shared.paths import Places

ITEM = Item(tuple(range(40)), 12)
WANTED = list(Oracle(toy()).ids(ITEM))


def customers(places: Places) -> Customers:
    subject = toy()
    return Customers(places, subject, Oracle(subject), Mix(1, [ITEM], [ITEM]), lambda places: 0)


def record(
    kind: Any = "plain", ids: list[int] | None = None, reason: FinishReason = "length", cached: int = 16, **order: Any
) -> Record:
    ids = WANTED if ids is None else ids
    usage = Usage(len(ITEM.ids), len(ids), cached, {"device": cached, "host": 0, "disk": 0})
    finish = Finish(reason=reason, usage=usage, timing=Timing(0.0, 0.1, 0.2))
    return Record(Order(1, kind, ITEM, **order), "ab" * 16, 0, True, ids, toy_decode(ids), finish)


def judged(places: Places, one: Record) -> list[str]:
    found = customers(places)
    assert one.finish is not None
    found._judge(one, one.finish)
    return [violation.what for violation in found.violations]


@pytest.mark.parametrize(
    "right",
    [
        record(),
        record("cancel", WANTED[:5], "cancelled", cancel_after=4),
        record("cancel", cancel_after=4),
        record("deadline", [], "deadline", deadline_s=0.1),
        record("no_read", cached=0, no_read=True),
        record("salt", salt="north"),
    ],
)
def test_a_right_answer_is_right(places: Places, right: Record) -> None:
    assert judged(places, right) == []


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (record(ids=[*WANTED[:-1], WANTED[-1] ^ 1]), "wrong tokens"),
        (record(ids=WANTED[:-1]), "wrong tokens"),
        (record(ids=[*WANTED, WANTED[0]]), "wrong tokens"),
        (record("cancel", [WANTED[0], WANTED[1] ^ 1], "cancelled", cancel_after=1), "wrong tokens"),
        (record(ids=WANTED[:5], reason="error"), "wrong end"),
        (record(ids=WANTED[:5], reason="cancelled"), "wrong end"),
        (record("deadline", WANTED[:5], "cancelled"), "wrong end"),
        (record(cached=len(ITEM.ids)), "wrong usage"),
        (record("no_read", no_read=True), "no_read was read"),
        (record("salt", salt="only 7"), "a salt was shared"),
    ],
)
def test_a_wrong_answer_is_a_violation(places: Places, wrong: Record, what: str) -> None:
    assert what in judged(places, wrong)


def test_usage_and_text_are_compared_with_what_came(places: Places) -> None:
    one = record()
    assert one.finish is not None
    usage = replace_usage(one.finish, completion_tokens=len(WANTED) + 1)
    assert judged(places, replace(one, finish=usage)) == ["wrong usage"]
    usage = replace_usage(one.finish, cached_tokens=8)
    assert judged(places, replace(one, finish=usage)) == ["wrong usage"]
    assert judged(places, replace(one, text="other")) == ["wrong text"]


def replace_usage(finish: Finish, **changed: int) -> Finish:
    usage = finish.usage
    facts = {name: getattr(usage, name) for name in usage.__struct_fields__} | changed
    return Finish(reason=finish.reason, usage=Usage(**facts), timing=finish.timing)


async def test_turns_of_a_conversation_contain_the_answers_before_them() -> None:
    oracle = Oracle(toy())

    async def answer(item: Item) -> tuple[int, ...]:
        return oracle.ids(item)

    items, long_items = await catalogue(1, toy(), answer)
    assert (items, long_items) == await catalogue(1, toy(), answer)
    assert items != (await catalogue(2, toy(), answer))[0]
    continued = [
        (one, other)
        for one in items
        for other in items
        if other.ids[: len(one.ids) + one.tokens] == (*one.ids, *oracle.ids(one))
    ]
    assert len(continued) >= 2 * toy().families
    assert min(len(item.ids) for item in long_items) > max(len(item.ids) for item in items)


LOOK = Look(
    processes=16,
    files=dict.fromkeys(("store", "scheduler", "worker", "tokenizer", "detokenizer"), 30),
    bytes=dict.fromkeys(("store", "scheduler", "worker", "tokenizer", "detokenizer"), 50 << 20),
    own_files=20,
    run_names=frozenset({"store.lock"}),
    parts=[],
    arenas=["perdure-x-arena"],
)


@pytest.mark.parametrize(
    "grown",
    [
        replace(LOOK, processes=17),
        replace(LOOK, files=LOOK.files | {"store": 40}),
        replace(LOOK, bytes=LOOK.bytes | {"worker": 150 << 20}),
        replace(LOOK, own_files=40),
        replace(LOOK, run_names=LOOK.run_names | {"left.over"}),
        replace(LOOK, parts=["home/x.part"]),
        replace(LOOK, arenas=["perdure-x-arena", "perdure-x-arena2"]),
        replace(LOOK, arenas=[]),
    ],
)
def test_what_has_grown_since_the_first_look_is_named(grown: Look) -> None:
    with Stack(share_models=False) as stack:
        inspection = Inspection(stack)
        assert inspection.grown(LOOK) == []
        assert inspection.grown(LOOK) == []
        assert len(inspection.grown(grown)) == 1


def books(**changed: Any) -> dict[str, dict[str, Any]]:
    pool = {"free": 100, "cached": 60, "locked": 0, "total": 160}
    requests = dict.fromkeys(("waiting", "running", "loading", "leaving", "in_flight", "saving"), 0)
    host = {"granted": 0, "staging": 0, "used": 10, "capacity": 20}
    facts: dict[str, dict[str, Any]] = {
        "scheduler": {"pool": pool, "requests": requests},
        "store": {"tiers": {"host": host}, "leases": 0},
    }
    for part in (pool, requests, host, facts["store"]):
        part.update({name: value for name, value in changed.items() if name in part})
    return facts


def test_books_that_do_not_balance_are_told() -> None:
    assert _imbalance(books()) == ""
    for changed in ({"free": 99}, {"locked": 1}, {"saving": 1}, {"leases": 1}, {"granted": 1}, {"used": 21}):
        assert _imbalance(books(**changed)), changed


def test_a_death_that_nobody_ordered_is_found_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = '{"role": "supervise", "incarnation": 3, "code": %d, "planned": false, "event": "exited"}\n'
    log.write_text(line % -9 + line % 0 + line % 75 + line % 1)
    found, read = crashes(log, 0)
    assert len(found) == 1
    assert '"code": 1' in found[0]
    with log.open("a") as more:
        more.write(line % -11 + "12:00 worker.1 | Traceback (most recent call last):\n" + "half a l")
    found, read = crashes(log, read)
    assert len(found) == 2
    found, read = crashes(log, read)
    assert found == []
    with log.open("a") as more:
        more.write('{"event": "blocks_quarantined", "level": "warning"}\n{"event": "dropped", "why": "refused"}\n')
    assert len(crashes(log, read)[0]) == 1


def test_the_report_adds_campaigns_of_one_commit(tmp_path: Path) -> None:
    with Stack(share_models=False) as stack:
        campaign = Campaign(stack, toy(), 1, 30, 0.0, print)
        campaign.tally.strikes["store+worker"] += 2
        facts = facts_of(campaign, "abc+")
    assert facts["kills_by_pair"]["store+worker"] == 2
    assert facts["kills_by_service"]["store"] == 0
    write(facts, tmp_path)
    path = write(facts, tmp_path)
    assert path.name == "chaos-abc.json"
    assert path.read_text().count('"seed": 1') == 2
    assert together(path, "toy").startswith("2 runs on toy at this commit: 0 kills, each service at least 0")
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "p95": 3.0, "count": 3}
