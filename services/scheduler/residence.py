"""Who lives in the pool: admission, growth, publication, retraction, and sharing of what is being computed.

Room is given by these rules:
- admission takes the blocks of the whole sequence so far, all or none, and leaves one block for each running
  request, so that a newcomer is not retracted by the next decode step;
- while an aged request waits for room, younger ones may together grow only as large as leaves its room free: when
  those older than it have ended, it fits;
- a decode that finds no block evicts cached leaves first (`KVManager.grow`), then the newest request gives way,
  down to itself: the oldest one always goes on, so everything ends;
- what lacks only because copies hold it is waited for.

Sharing in flight (F05): the identities of the blocks that a running request is about to compute or load are
noted; one that needs the same block next waits for it instead. It waits only for running requests, and what a
request leaves behind unfinished is forgotten with it, so no wait is for ever.
"""

from collections.abc import Iterable

from services.scheduler.desk import Desk
from services.scheduler.kv.manager import KVManager
from services.scheduler.kv.sequence import Sequence
from services.scheduler.load import Load
from services.scheduler.loading import Loader
from services.scheduler.request import Request
from services.scheduler.saving import Saver
from shared.messages.store import TIER_DISK, TIER_HOST
from shared.scope import Scope


class Residence:
    """Everything with blocks. `running` by key; `leaving`: ended ones whose blocks outstanding plans use."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.kv: KVManager | None = None
        self.saver = Saver(desk)
        self.loader = Loader(desk, self.forget, self._attach)
        self.running: dict[int, Request] = {}
        self.leaving: dict[int, Request] = {}
        self._makers: dict[bytes, int] = {}

    # --- the pool -----------------------------------------------------------------------------------------------

    def worker_up(self, kv: KVManager, fingerprint: bytes, token_s: float) -> None:
        """A new, empty pool of a worker of some kind; computing a token takes so many seconds."""
        self.kv = self.loader.kv = kv
        self.loader.timing.worker_up(fingerprint, token_s)
        self.saver.worker_up(kv)

    def worker_down(self, now: float) -> list[Request]:
        """The pool is gone; returns who ran in it, oldest first."""
        self.loader.worker_down(now)
        self.saver.worker_down()
        lost = sorted(self.running.values(), key=lambda request: request.key)
        for request in [*lost, *self.leaving.values()]:
            request.lost_pool()
        self.running.clear()
        self.leaving.clear()
        self._makers.clear()
        self.kv = None
        return lost

    # --- coming -------------------------------------------------------------------------------------------------

    def cached_blocks(self, request: Request) -> int:
        """Leading blocks that it would find on the device; a question only."""
        if not self._reads(request):
            return 0
        assert self.kv is not None
        match = self.kv.match(request.root, request.tokens, len(request.tokens) - 1, touch=False)
        return match.tokens // self.kv.block_tokens

    def wanted_blocks(self, request: Request) -> int:
        """Leading blocks that it may find anywhere: one token must be left to compute (W04)."""
        if not self._reads(request):
            return 0
        assert self.kv is not None
        return (len(request.tokens) - 1) // self.kv.block_tokens

    def may_fit(self, request: Request, cached: int) -> bool:
        """Whether an admission could succeed; it may still fail, as the cached blocks count as free here."""
        assert self.kv is not None
        return self.kv.blocks_for(len(request.tokens)) - cached + len(self.running) <= self.kv.available

    def fits(self, request: Request) -> bool:
        """Whether an admission would succeed now."""
        assert self.kv is not None
        seq = self._open(request)
        fits = self._has_room_for(request, seq)
        self.kv.close(seq, request.tokens, 0)
        return fits

    def leaves_room(self, request: Request, aged: Request) -> bool:
        """Whether `request` may pass one that has aged: with it, all that is younger, grown to its limit, leaves
        the blocks that the aged one needs.
        """
        assert self.kv is not None
        if request.key < aged.key:
            return True
        younger = [other for other in self.running.values() if other.key > aged.key]
        most = sum(self.kv.blocks_for(other.limit) for other in [*younger, request])
        return most + self.kv.blocks_for(len(aged.tokens)) + len(self.running) + 1 <= self.kv.total

    def names(self, request: Request, count: int) -> list[bytes]:
        """Identities of its first `count` blocks."""
        assert self.kv is not None
        if len(request.names) < count:
            blob = self.kv.identities(request.root, request.tokens, count)
            request.names = [blob[i : i + 32] for i in range(0, len(blob), 32)]
        return request.names[:count]

    def has_maker(self, request: Request, block: int) -> bool:
        """Whether another request is about to provide its block of that index."""
        return self._makers.get(self.names(request, block + 1)[block], request.key) != request.key

    def announce(self, request: Request, first: int, last: int) -> None:
        """It is about to compute or load its blocks [first, last)."""
        if not request.accept.no_store and self._desk.settings.prefix_cache:
            for name in self.names(request, last)[first:]:
                self._makers.setdefault(name, request.key)

    def admit(self, request: Request) -> bool:
        """Gives it blocks for all its tokens, cached ones first; False, and nothing changed, without room."""
        return self._enter(request) is not None

    def admit_load(self, now: float, request: Request, load: Load) -> bool:
        """Admits a request whose load waits for device blocks; False gives the lease back.

        The device may have lost some of the prefix since the lookup, or gained some; what is loaded must join it.
        """
        seq = self._enter(request, at_least=load.first, below=load.first + load.end)
        if seq is None:
            self.loader.refuse(load)
            return False
        older = (other for other in self.running.values() if other.key < request.key and other.load is None)
        ahead = sum(other.pending for other in older)
        self.loader.begin(now, load, seq.cached_blocks - load.first, ahead)
        return True

    def forget(self, request: Request) -> None:
        """It will not provide what it announced."""
        self._forget(request, 0, len(request.names))

    # --- living -------------------------------------------------------------------------------------------------

    def make_room(self, now: float, request: Request) -> list[Request]:
        """Blocks for all its tokens, at the cost of newer requests; returns who was retracted, maybe itself. To be
        called while no plan is out: what one uses can't be taken.

        When it still has too few afterwards, copies hold what lacks: it sits this step out.
        """
        assert self.kv is not None
        assert request.seq is not None
        out: list[Request] = []
        while not self.kv.grow(request.seq, request.reach):
            if len(self.running) == 1:
                break
            victim = max(self.running.values(), key=lambda other: other.key)
            if victim is not request and victim.load is not None and victim.load.copying:
                break
            self.retract(now, victim)
            out.append(victim)
            if victim is request:
                break
        return out

    def reserve(self, request: Request, ahead: int = 0) -> bool:
        """Blocks for all that it will have when the outstanding plan is done, and `ahead` more tokens, if they are to
        be had without taking anybody else's.
        """
        assert self.kv is not None
        assert request.seq is not None
        return self.kv.grow(request.seq, request.reach + ahead)

    def has_room(self, request: Request) -> bool:
        """Whether its blocks cover all that is to be fed."""
        assert self.kv is not None
        return request.seq is not None and len(request.seq.blocks) * self.kv.block_tokens >= request.reach

    def may_be_forced(self, request: Request) -> bool:
        """Whether a retraction by force would be a test and not a treadmill: it has got somewhere since its
        admission, and has drawn a token since the last such retraction.
        """
        assert request.seq is not None
        output, cached = request.fresh
        progress = request.output_tokens > output or request.seq.cached_blocks > cached
        return request.load is None and progress and request.output_tokens > request.forced_at

    def computed(self, now: float, request: Request, count: int) -> list[int]:
        """A step wrote KV of `count` more tokens: full blocks may be shared and saved from now on (W21).

        Returns blocks that it gave up for others of the same content, but that an outstanding plan still names: they
        are pinned, until `unpin`.
        """
        assert self.kv is not None
        assert request.seq is not None
        before = request.computed // self.kv.block_tokens
        request.computed += count
        full = request.computed // self.kv.block_tokens
        if full > before:
            new = self.kv.publish(request.seq, request.tokens, request.computed, in_use=request.in_flight > 0)
            self._forget(request, before, full)
            self.saver.offer(request.root, new)
        if request.load is not None:
            self.loader.computed(now, request.load)
        replaced, request.seq.replaced = request.seq.replaced, []
        return replaced

    def unpin(self, blocks: Iterable[int]) -> None:
        """The plan that named these blocks is over."""
        assert self.kv is not None
        for block in blocks:
            self.kv.unpin(block)

    def retract(self, now: float, request: Request) -> None:
        """Takes its blocks; what it computed stays cached as long as nobody needs the room."""
        self._desk.counters.retracted += 1
        self.leave(now, request)

    def leave(self, now: float, request: Request) -> None:
        """It ended or was retracted. Blocks that outstanding plans use are freed when their results are in."""
        del self.running[request.key]
        self.loader.drop(now, request)
        self.forget(request)
        if request.in_flight:
            self.leaving[request.key] = request
        else:
            self._free(request)

    def left(self, request: Request) -> None:
        """A plan that an ended request was part of is over, maybe the last one."""
        if not request.in_flight:
            del self.leaving[request.key]
            self._free(request)

    def clear(self, now: float, scope: Scope, first: bytes) -> int:
        """Forgets what is cached; running requests keep their blocks to themselves from now on. `first`: of a line,
        the packed tokens of its first block.
        """
        self.loader.clear(now)
        self.saver.clear()
        self._makers.clear()
        if self.kv is None:
            return 0
        if not scope.line:
            return self.kv.clear(scope.covers)
        for request in [*self.running.values(), *self.leaving.values()]:
            begun = request.tokens[: self.kv.block_tokens].tobytes()
            if request.seq and request.root == scope.pattern and first.startswith(begun):
                request.seq.store = False
        return self.kv.clear_line(scope.pattern, first)

    def check_integrity(self) -> None:
        """Who has blocks agrees with the pool; raises with the numbers."""
        makers = set(self._makers.values()) - set(self.running) - self.loader.asking
        if makers:
            raise RuntimeError(f"requests {sorted(makers)} announced blocks, but neither run nor look them up")
        kv = self.kv
        if kv is None:
            if self.running or self.leaving:
                raise RuntimeError(f"{len(self.running)} running, {len(self.leaving)} leaving, but no pool")
            return
        kv.check_integrity()
        self.loader.check_integrity()
        for request in [*self.running.values(), *self.leaving.values()]:
            held = len(request.seq.blocks) if request.seq else -1
            if held < kv.blocks_for(request.planned):
                raise RuntimeError(f"{request.id}: {request.computed} + {request.in_flight} tokens in {held} blocks")

    # --- inside -------------------------------------------------------------------------------------------------

    def _reads(self, request: Request) -> bool:
        return self._desk.settings.prefix_cache and not request.accept.no_read

    def _open(self, request: Request) -> Sequence:
        assert self.kv is not None
        tokens, store = request.tokens, not request.accept.no_store
        return self.kv.open(request.root, tokens, len(tokens) - 1, read=self._reads(request), store=store)

    def _has_room_for(self, request: Request, seq: Sequence) -> bool:
        assert self.kv is not None
        need = self.kv.blocks_for(len(request.tokens)) - len(seq.blocks)
        return need + len(self.running) <= self.kv.available

    def _enter(self, request: Request, at_least: int = 0, below: int | None = None) -> Sequence | None:
        assert self.kv is not None
        tokens, seq = request.tokens, self._open(request)
        useful = at_least <= seq.cached_blocks and (below is None or seq.cached_blocks < below)
        if not (useful and self._has_room_for(request, seq) and self.kv.grow(seq, len(tokens))):
            self.kv.close(seq, tokens, 0)
            return None
        request.seq = seq
        request.computed = seq.cached_blocks * self.kv.block_tokens
        request.from_tier = (request.computed, 0, 0)
        request.account_closed = request.admit is not None
        request.fresh = (request.output_tokens, seq.cached_blocks)
        self.running[request.key] = request
        self.announce(request, seq.cached_blocks, len(tokens) // self.kv.block_tokens)
        return seq

    def _attach(self, load: Load, first: int, last: int) -> None:
        """Blocks [first, last) of a load stand where its request has come to: it goes on behind them."""
        request, kv = load.request, self.kv
        assert kv is not None
        assert request.seq is not None
        begin, end = load.first + first, load.first + last
        request.computed = end * kv.block_tokens
        kv.attach(request.seq, request.tokens, request.computed)
        tiers = load.tiers[first:last]
        host, disk = (tiers.count(tier) * kv.block_tokens for tier in (TIER_HOST, TIER_DISK))
        self._desk.counters.count_loaded(request.served(host, disk))
        self._forget(request, begin, end)

    def _forget(self, request: Request, first: int, last: int) -> None:
        for name in request.names[first:last]:
            if self._makers.get(name) == request.key:
                del self._makers[name]

    def _free(self, request: Request) -> None:
        assert self.kv is not None
        assert request.seq is not None
        self.kv.close(request.seq, request.tokens, 0)
        request.seq = None
        request.computed = 0
