"""Bringing a prefix back from the store: look up, lease, wait for the disk part, copy, verify, attach.

    ASKED ── Found ──► (engine gives it blocks) ── copies of what is in the arena ──► ended: k verified blocks
      │ none, late            │ no room: lease back      ▲ │ Staged: more copies        k = 0 is a miss, never
      ▼                       ▼                          └─┘ deadline: take what came   an error
    goes on without        waits, asks again

Who owns what: the host slots are leased from Found to Release; the device blocks belong to the request and are
pinned while a copy writes into them, so that a request may end at any moment (W23). A load whose request is gone,
or whose cache was cleared meanwhile, is *void*: its copies end, nothing is attached, the lease goes back.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from services.scheduler.breaker import Breaker
from services.scheduler.desk import Desk
from services.scheduler.kv.manager import KVManager
from services.scheduler.limits import MOST_LOAD_LOSSES
from services.scheduler.request import Request
from shared.messages.base import pack_u32, unpack_u64
from shared.messages.engine import Copy, Transferred
from shared.messages.store import TIER_DISK, TIER_HOST, TIER_MISS, Found, Lookup, Release, Staged

WAIT_SHARE = 1 / 8
"""Of the time that computing a prefix takes, so much may be waited to hear whether the store has it."""


@dataclass(eq=False)
class Load:
    """Leased blocks by index: block i holds tokens of the request's block `first` + i.

    `here`: in the arena now. Copies of [begin, sent) are ordered, `copying` transfers of them are out, `end` is
    where the run ends by what is known. `verified`: leading blocks from `begin` on whose bytes are right.
    """

    request: Request
    ticket: int
    first: int
    wanted: int
    found_at: float = 0.0
    lease: int = 0
    tiers: bytes = b""
    here: bytearray = field(default_factory=bytearray)
    offsets: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    arrived_at: float = 0.0
    begin: int = 0
    sent: int = 0
    end: int = 0
    copying: int = 0
    good: bytearray = field(default_factory=bytearray)
    bad: list[int] = field(default_factory=list)
    timed_out: bool = False
    cleared: bool = False
    void: bool = False

    @property
    def verified(self) -> int:
        """Leading blocks from `begin` on that hold what they should; none when the cache was cleared since."""
        if self.cleared:
            return 0
        stop = self.good.find(0, self.begin)
        return (stop if stop >= 0 else len(self.good)) - self.begin


class Loader:
    """All loads.

    `unasked` is called whenever a request no longer waits for a lookup, `ended` once for each load that was begun
    and whose request still wants it.
    """

    kv: KVManager
    """The present worker's; set before the first load begins."""

    def __init__(self, desk: Desk, unasked: Callable[[Request], None], ended: Callable[[float, Load], None]) -> None:
        self.breaker = Breaker()
        self._desk = desk
        self._unasked = unasked
        self._ended = ended
        self._asked: dict[int, Load] = {}
        self._leased: dict[int, Load] = {}
        self._copying: dict[int, tuple[Load, int, list[int]]] = {}
        self._probe = 0
        self.token_s = 0.0
        """Seconds that the present worker takes to compute a token; 0: none, or unknown."""
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
        return sum(len(blocks) for _, _, blocks in self._copying.values())

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
        spared = blocks * self.kv.block_tokens * self.token_s
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
        load.found_at = load.arrived_at = now
        return load

    def expire(self, now: float, kind: str, number: int) -> None:
        """A timer of kind lookup, probe or load."""
        if kind == "probe":
            self._end_probe(now, answered=False)
        elif kind == "lookup" and (load := self._unask(number)):
            load.request.lookups_left = 0
            self._desk.counters.lookup_timeouts += 1
            self._strike(now)
        elif kind == "load" and (load := self._leased.get(number)):
            load.timed_out = True
            self._desk.counters.load_timeouts += 1
            self._strike(now)
            self._stop_waiting(now, load)

    # --- loading ------------------------------------------------------------------------------------------------

    def refuse(self, load: Load) -> None:
        """There is no room for it now: the lease goes back, its request asks again when there is."""
        self._desk.counters.loads_without_room += 1
        self._desk.tell(Release(lease=load.lease))

    def begin(self, now: float, load: Load, begin: int) -> None:
        """Its request runs and owns blocks for all; blocks before `begin` are on the device already."""
        load.begin = load.sent = begin
        load.request.load = self._leased[load.lease] = load
        self._desk.counters.loads += 1
        missing = load.here.count(0, begin)
        if missing:
            self._desk.timers.set(("load", load.lease), now + self._patience(missing))
        self._go_on(now, load)

    def staged(self, now: float, staged: Staged) -> None:
        """More of a lease is in the arena."""
        load = self._leased.get(staged.lease)
        if load is None:
            return
        offsets, checksums = unpack_u64(staged.offsets), unpack_u64(staged.checksums)
        last = min(staged.first + len(offsets), len(load.here))
        if staged.failed:
            load.end = max(load.sent, min(load.end, staged.first))
        elif len(offsets) == len(checksums):
            for i in range(staged.first, last):
                load.here[i] = 1
                load.offsets[i], load.checksums[i] = offsets[i - staged.first], checksums[i - staged.first]
            load.arrived_at = now
        self._go_on(now, load)

    def transferred(self, now: float, message: Transferred) -> bool:
        """Outcome of copies; False when they are not ours."""
        known = self._copying.pop(message.seq, None)
        if known is None:
            return False
        load, first, blocks = known
        load.copying -= 1
        sums = unpack_u64(message.checksums)
        for i, block in enumerate(blocks, first):
            self.kv.unpin(block)
            if message.ok[i - first] == 1 and sums[i - first] == load.checksums[i]:
                load.good[i] = 1
            else:
                load.bad.append(i)
                load.end = min(load.end, i)
                self._desk.counters.load_blocks_bad += 1
        self._go_on(now, load)
        return True

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
        for load in self._begun():
            load.cleared = True
            load.end = min(load.end, load.sent)
            self._desk.counters.loads_dropped += 1
            self._go_on(now, load)

    def store_down(self, now: float) -> None:
        """Leases are void; what is being copied is checked as ever."""
        for load in list(self._asked.values()):
            self._desk.counters.lookups_unanswered += 1
            self.drop(now, load.request)
        for load in list(self._leased.values()):
            self._desk.timers.cancel(("load", load.lease))
            load.lease = 0
            self._stop_waiting(now, load)
        self._leased.clear()
        if self._probe:
            self._end_probe(now, answered=False)

    def worker_down(self, now: float) -> None:
        """The pool is gone, and the copies into it. Who asked asks again: the next worker may have other names."""
        for load in list(self._asked.values()):
            self.drop(now, load.request)
        begun = self._begun()
        self._blame(self._copying.values())
        self._copying.clear()
        for load in begun:
            load.copying = 0
            self.drop(now, load.request)

    # --- inside -------------------------------------------------------------------------------------------------

    def _blame(self, copying: Collection[tuple[Load, int, list[int]]]) -> None:
        """Counts a death in these copies for their requests; those that it happens to again are not made any more."""
        for load in dict.fromkeys(load for load, _, _ in copying):
            load.request.load_losses += 1
        for load, first, blocks in copying:
            if load.request.load_losses >= MOST_LOAD_LOSSES:
                load.bad += range(first, first + len(blocks))
        lethal = {load.ticket for load, _, _ in copying if load.request.load_losses >= MOST_LOAD_LOSSES}
        self._desk.counters.loads_lethal += len(lethal)

    def _begun(self) -> list[Load]:
        """Loads that have blocks: leased ones, and those whose store is gone but whose copies are out."""
        copying = [load for load, _, _ in self._copying.values()]
        return list(dict.fromkeys([*self._leased.values(), *copying]))

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
        load.here = bytearray(tier == TIER_HOST for tier in load.tiers)
        load.offsets, load.checksums = offsets[:count], checksums[:count]
        load.good = bytearray(count)
        load.end = count
        counters.found_blocks += count
        return True

    def _go_on(self, now: float, load: Load) -> None:
        ready = load.sent
        while ready < load.end and load.here[ready]:
            ready += 1
        if ready > load.sent and not load.void:
            assert load.request.seq is not None
            blocks = load.request.seq.blocks[load.first + load.sent : load.first + ready]
            for block in blocks:
                self.kv.pin(block)
            copies = [Copy(block, load.offsets[i], load.checksums[i]) for i, block in enumerate(blocks, load.sent)]
            seq = self._desk.transfer(copies, save=False)
            self._copying[seq] = load, load.sent, blocks
            load.copying += 1
            load.sent = ready
        if not load.copying and (load.void or load.sent >= load.end):
            self._finish(now, load)

    def _stop_waiting(self, now: float, load: Load) -> None:
        self._desk.counters.load_blocks_missing += max(0, load.end - load.sent)
        load.end = min(load.end, load.sent)
        self._go_on(now, load)

    def _void(self, now: float, load: Load) -> None:
        load.void = True
        load.end = min(load.end, load.sent)
        self._desk.counters.loads_dropped += 1
        self._desk.timers.cancel(("load", load.lease))
        self._go_on(now, load)

    def _finish(self, now: float, load: Load) -> None:
        if self._leased.get(load.lease) is load:
            del self._leased[load.lease]
            self._desk.timers.cancel(("load", load.lease))
            self._desk.tell(Release(lease=load.lease, bad=pack_u32(load.bad)))
        if load.void:
            return
        load.request.load = None
        load.request.load_losses = 0
        on_disk = load.tiers.count(TIER_DISK, load.begin)
        if not load.timed_out and all(load.here):
            self.breaker.passed()
            if on_disk:
                block_s = max(0.0, load.arrived_at - load.found_at) / on_disk
                self.block_s = block_s if not self.block_s else 0.7 * self.block_s + 0.3 * block_s
        self._desk.counters.loaded_blocks += load.verified
        self._ended(now, load)

    def _patience(self, missing: int) -> float:
        """Seconds that blocks still on disk are waited for: by the measured rate, generously, but capped."""
        cap = self._desk.settings.load_s
        return min(cap, 0.05 + 4 * self.block_s * missing) if self.block_s else cap

    def _strike(self, now: float) -> None:
        self.breaker.struck(now)
        self._desk.counters.breaker_opened = self.breaker.opened

    def _end_probe(self, now: float, *, answered: bool) -> None:
        self._desk.timers.cancel(("probe", self._probe))
        self._probe = 0
        self.breaker.probed(now, answered=answered)
