"""What the world knows of workers lost: an account of its own beside the engine's."""

from collections.abc import Iterable, Mapping, Sequence

from shared.messages.engine import Plan
from tests.plan_rows import fed
from tests.sim_client import Sent

MOST = 3


class Losses:
    """By key of the request: how far any step brought it, and losses in a row without getting further."""

    def __init__(self) -> None:
        self._furthest: dict[int, int] = {}
        self._lost: dict[int, int] = {}
        self._judged: set[int] = set()

    def finished(self, plan: Plan, steps: int) -> None:
        """The worker has done so many steps of it."""
        for row in plan.rows:
            end = row.start + fed(row) + steps - 1
            if end > self._furthest.get(row.key, 0):
                self._furthest[row.key], self._lost[row.key] = end, 0

    def lost(self, plans: Iterable[Plan]) -> None:
        """The worker died, with these plans outstanding."""
        for key in {row.key for plan in plans for row in plan.rows}:
            self._lost[key] = self._lost.get(key, 0) + 1

    def forgotten(self) -> None:
        """The scheduler began anew: it counts from 0."""
        self._furthest.clear()
        self._lost.clear()

    def check_plan(self, plan: Plan, before: Sequence[Plan]) -> None:
        """Who was in a lost step is alone, also in time."""
        together = {row.key for one in [*before, plan] for row in one.rows}
        assert len(together) == 1 or not any(self._lost.get(key) for key in together)

    def check_ends(self, ids: Mapping[int, str], sent: Mapping[str, Sent]) -> None:
        """Who lost the worker so often in a row has ended by it, and nobody else has."""
        for key, id in ids.items():
            finish = sent[id].finish if id in sent else None
            if finish is None:
                assert self._lost.get(key, 0) < MOST
            elif finish.error is not None and finish.error[0] == "worker_lost" and key not in self._judged:
                self._judged.add(key)
                assert self._lost[key] == MOST
