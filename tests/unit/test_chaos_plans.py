"""What chaos does is a function of its seed, and leaves no service, pair, way or kind out."""

from itertools import islice, pairwise

import pytest

from ops.chaos.mix import DECK, Item, Mix
from ops.chaos.schedule import EVERYTHING, HONCHO, PAIRS, SERVICES, SUPERVISOR, kills_by_target, schedule

ITEMS = [Item((number, number + 1), 10) for number in range(40)]
LONG = [Item(tuple(range(100)), 5)]


@pytest.mark.parametrize(("kills", "least"), [(30, 1), (100, 3), (1000, 20)])
@pytest.mark.parametrize("seed", [0, 1, 2, 12345])
def test_every_service_and_pair_is_killed_often_enough(kills: int, least: int, seed: int) -> None:
    strikes = schedule(seed, kills)
    assert sum(strike.is_kill for strike in strikes) == kills
    found = kills_by_target(strikes)
    for target in (*SERVICES, *("+".join(pair) for pair in PAIRS), HONCHO, "everything", "+".join(SERVICES)):
        assert found[target] >= least, target


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_supervisor_way_and_moment_comes_up(seed: int) -> None:
    strikes = schedule(seed, 300)
    struck = {strike.name for strike in strikes}
    assert {SUPERVISOR + service for service in SERVICES} <= struck
    assert {strike.way for strike in strikes} == {"kill", "hang", "pause", "crash_loop"}
    for moment in ("ready", "traffic", "recovering"):
        assert sum(strike.moment == moment for strike in strikes) > 30
    assert {target for strike in strikes if strike.way == "hang" for target in strike.targets} == set(SERVICES)


def test_the_schedule_follows_from_the_seed_alone() -> None:
    assert schedule(5, 200) == schedule(5, 200)
    assert schedule(5, 200) != schedule(6, 200)
    assert schedule(5, 200)[:100] == schedule(5, 150)[:100]


def test_the_design_says_which_strikes_end_the_stack() -> None:
    for strike in schedule(3, 300):
        beyond = HONCHO in strike.targets or any(target.startswith(SUPERVISOR) for target in strike.targets)
        assert strike.ends_stack == (strike.is_kill and (beyond or strike.way == "crash_loop"))
        assert strike.name == "everything" or strike.targets != EVERYTHING


def test_no_service_is_killed_so_often_before_it_is_ready_that_its_supervisor_gives_up() -> None:
    for seed in range(20):
        streak = longest = 0
        for strike in schedule(seed, 300):
            streak = streak + 1 if strike.moment == "recovering" else 0
            longest = max(longest, streak)
        assert longest <= 2, seed


def test_orders_follow_from_the_seed_and_every_kind_comes_up() -> None:
    orders = list(islice(Mix(1, ITEMS, LONG), 3 * len(DECK)))
    assert orders == list(islice(Mix(1, ITEMS, LONG), 3 * len(DECK)))
    assert orders != list(islice(Mix(2, ITEMS, LONG), 3 * len(DECK)))
    assert {order.kind for order in orders} == set(DECK)
    for order in orders:
        assert (order.kind == "cancel") == (order.cancel_after > 0)
        assert (order.kind == "deadline") == (order.deadline_s is not None)
        assert (order.kind == "salt") == (order.salt is not None)
        assert (order.kind == "detached") == order.detached
        assert (order.kind == "long") == (order.item in LONG)


def test_popular_items_move_on() -> None:
    drawn = [order.item for order in islice(Mix(1, ITEMS, LONG), 2000) if order.kind == "plain"]
    assert len(set(drawn)) == len(ITEMS)
    assert sum(a == b for a, b in pairwise(drawn)) > 0
