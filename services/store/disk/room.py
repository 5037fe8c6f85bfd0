"""How much more may be written: within the capacity, and above the free-space floor."""

from collections.abc import Callable
from typing import NamedTuple

from services.store.disk.footer import PAGE
from services.store.disk.slot_space import SPENT, UNKNOWN, USED, SlotSpace


class Limits(NamedTuple):
    """Bytes, as they were a moment ago: counted as ours beside the slots; that the floor leaves to us."""

    overhead: int
    above_floor: int


class Room:
    """`free_bytes`: (free, all) of the file system. `overhead`: bytes that count as ours beside segments."""

    def __init__(
        self,
        *,
        capacity: int,
        floor: float,
        max_slots: int,
        free_bytes: Callable[[], tuple[int, int]],
        overhead: Callable[[], int],
    ) -> None:
        self.capacity = capacity
        self.floor = floor
        self.max_slots = max_slots
        self._free_bytes = free_bytes
        self._overhead = overhead

    def limits(self) -> Limits:
        """Asks the file system; never under a lock, since a slow disk must not hold up who only counts. OSError."""
        free, total = self._free_bytes()
        return Limits(self._overhead(), free - int(self.floor * total))

    @staticmethod
    def taken(space: SlotSpace) -> int:
        """Bytes of the file system that segments hold."""
        return space.bytes(USED, UNKNOWN, SPENT) + PAGE * len(space.segments)

    def _fresh(self, space: SlotSpace, limits: Limits) -> int:
        """Bytes that may be taken from the file system; below 0: so many are taken too many."""
        return min(self.capacity - self.taken(space) - limits.overhead, limits.above_floor)

    def slots(self, space: SlotSpace, slot_bytes: int, limits: Limits) -> int:
        """How many more slots of a size may be written."""
        fresh = max(0, self._fresh(space, limits)) // slot_bytes + space.spent(slot_bytes)
        if self.max_slots:
            fresh = min(fresh, self.max_slots - space.count(USED, UNKNOWN))
        return max(0, fresh)

    def shortage(self, space: SlotSpace, slot_bytes: int, count: int, limits: Limits) -> int | None:
        """How many slots must be freed before `count` more fit; None when even one would not, were all freed."""
        used = space.count(USED, UNKNOWN)
        fresh = self._fresh(space, limits) // slot_bytes + space.spent(slot_bytes)
        missing = max(0, count - fresh)
        if self.max_slots:
            missing = max(missing, used + count - self.max_slots)
        return None if missing and -fresh >= used else missing

    def excess(self, space: SlotSpace) -> int:
        """Bytes that are taken beyond the capacity, as after it was lowered."""
        return max(0, self.taken(space) + self._overhead() - self.capacity)
