"""Bringing a prefix back from the store: look up, lease, wait for the disk part, copy, verify, attach.

    ASKED ── Found ──► (engine gives it blocks) ── copies of what is in the arena ──► over: what is held is attached,
      │ none, late            │ no room: lease back   ▲ │ Staged: more copies          what is lost is computed; a load
      ▼                       ▼                       └─┘ deadline: take what came     of nothing is a miss, no error
    goes on without        waits, asks again

Who owns what: the host slots are leased from Found to Taken or Release; the device blocks belong to the request and are
pinned while a copy writes into them, so that a request may end at any moment (W23). A load whose request is gone,
or whose cache was cleared meanwhile, is *void*: its copies end, nothing is attached, the lease goes back. What was
copied is given back by Taken while more is to come, so a prefix may be larger than the host tier.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from services.scheduler.breaker import Breaker
from services.scheduler.desk import Desk
from services.scheduler.kv.manager import KVManager
from services.scheduler.limits import MOST_LOAD_LOSSES
from services.scheduler.load import EXPECTED, HELD, HERE, LOST, SENT, Load
from services.scheduler.request import Request
from services.scheduler.timing import Timing
from shared.messages.base import pack_u32, unpack_u64
from shared.messages.engine import Copy, Transferred
from shared.messages.store import TIER_HOST, TIER_MISS, Found, Lookup, Release, Staged, Taken

WAIT_SHARE = 1 / 8
"""Of the time that computing a prefix takes, so much may be waited to hear whether the store has it."""


class Loader:
    """All loads.

    `unasked` is called whenever a request no longer waits for a lookup, `attach` when blocks [first, last) of a load
    are to become the request's computed ones.
    """

    kv: KVManager
    """The present worker's; set before the first load begins."""

    def __init__(
        self, desk: Desk, unasked: Callable[[Request], None], attach: Callable[[Load, int, int], None]
    ) -> None:
        self.breaker = Breaker()
        self._desk = desk
        self._unasked = unasked
        self._attach = attach
        self._asked: dict[int, Load] = {}
        self._begun: dict[int, Load] = {}
        self._leased: dict[int, Load] = {}
        self._copying: dict[int, tuple[Load, list[tuple[int, int]]]] = {}
        """By seq of a transfer: (index in the load, device block) of each copy."""
        self._probe = 0
        self.timing = Timing(desk)
        """What was measured, and what it says."""
        self.block_s = 0.0
        """Measured seconds that a block takes from disk to arena, smoothed; 0: unknown."""

    @property
    def active(self) -> int:
        """Requests that wait on the store."""
        return len(self._asked) + len(self._leased)

    @property
    def asking(self) -> set[int]:
        """Keys of the requests that wait for a lookup."""
        return {load.request.key for load in self._asked.values()}

    @property
    def copies(self) -> int:
        """Blocks being copied into the pool."""
        return sum(len(blocks) for _, blocks in self._copying.values())

    # --- asking -------------------------------------------------------------------------------------------------

    def ask(self, now: float, request: Request, first: int, names: list[bytes]) -> None:
        """Looks up the identities of the blocks from `first` on; the request waits for the answer, see `patience`."""
        seconds = self.patience(len(names))
        ticket = self._desk.ask(Lookup(identities=b"".join(names)), seconds)
        request.load = self._asked[ticket] = Load(request, ticket, first, len(names))
        self._desk.timers.set(("lookup", ticket), now + seconds)
        self._desk.counters.lookups += 1
        self._desk.counters.lookup_blocks += len(names)

    def patience(self, blocks: int) -> float:
        """Seconds that the store's answer is worth waiting for when it may spare computing so many blocks.

        At least `lookup_s`, at most `load_s`. A busy machine answers late and computes even later: a fixed limit would
        turn hits into misses just then. A store that never answers costs a share of what is computed anyway.
        """
        settings = self._desk.settings
        spared = self.timing.rates.compute_s(0, blocks * self.kv.block_tokens)
        return max(settings.lookup_s, min(WAIT_SHARE * spared, settings.load_s))

    def probe(self, now: float, name: bytes) -> None:
        """While the breaker is open: asks without anybody waiting."""
        seconds = self._desk.settings.store_s
        self._probe = self._desk.ask(Lookup(identities=name), seconds)
        self._desk.timers.set(("probe", self._probe), now + seconds)
        self.breaker.probing()

    def found(self, now: float, ticket: int, found: Found | None) -> Load | None:
        """An answer. Returns the load when it brought a lease and its request waits for room; see `begin`."""
        if ticket == self._probe and ticket:
            self._end_probe(now, answered=found is not None)
        load = self._unask(ticket)
        if load is None:
            if found is not None and found.lease:
                self._desk.counters.leases_late += ticket != self._probe
                self._desk.tell(Release(lease=found.lease))
            return None
        if found is None:
            self._desk.counters.lookups_unanswered += 1
            self._strike(now)
        elif not self._accept(load, found):
            if found.lease:
                self._desk.tell(Release(lease=found.lease))
        elif not found.lease:
            self.breaker.passed()
        if not load.lease:
            load.request.lookups_left = 0  # asked and answered, or not to be had: it goes on without
            return None
        load.found_at = load.moved_at = now
        return load

    def expire(self, now: float, kind: str, number: int) -> None:
        """A timer of kind lookup, probe or load."""
        if kind == "probe":
            self._end_probe(now, answered=False)
        elif kind == "lookup" and (load := self._unask(number)):
            load.request.lookups_left = 0
            self._desk.counters.lookup_timeouts += 1
            self._strike(now)
        elif kind == "load" and (load := self._begun.get(number)):
            load.timed_out = load.short = True
            self._desk.counters.load_timeouts += 1
            self._strike(now)
            self._stop_waiting(now, load)

    # --- loading ------------------------------------------------------------------------------------------------

    def refuse(self, load: Load) -> None:
        """There is no room for it now: the lease goes back, its request asks again when there is."""
        self._desk.counters.loads_without_room += 1
        self._desk.tell(Release(lease=load.lease))

    def begin(self, now: float, load: Load, begin: int, ahead: int) -> None:
        """Its request runs and owns blocks for all; blocks before `begin` are on the device already.

        `ahead`: tokens of others that are computed before its own. When computing is quicker, the lease goes back.
        """
        self.timing.choose(load, begin, ahead, self.kv.block_tokens)
        if load.way == "compute":
            self._desk.tell(Release(lease=load.lease))
            return
        load.request.load = self._begun[load.ticket] = self._leased[load.lease] = load
        self._desk.counters.loads += 1
        self._be_patient(now, load)
        self._go_on(now, load)

    def staged(self, now: float, staged: Staged) -> None:
        """More of a lease is in the arena, or will not come."""
        load = self._leased.get(staged.lease)
        if load is None:
            return
        offsets, checksums = unpack_u64(staged.offsets), unpack_u64(staged.checksums)
        last = min(staged.first + len(offsets), load.end)
        arrived = False
        for i in range(staged.first, last):
            if load.state[i] == EXPECTED:
                load.state[i] = LOST if staged.failed else HERE
                load.offsets[i], load.checksums[i] = offsets[i - staged.first], checksums[i - staged.first]
                load.short |= staged.failed
                arrived = True
        if arrived:
            load.moved_at = now
            self._be_patient(now, load)
        self._go_on(now, load)

    def transferred(self, now: float, message: Transferred) -> bool:
        """Outcome of copies; False when they are not ours."""
        known = self._copying.pop(message.seq, None)
        if known is None:
            return False
        load, blocks = known
        load.copying -= 1
        sums = unpack_u64(message.checksums)
        held = list[int]()
        for number, (i, block) in enumerate(blocks):
            self.kv.unpin(block)
            if message.ok[number] == 1 and sums[number] == load.checksums[i]:
                load.state[i] = LOST if load.void else HELD
                held.append(i)
            else:
                load.state[i] = LOST
                load.bad.append(i)
                self._desk.counters.load_blocks_bad += 1
        if load.missing and held and load.lease in self._leased:
            self._desk.tell(Taken(lease=load.lease, blocks=pack_u32(held)))
        self._go_on(now, load)
        return True

    # --- computing meanwhile ------------------------------------------------------------------------------------

    def allow(self, now: float) -> None:
        """Says of each loading request what the next plan may compute of it: holes that no load fills any more, and,
        while more is to come, what is sooner computed than loaded.
        """
        for load in self._begun.values():
            load.allowed = 0
            if load.request.load is load:
                size, planned = self.kv.block_tokens, load.request.planned
                load.allowed = (load.first + load.front) * size - planned
                if load.busy and load.allowed:
                    begun = (load.first + load.low) * size - planned  # of a block that a plan ends in
                    load.allowed = begun + min(load.allowed - begun, size * self.timing.beside(now, load))

    def planned(self, load: Load, count: int) -> None:
        """So many more tokens of its request are in a plan now: those blocks are not loaded any more."""
        if load.busy:
            self._desk.counters.beside_tokens += count
        load.pass_to(self.kv.blocks_for(load.request.planned) - load.first)

    def computed_step(self, now: float, tokens: int, start: int, seconds: float) -> None:
        """A step of so many seconds is over that computed `tokens` of a prompt behind `start` others."""
        self.timing.computed(now, tokens, start, seconds, [load for load in self._begun.values() if load.busy])

    def computed(self, now: float, load: Load) -> None:
        """A step with its request is over."""
        self._go_on(now, load)

    # --- losses -------------------------------------------------------------------------------------------------

    def drop(self, now: float, request: Request) -> None:
        """Its request ended, or gives its blocks up: nothing will be attached. A late answer is given back."""
        load = request.load
        if load is None:
            return
        if not self._unask(load.ticket):
            request.load = None
            self._void(now, load)

    def clear(self, now: float) -> None:
        """The cache was cleared: what was looked up before is not wanted any more."""
        for load in list(self._asked.values()):
            self.drop(now, load.request)
        for load in list(self._begun.values()):
            if not load.void:
                self._void(now, load)

    def store_down(self, now: float) -> None:
        """Leases are void; what is being copied is checked as ever."""
        for load in list(self._asked.values()):
            self._desk.counters.lookups_unanswered += 1
            self.drop(now, load.request)
        leased, self._leased = self._leased, {}
        for load in leased.values():
            load.lease, load.short = 0, True
            self._stop_waiting(now, load)
        if self._probe:
            self._end_probe(now, answered=False)

    def worker_down(self, now: float) -> None:
        """The pool is gone, and the copies into it. Who asked asks again: the next worker may have other names."""
        for load in list(self._asked.values()):
            self.drop(now, load.request)
        self._blame(self._copying.values())
        self._copying.clear()
        for load in list(self._begun.values()):
            load.copying = 0
            self.drop(now, load.request)
            self._go_on(now, load)

    def check_integrity(self) -> None:
        """What is loaded is not computed; raises with the numbers."""
        for load in self._begun.values():
            held, reach = load.next_held(), self.kv.blocks_for(load.request.planned) - load.first
            if not load.void and (load.request.load is not load or load.low < reach or 0 <= held < reach):
                raise RuntimeError(f"{load.request.id}: {reach} blocks computed, loaded are {held} on, from {load.low}")
            if load.copying != sum(other is load for other, _ in self._copying.values()):
                raise RuntimeError(f"{load.request.id}: {load.copying} transfers are counted as out")

    # --- inside -------------------------------------------------------------------------------------------------

    def _blame(self, copying: Collection[tuple[Load, list[tuple[int, int]]]]) -> None:
        """Counts a death in these copies for their requests; those that it happens to again are not made any more."""
        for load in dict.fromkeys(load for load, _ in copying):
            load.request.load_losses += 1
        for load, blocks in copying:
            if load.request.load_losses >= MOST_LOAD_LOSSES:
                load.bad += [index for index, _ in blocks]
        lethal = {load.ticket for load, _ in copying if load.request.load_losses >= MOST_LOAD_LOSSES}
        self._desk.counters.loads_lethal += len(lethal)

    def _unask(self, ticket: int) -> Load | None:
        load = self._asked.pop(ticket, None)
        if load is not None:
            self._desk.timers.cancel(("lookup", ticket))
            load.request.load = None
            self._unasked(load.request)
        return load

    def _accept(self, load: Load, found: Found) -> bool:
        """Takes over what was found; False for an answer of another clear epoch."""
        store, counters = self._desk.store, self._desk.counters
        if store is None or found.epoch < store.epoch:
            counters.lookups_stale += 1
            return False
        if found.epoch > store.epoch:
            self._desk.store = replace(store, epoch=found.epoch)
        offsets, checksums = list(unpack_u64(found.offsets)), list(unpack_u64(found.checksums))
        count = min(len(found.tiers), len(offsets), len(checksums), load.wanted)
        miss = found.tiers.find(TIER_MISS)
        count = count if miss < 0 else min(count, miss)
        load.lease = found.lease
        load.tiers = found.tiers[:count]
        load.state = bytearray(HERE if tier == TIER_HOST else EXPECTED for tier in load.tiers)
        load.offsets, load.checksums = offsets[:count], checksums[:count]
        counters.found_blocks += count
        return True

    def _go_on(self, now: float, load: Load) -> None:
        """Orders the copies that can be made now, gives the lease back when no more will be, attaches what joins."""
        request, ready = load.request, load.ready()
        if ready:
            assert request.seq is not None
            blocks = [(i, request.seq.blocks[load.first + i]) for i in ready]
            for i, block in blocks:
                self.kv.pin(block)
                load.state[i] = SENT
            copies = [Copy(block, load.offsets[i], load.checksums[i]) for i, block in blocks]
            self._copying[self._desk.transfer(copies, save=False)] = load, blocks
            load.copying += 1
        if load.busy:
            return
        self._give_back(now, load)
        self._join(load)

    def _give_back(self, now: float, load: Load) -> None:
        """Nothing more comes of its lease."""
        self._desk.timers.cancel(("load", load.ticket))
        self._desk.timers.cancel(("pace", load.ticket))
        if self._leased.pop(load.lease, None) is None:
            return
        self._desk.tell(Release(lease=load.lease, bad=pack_u32(load.bad)))
        load.lease = 0
        self.timing.loaded(now, load)
        if load.void or load.short:
            return
        self.breaker.passed()
        if on_disk := load.on_disk:
            block_s = max(0.0, load.moved_at - load.found_at) / on_disk
            self.block_s = block_s if not self.block_s else 0.7 * self.block_s + 0.3 * block_s

    def _join(self, load: Load) -> None:
        """Attaches the held blocks that what is computed has come to; the load is over when it holds no others."""
        request = load.request
        reached = request.computed == (load.first + load.low) * self.kv.block_tokens
        if not load.void and not request.in_flight and reached and (end := load.held_from_low()) > load.low:
            first = load.low
            load.pass_to(end)
            self._desk.counters.loaded_blocks += end - first
            self._attach(load, first, end)
        if not load.busy and load.next_held() < 0:
            self._begun.pop(load.ticket, None)
            if request.load is load:
                request.load = None
                request.load_losses = 0

    def _stop_waiting(self, now: float, load: Load) -> None:
        self._desk.counters.load_blocks_missing += load.give_up()
        self._go_on(now, load)

    def _void(self, now: float, load: Load) -> None:
        load.void = True
        load.give_up(held=True)
        self._desk.counters.loads_dropped += 1
        self._go_on(now, load)

    def _be_patient(self, now: float, load: Load) -> None:
        """Blocks that are still on disk are waited for from now on: by the measured rate, generously, but capped.

        As long as blocks arrive there is progress; so the wait begins anew with each, however many there are.
        """
        if missing := load.missing:
            cap = self._desk.settings.load_s
            seconds = min(cap, 0.05 + 4 * self.block_s * missing) if self.block_s else cap
            self._desk.timers.set(("load", load.ticket), now + seconds)

    def _strike(self, now: float) -> None:
        self.breaker.struck(now)
        self._desk.counters.breaker_opened = self.breaker.opened

    def _end_probe(self, now: float, *, answered: bool) -> None:
        self._desk.timers.cancel(("probe", self._probe))
        self._probe = 0
        self.breaker.probed(now, answered=answered)
