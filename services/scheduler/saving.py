"""Write-through: each full block that is new on the device is offered to the store, copied, committed.

    offered ── Reserve ──► granted ── pin, Transfer ──► copied ── Commit ──► saved (a hint on the device block)
       │ gone from the device      │ have: saved          │ copy failed: Abandon    │ refused: stays unsaved
       ▼ before its turn           ▼ full, stale          ▼                         ▼
    a counted loss              stays unsaved          stays unsaved             offered again to the next store
                                   └ no parent: the whole line is offered again, once

Who owns the host slot: the store until it grants, this engine from the grant to Commit or Abandon. A device block
is pinned only while its copy is out: a store that hangs pins nothing (A07). Grants outlive the store's process
(`held`), copied ones also the worker's; those still being copied when the worker died are abandoned.
"""

from collections import OrderedDict
from collections.abc import Iterable

from services.scheduler.desk import Desk
from services.scheduler.grants import Grant, Offer
from services.scheduler.kv.manager import KVManager
from services.scheduler.kv.sequence import CachedBlock
from shared.messages.base import pack_u32, pack_u64, unpack_u32, unpack_u64
from shared.messages.engine import Copy, Transferred
from shared.messages.store import (
    COMMIT_DONE,
    RESERVE_FULL,
    RESERVE_GRANTED,
    RESERVE_HAVE,
    RESERVE_NO_PARENT,
    Abandon,
    Commit,
    Committed,
    Reserve,
    Reserved,
)

RETRY = ("retry", 0)
RETRY_MOST_S = 64.0
"""The longest time until a store that does not answer is offered the unsaved blocks again."""


class Saver:
    """All saves. At most two Reserves and `max_saving` blocks are on their way at a time."""

    ASKS = 2

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.kv: KVManager | None = None
        self._pool = 0
        self._offers: OrderedDict[bytes, Offer] = OrderedDict()
        self._asked: dict[int, tuple[list[Offer], int]] = {}
        self._copying: dict[int, list[Grant]] = {}
        self._copied: list[Grant] = []
        self._committing: dict[int, list[Grant]] = {}
        self._held: list[Grant] = []
        self._clearing = False
        self._lines_pay = True
        """Whether offering a whole line again is worth it: not since that was refused, until a save succeeds."""
        self._missed = 0
        """Questions in a row that went unanswered: the tree is offered as a whole when the store answers again, and
        else after a while, ever longer, so that an idle engine asks again too.
        """

    @property
    def active(self) -> int:
        """Blocks between Reserve and the end of their save."""
        asked = sum(len(offers) for offers, _ in self._asked.values())
        return asked + sum(map(len, self._copying.values())) + len(self._copied) + self.committing

    @property
    def committing(self) -> int:
        """Blocks whose Commit is not answered yet."""
        return sum(map(len, self._committing.values()))

    @property
    def copies(self) -> int:
        """Blocks being copied out of the pool."""
        return sum(map(len, self._copying.values()))

    # --- forward ------------------------------------------------------------------------------------------------

    def offer(self, root: bytes, blocks: Iterable[CachedBlock]) -> None:
        """Blocks that are new in the tree, parents first. While the store is away nothing is noted: the tree is
        offered as a whole when it comes back.
        """
        if self._desk.store is None or not self._desk.store.arena or not self._desk.settings.saves:
            return
        for cached in blocks:
            self._offers[cached.identity] = Offer(root, cached, self._pool)
        if self.kv is not None and len(self._offers) > 2 * self.kv.total:  # a store that hangs: what is gone is lost
            held = {name: offer for name, offer in self._offers.items() if self._holds(offer)}
            self._desk.counters.save_evicted += len(self._offers) - len(held)
            self._offers = OrderedDict(held)

    def go_on(self, now: float) -> None:
        """Asks for as many slots as may be on their way."""
        store, settings = self._desk.store, self._desk.settings
        while store is not None and not self._clearing and self._offers and len(self._asked) < self.ASKS:
            batch = self._next_batch(min(settings.save_batch, settings.max_saving - self.active))
            if not batch:
                return
            ticket = self._desk.ask(
                Reserve(
                    identities=b"".join(offer.cached.identity for offer in batch),
                    parents=b"".join(offer.cached.parent for offer in batch),
                    root=batch[0].root,
                    epoch=store.epoch,
                ),
                settings.store_s,
            )
            self._asked[ticket] = batch, store.epoch
            self._desk.timers.set(("reserve", ticket), now + settings.store_s)
            self._desk.counters.save_offered += len(batch)

    def reserved(self, now: float, ticket: int, reserved: Reserved | None) -> None:
        """Answer to a Reserve; grants that nobody awaits any more go back."""
        batch, epoch = self._asked.pop(ticket, ([], 0))
        self._desk.timers.cancel(("reserve", ticket))
        counters = self._desk.counters
        if reserved is None:
            counters.save_unanswered += len(batch)
            if batch:
                self._miss(now)
            return
        slots, generations = unpack_u32(reserved.slots), unpack_u64(reserved.generations)
        offsets = unpack_u64(reserved.offsets)
        granted, back = list[Grant](), list[tuple[int, int]]()
        for i, status in enumerate(reserved.status):
            offer = batch[i] if i < len(batch) else None
            if status == RESERVE_GRANTED:
                counters.save_granted += 1
                if offer is not None and self._holds(offer):
                    granted.append(Grant(offer, slots[i], offsets[i], generations[i], reserved.incarnation, epoch))
                else:
                    counters.save_evicted += offer is not None
                    back.append((slots[i], generations[i]))
            elif offer is not None:
                self._settle(offer, status, full=RESERVE_FULL in reserved.status)
        self._abandon(reserved.incarnation, back)
        self._copy(granted)
        if self._missed:
            self._sweep()

    def transferred(self, now: float, message: Transferred) -> bool:
        """Outcome of copies; False when they are not ours."""
        grants = self._copying.pop(message.seq, None)
        if grants is None:
            return False
        assert self.kv is not None
        sums, back = unpack_u64(message.checksums), list[Grant]()
        for i, grant in enumerate(grants):
            self.kv.unpin(grant.offer.cached.block)
            if message.ok[i] != 1:
                self._desk.counters.save_failed += 1
                grant.void = True
            if grant.void:
                back.append(grant)
            else:
                grant.checksum = sums[i]
                self._copied.append(grant)
        self._give_back(back)
        self._commit(now)
        return True

    def committed(self, now: float, ticket: int, committed: Committed | None) -> None:
        """Answer to a Commit. Without one the block counts as unsaved; the next store is offered it again."""
        grants = self._committing.pop(ticket, [])
        self._desk.timers.cancel(("commit", ticket))
        if committed is None:
            self._desk.counters.save_unanswered += len(grants)
            if grants:
                self._miss(now)
            self._give_back(grants)  # no effect on those that the Commit did reach
            return
        refused = list[Grant]()
        for grant, status in zip(grants, committed.status, strict=False):
            if status == COMMIT_DONE:
                self._desk.counters.save_committed += 1
                self._lines_pay = True
                self._mark(grant.offer)
            else:
                self._desk.counters.save_refused += 1
                refused.append(grant)
        self._give_back(refused)

    def expire(self, now: float, kind: str, ticket: int) -> None:
        """A timer of kind reserve, commit or retry."""
        if kind == "reserve":
            self.reserved(now, ticket, None)
        elif kind == "commit":
            self.committed(now, ticket, None)
        elif self._desk.store is not None:
            self._desk.counters.save_retries += 1
            self._offer_all()

    # --- losses and returns -------------------------------------------------------------------------------------

    def held(self) -> tuple[bytes, bytes]:
        """(slots packed u32, generations packed u64) of the grants that we hold; `store_up` answers in this order."""
        self._held = [*self._copied, *(grant for grants in self._copying.values() for grant in grants)]
        self._held = [grant for grant in self._held if not grant.void]
        return pack_u32(grant.slot for grant in self._held), pack_u64(grant.generation for grant in self._held)

    def store_down(self) -> None:
        """Unanswered questions are void; what is copied, or being copied, is held for the next incarnation."""
        for ticket in self._asked:
            self._desk.timers.cancel(("reserve", ticket))
        for ticket, grants in self._committing.items():
            self._desk.timers.cancel(("commit", ticket))
            self._copied += grants
        self._asked.clear()
        self._committing.clear()
        self._offers.clear()
        self._desk.timers.cancel(RETRY)

    def store_up(self, now: float, kept: bytes, incarnation: int, *, same_arena: bool) -> None:
        """A store serves us: grants that it kept go on, the others are void; all unsaved blocks are offered."""
        self._clearing = False
        held = {id(grant): i < len(kept) and kept[i] == 1 for i, grant in enumerate(self._held)}
        self._held = []
        for grant in [*self._copied, *(grant for grants in self._copying.values() for grant in grants)]:
            grant.incarnation = incarnation
            grant.void = grant.void or not held.get(id(grant), False)
        self._copied = [grant for grant in self._copied if not grant.void]
        if not same_arena and self.kv is not None:
            self.kv.forget_saved()
        self._commit(now)
        self._sweep()

    def worker_up(self, kv: KVManager) -> None:
        """A new pool."""
        self.kv = kv
        self._pool += 1

    def worker_down(self) -> None:
        """The pool is gone, its exit proven: half-made copies are abandoned, complete ones are still good."""
        for grants in self._copying.values():
            for grant in grants:
                grant.void = True
            self._give_back(grants)
        self._copying.clear()
        self._offers.clear()
        self.kv = None

    def clear(self) -> None:
        """The cache was cleared: nothing from before is published any more, nothing new before `cleared`."""
        self._clearing = True
        for ticket in self._asked:
            self._desk.timers.cancel(("reserve", ticket))
        self._asked.clear()
        self._offers.clear()
        for grants in self._copying.values():
            for grant in grants:
                grant.void = True
        self._give_back(self._copied)
        self._copied = []

    def cleared(self) -> None:
        """The store has cleared, or can't: whatever it was thought to hold is offered again."""
        self._clearing = False
        if self.kv is not None:
            self.kv.forget_saved()
        self._sweep()

    # --- inside -------------------------------------------------------------------------------------------------

    def _next_batch(self, room: int) -> list[Offer]:
        """Up to `room` offers of one root that are still on the device and unsaved."""
        batch = list[Offer]()
        while self._offers and len(batch) < room:
            identity, offer = next(iter(self._offers.items()))
            if not self._holds(offer):
                self._desk.counters.save_evicted += 1
            elif batch and offer.root != batch[0].root:
                break
            else:
                batch.append(offer)
            del self._offers[identity]
        return batch

    def _copy(self, grants: list[Grant]) -> None:
        if not grants:
            return
        assert self.kv is not None
        for grant in grants:
            self.kv.pin(grant.offer.cached.block)
        copies = [Copy(grant.offer.cached.block, grant.offset) for grant in grants]
        self._copying[self._desk.transfer(copies, save=True)] = grants

    def _commit(self, now: float) -> None:
        store, seconds = self._desk.store, self._desk.settings.store_s
        if store is None:
            return
        for epoch in sorted({grant.epoch for grant in self._copied}):
            grants = [grant for grant in self._copied if grant.epoch == epoch]
            ticket = self._desk.ask(
                Commit(
                    incarnation=store.incarnation,
                    epoch=epoch,
                    slots=pack_u32(grant.slot for grant in grants),
                    generations=pack_u64(grant.generation for grant in grants),
                    checksums=pack_u64(grant.checksum for grant in grants),
                ),
                seconds,
            )
            self._committing[ticket] = grants
            self._desk.timers.set(("commit", ticket), now + seconds)
        self._copied = []

    def _miss(self, now: float) -> None:
        """The store did not answer: what it was to save is offered again later."""
        self._missed += 1
        again = self._desk.settings.store_s * 2 ** min(self._missed - 1, 16)
        self._desk.timers.set(RETRY, now + min(again, RETRY_MOST_S))

    def _sweep(self) -> None:
        """The store answers: nothing is missed any more."""
        self._missed = 0
        self._desk.timers.cancel(RETRY)
        self._offer_all()

    def _offer_all(self) -> None:
        """Offers every unsaved block of the tree that is not on its way."""
        if self.kv is None:
            return
        busy = {offer.cached.identity for batch, _ in self._asked.values() for offer in batch}
        for group in [*self._copying.values(), *self._committing.values()]:
            busy.update(grant.offer.cached.identity for grant in group)
        for root, cached in self.kv.all_unsaved():
            if cached.identity not in busy:
                self.offer(root, [cached])

    def _settle(self, offer: Offer, status: int, *, full: bool) -> None:
        counters = self._desk.counters
        if status == RESERVE_HAVE:
            counters.save_have += 1
            self._mark(offer)
        elif status == RESERVE_FULL:
            counters.save_full += 1
            self._lines_pay = self._lines_pay and not offer.again
        elif status == RESERVE_NO_PARENT:
            counters.save_orphaned += 1
            if not full:  # else its parent has just been refused, and we know why
                self._offer_line(offer)
        else:
            counters.save_stale += 1

    def _offer_line(self, orphan: Offer) -> None:
        """The store has lost an ancestor of a block that it is thought to hold: offers the whole line once.

        Not when that has just failed: a full store would be offered ever longer lines for each new block.
        """
        if orphan.again:
            self._lines_pay = False
        elif self._lines_pay and self.kv is not None and self._holds(orphan):
            for cached in self.kv.lineage(orphan.root, orphan.cached.block):
                self.kv.mark_saved(cached.block, cached.identity, saved=False)
                self._offers[cached.identity] = Offer(orphan.root, cached, self._pool, again=True)

    def _holds(self, offer: Offer) -> bool:
        return (
            self.kv is not None
            and offer.pool == self._pool
            and self.kv.holds(offer.cached.block, offer.cached.identity)
        )

    def _mark(self, offer: Offer) -> None:
        if self.kv is not None and offer.pool == self._pool:
            self.kv.mark_saved(offer.cached.block, offer.cached.identity)

    def _give_back(self, grants: list[Grant]) -> None:
        """Abandons grants of the present incarnation; another one has abandoned them by itself."""
        store = self._desk.store
        if store is not None:
            ours = [(grant.slot, grant.generation) for grant in grants if grant.incarnation == store.incarnation]
            self._abandon(store.incarnation, ours)

    def _abandon(self, incarnation: int, slots: list[tuple[int, int]]) -> None:
        if slots:
            self._desk.counters.save_abandoned += len(slots)
            self._desk.tell(
                Abandon(
                    incarnation=incarnation,
                    slots=pack_u32(slot for slot, _ in slots),
                    generations=pack_u64(generation for _, generation in slots),
                )
            )
