"""A simulated world around the real engine: worker, store, journal and detokenizer, all under the test's control.

The worker computes a toy integer model over a simulated pool: the "KV" of a token is mixed from the token, its
position and the KV of the position before it, *read from the pool*; the next token is mixed from the KV of all
positions. Blocks that nobody owns hold garbage, so any stale, torn or foreign block changes tokens. Nothing happens
by itself: plans, copies and answers lie in queues until a test completes, loses or delays them.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from xxhash import xxh3_64_intdigest

from services.scheduler.engine import Engine
from services.scheduler.events import Advanced, Ask, Effect, Forgotten, Journal, Tell, ToWorker
from services.scheduler.kv.block_pool import FREE, REQUEST
from services.scheduler.records import Accept, AnyRecord, Step
from services.scheduler.settings import Settings
from shared.messages.base import pack_u32, pack_u64, split_identities, unpack_u32, unpack_u64
from shared.messages.engine import (
    CancelRequest,
    Copy,
    Journaled,
    KVFacts,
    Plan,
    Result,
    RowResult,
    SampleSpec,
    StopAt,
    Submit,
    Transfer,
    Transferred,
)
from shared.messages.front import Finish, Rejected, TokenLogprob
from shared.messages.store import (
    COMMIT_DONE,
    COMMIT_STALE,
    RESERVE_FULL,
    RESERVE_GRANTED,
    RESERVE_HAVE,
    RESERVE_STALE,
    TIER_DISK,
    TIER_HOST,
    Abandon,
    Commit,
    Committed,
    EngineOpened,
    Found,
    Lookup,
    OpenEngine,
    Release,
    Reserve,
    Reserved,
    Staged,
)

MASK = (1 << 64) - 1
KEY = b"k" * 32
VOCAB = 24


def mix(*values: int) -> int:
    """A 64-bit hash of integers, the same in every process."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ (value & MASK)) * 0xFF51AFD7ED558CCD) & MASK
        state ^= state >> 29
    return state


def kv_of(token: int, position: int, before: int) -> int:
    return mix(token, position, before)


def draw(kv: list[int], seed: int) -> int:
    return xxh3_64_intdigest(array("Q", kv).tobytes(), seed) % VOCAB


def oracle(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    """Cache-off: what the model says, computed alone and in order."""
    tokens, kv = list(prompt), list[int]()
    while True:
        for position in range(len(kv), len(tokens)):
            kv.append(kv_of(tokens[position], position, kv[-1] if kv else 0))
        if len(tokens) - len(prompt) == count:
            return tokens[len(prompt) :]
        tokens.append(draw(kv, seed))


def checksum_of(values: list[int]) -> int:
    return xxh3_64_intdigest(array("Q", values).tobytes())


class SimWorker:
    """A pool of garbage, and whatever was written into it since."""

    def __init__(self, facts: KVFacts, max_context: int) -> None:
        self.facts = facts
        self.max_context = max_context
        self.garbage = 0
        self.pool = [self.poison() for _ in range(facts.blocks)]
        self.computed = 0
        self.clean: set[int] = set()
        """Free blocks that hold garbage already."""

    def poison(self) -> list[int]:
        self.garbage += 1
        return [mix(1 << 60, self.garbage, i) for i in range(self.facts.block_tokens)]

    def run(self, plan: Plan) -> Result:
        size, rows = self.facts.block_tokens, []
        for row in plan.rows:
            ids, table = unpack_u32(row.ids), unpack_u32(row.blocks)
            end = row.start + len(ids)
            assert len(table) == -(-end // size)
            for position, token in enumerate(ids, row.start):
                before = self.pool[table[(position - 1) // size]][(position - 1) % size] if position else 0
                self.pool[table[position // size]][position % size] = kv_of(token, position, before)
            self.computed += len(ids)
            token = -1
            if row.sample is not None:
                kv = [self.pool[table[position // size]][position % size] for position in range(end)]
                token = draw(kv, row.sample.seed)
            logprob = TokenLogprob(-float(end), b"", ()) if row.sample and row.sample.logprobs >= 0 else None
            rows.append(RowResult(row.key, token, logprob))
        return Result(epoch=plan.epoch, seq=plan.seq, rows=tuple(rows), forward_s=0.0)


@dataclass
class Slot:
    """One slot of the arena."""

    values: list[int]
    generation: int = 0
    identity: bytes = b""
    state: str = "free"
    checksum: int = 0


@dataclass
class SimStore:
    """Host slots and a disk, with leases and grants; faults are put in from outside."""

    capacity: int = 64
    incarnation: int = 1
    epoch: int = 1
    arena_key: str = "a1"
    slots: dict[int, Slot] = field(default_factory=dict)
    host: dict[bytes, int] = field(default_factory=dict)
    disk: dict[bytes, list[int]] = field(default_factory=dict)
    leases: dict[int, list[bytes]] = field(default_factory=dict)
    staging: list[tuple[int, int, bytes]] = field(default_factory=list)
    next_lease: int = 1
    next_slot: int = 1
    reads: int = 0

    def open(self, message: OpenEngine) -> EngineOpened:
        self.leases.clear()
        self.staging.clear()
        held = dict(zip(unpack_u32(message.held_slots), unpack_u64(message.held_generations), strict=True))
        for number, slot in list(self.slots.items()):
            if slot.state == "granted" and held.get(number) != slot.generation:
                del self.slots[number]
        kept = bytes(number in self.slots and self.slots[number].state == "granted" for number in held)
        return EngineOpened(arena="/arena", arena_key=self.arena_key, epoch=self.epoch, kept=kept)

    def restart(self, *, lose_arena: bool) -> None:
        self.incarnation += 1
        self.leases.clear()
        self.staging.clear()
        if lose_arena:
            self.arena_key += "x"
            self.slots.clear()
            self.host.clear()

    def clear(self) -> int:
        self.epoch += 1
        self.host.clear()
        self.disk.clear()
        self.staging.clear()
        return self.epoch

    def answer(self, message: Lookup | Reserve | Commit) -> Found | Reserved | Committed:
        if isinstance(message, Lookup):
            return self._lookup(split_identities(message.identities))
        if isinstance(message, Reserve):
            return self._reserve(message)
        return self._commit(message)

    def _lookup(self, names: list[bytes]) -> Found:
        run = list[bytes]()
        for name in names:
            if name not in self.host and name not in self.disk:
                break
            run.append(name)
        lease = self.next_lease if run else 0
        tiers, offsets, sums, generations = bytearray(), [], [], []
        for index, name in enumerate(run):
            number = self.host.get(name)
            slot = self.slots[number] if number is not None else None
            tiers.append(TIER_HOST if slot else TIER_DISK)
            offsets.append(number * 64 if number is not None else 0)
            sums.append(slot.checksum if slot else 0)
            generations.append(slot.generation if slot else 0)
            if not slot:
                self.staging.append((lease, index, name))
        if lease:
            self.leases[lease] = run
            self.next_lease += 1
        return Found(
            lease=lease,
            tiers=bytes(tiers),
            slots=pack_u32(offset // 64 for offset in offsets),
            offsets=pack_u64(offsets),
            generations=pack_u64(generations),
            checksums=pack_u64(sums),
            epoch=self.epoch,
        )

    def stage(self, *, fail: bool = False) -> Staged | None:
        """Brings the next block of a lease from disk."""
        while self.staging:
            lease, index, name = self.staging.pop(0)
            if lease not in self.leases:
                continue
            if fail or (name not in self.disk and name not in self.host):
                self.staging = [waiting for waiting in self.staging if waiting[0] != lease]
                empty = pack_u64([])
                return Staged(
                    lease=lease, first=index, slots=b"", offsets=empty, generations=empty, checksums=empty, failed=True
                )
            if name not in self.host:
                self.reads += 1
                values = self.disk[name]
                self.host[name] = self._new(Slot(list(values), 0, name, "valid", checksum_of(values)))
            number = self.host[name]
            slot = self.slots[number]
            return Staged(
                lease=lease,
                first=index,
                slots=pack_u32([number]),
                offsets=pack_u64([number * 64]),
                generations=pack_u64([slot.generation]),
                checksums=pack_u64([slot.checksum]),
            )
        return None

    def _new(self, slot: Slot) -> int:
        number, self.next_slot = self.next_slot, self.next_slot + 1
        slot.generation = number * 7
        self.slots[number] = slot
        return number

    def _reserve(self, message: Reserve) -> Reserved:
        status, slots, generations = bytearray(), [], []
        for name in split_identities(message.identities):
            number = 0
            if message.epoch != self.epoch:
                status.append(RESERVE_STALE)
            elif name in self.host or name in self.disk:
                status.append(RESERVE_HAVE)
            elif len(self.slots) >= self.capacity:
                status.append(RESERVE_FULL)
            else:
                number = self._new(Slot([0], 0, name, "granted"))
                status.append(RESERVE_GRANTED)
            slots.append(number)
            generations.append(number * 7)
        return Reserved(
            status=bytes(status),
            slots=pack_u32(slots),
            offsets=pack_u64(number * 64 for number in slots),
            generations=pack_u64(generations),
            incarnation=self.incarnation,
        )

    def _commit(self, message: Commit) -> Committed:
        status = bytearray()
        rows = zip(
            unpack_u32(message.slots), unpack_u64(message.generations), unpack_u64(message.checksums), strict=True
        )
        for number, generation, checksum in rows:
            slot = self.slots.get(number)
            fresh = message.incarnation == self.incarnation and message.epoch == self.epoch
            if not fresh or slot is None or slot.generation != generation or slot.state != "granted":
                status.append(COMMIT_STALE)
                if slot is not None and slot.state == "granted" and slot.generation == generation:
                    del self.slots[number]
                continue
            assert checksum == checksum_of(slot.values)
            slot.state, slot.checksum = "valid", checksum
            if slot.identity in self.host:
                del self.slots[number]
            else:
                self.host[slot.identity] = number
            status.append(COMMIT_DONE)
        return Committed(status=bytes(status))

    def tell(self, message: Abandon | Release) -> None:
        if isinstance(message, Release):
            for index in unpack_u32(message.bad):
                name = self.leases[message.lease][index]
                self.host.pop(name, None)
                self.disk.pop(name, None)
            self.leases.pop(message.lease, None)
            return
        for number, generation in zip(unpack_u32(message.slots), unpack_u64(message.generations), strict=True):
            slot = self.slots.get(number)
            fresh = slot is not None and message.incarnation == self.incarnation
            if slot is not None and fresh and slot.state == "granted" and slot.generation == generation:
                del self.slots[number]

    def leased(self) -> set[bytes]:
        return {name for run in self.leases.values() for name in run}

    def spill(self) -> None:
        """All that nobody leases goes to disk; host slots are reused (their bytes become garbage)."""
        for name, number in list(self.host.items()):
            if name not in self.leased():
                slot = self.slots.pop(number)
                if checksum_of(slot.values) == slot.checksum:
                    self.disk[name] = list(slot.values)
                slot.values[:] = [mix(3, value) for value in slot.values]
                del self.host[name]

    def lose(self, index: int) -> None:
        """One block that nobody leases is evicted everywhere."""
        names = [name for name in [*self.host, *self.disk] if name not in self.leased()]
        if names:
            name = names[index % len(names)]
            if name in self.host:
                del self.slots[self.host.pop(name)]
            self.disk.pop(name, None)

    def corrupt(self, index: int) -> None:
        """One host block's bytes change under its checksum."""
        numbers = sorted(self.host.values())
        if numbers:
            self.slots[numbers[index % len(numbers)]].values[0] ^= 1


@dataclass
class Sent:
    """One request as its client sees it."""

    submit: Submit
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: int = 0
    finish: Finish | None = None
    cancelled: bool = False
    stop_at: int | None = None


class World:
    """The engine and everything around it. All its events and effects are kept for a replay."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        blocks: int = 16,
        block_tokens: int = 4,
        max_context: int = 400,
        worker: bool = True,
        store: bool = False,
        check: bool = True,
    ) -> None:
        self.settings = settings or Settings(step_tokens=16, max_running=6)
        self.facts = KVFacts(b"f" * 32, block_tokens, 64, blocks, "fp32", 1, 1, 8)
        self.max_context = max_context
        self.check = check
        self.now = 100.0
        self.epoch = 0
        self.journal: list[AnyRecord] = []
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.effects: list[Effect | Plan | None] = []
        self.sent: dict[str, Sent] = {}
        self.forgotten: set[str] = set()
        self.store = SimStore()
        self.store_up = False
        self.plan: Plan | None = None
        self.transfers: list[tuple[Transfer, Transferred | None]] = []
        self.asks: list[Ask] = []
        self.worker: SimWorker | None = None
        self.mute = False
        """A store that gets questions and never answers."""
        self.engine = Engine(self.settings, KEY)
        self._numbers = 0
        if worker:
            self.start_worker()
        if store:
            self.start_store()

    # --- events -----------------------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> Any:
        """One event, then the plan, then the effects, as the shell does it."""
        self.log.append((name, arguments))
        answer = getattr(self.engine, name)(*arguments)
        plan = self.engine.next_plan(self.now)
        self.log.append(("next_plan", (self.now,)))
        self.carry_out(self.engine.take_effects(), plan)
        return answer

    def carry_out(self, effects: list[Effect], plan: Plan | None) -> None:
        self.effects += [*effects, plan]
        for effect in effects:
            if isinstance(effect, Journal):
                self._journal(effect.record)
        for effect in effects:
            if isinstance(effect, ToWorker):
                self._order(effect.message)
            elif isinstance(effect, Ask):
                assert self.store_up
                self.asks.append(effect)
            elif isinstance(effect, Tell):
                assert self.store_up
                self.store.tell(effect.message)
            elif isinstance(effect, Advanced):
                self._tell_client(effect.id)
            elif isinstance(effect, Forgotten):
                assert self.sent[effect.id].finish is not None
                self.forgotten.add(effect.id)
        if plan is not None:
            assert self.plan is None
            self._check_plan(plan)
            self.plan = plan
        if self.check:
            self.engine.check_integrity()
        self._poison_free_blocks()

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        seed: int | None = 0,
        logprobs: int = -1,
        id: str | None = None,
        **options: Any,
    ) -> str:
        """Sends a request -> its id. The answer is in `answers`."""
        self._numbers += 1
        name = id or f"r{self._numbers}"
        message = Submit(
            id=name,
            digest=bytes([self._numbers % 256]) * 32,
            principal="p",
            ids=pack_u32(prompt),
            max_tokens=max_tokens,
            sample=SampleSpec(seed=seed or 0, logprobs=logprobs),
            seeded=seed is not None,
            **options,
        )
        self.send(message, drawn=self._numbers)
        return name

    def send(self, message: Submit, drawn: int) -> Journaled | Rejected:
        self.sent.setdefault(message.id, Sent(message, message.sample.seed if message.seeded else drawn))
        answer = self.call("submit", self.now, message, drawn)
        assert isinstance(answer, Journaled | Rejected)
        if isinstance(answer, Rejected) and answer.code != "conflict":
            del self.sent[message.id]
        self.answer = answer
        return answer

    def cancel(self, id: str, principal: str = "p") -> bool:
        answer = self.call("cancel", self.now, CancelRequest(id=id, principal=principal))
        self.sent[id].cancelled |= answer.known
        return bool(answer.known)

    def stop_at(self, id: str, at: int) -> None:
        sent = self.sent[id]
        sent.stop_at = min(at, sent.stop_at or at)
        self.call("stop_at", self.now, StopAt(id=id, at=at))

    def advance(self, seconds: float) -> None:
        """Time passes; the shell ticks when the engine asked for it."""
        self.now += seconds
        at = self.engine.next_deadline()
        if at is not None and at <= self.now:
            self.call("tick", self.now)
            again = self.engine.next_deadline()
            assert again is None or again > self.now

    # --- worker -----------------------------------------------------------------------------------------------

    def start_worker(self) -> None:
        self.epoch += 1
        self.plan, self.transfers = None, []
        self.worker = SimWorker(self.facts, self.max_context)
        self.call("worker_up", self.now, self.epoch, self.facts, self.max_context)

    def kill_worker(self) -> None:
        self.plan, self.transfers, self.worker = None, [], None
        self.call("worker_down", self.now)

    def finish_plan(self) -> None:
        """The worker answers the outstanding plan."""
        assert self.worker is not None
        assert self.plan is not None
        plan, self.plan = self.plan, None
        self.call("result", self.now, self.worker.run(plan))

    def step(self) -> bool:
        """One whole step; False when there is nothing to run."""
        if self.plan is None:
            self.call("tick", self.now)
        if self.plan is None:
            return False
        self.finish_plan()
        return True

    def finish_transfer(self, index: int = 0, *, ok: bool = True) -> None:
        transfer, done = self.transfers.pop(index)
        self.call("transferred", self.now, done or self._copy(transfer, ok=ok))

    def copy_early(self, index: int = 0) -> None:
        """The bytes move now, the news of it comes later."""
        transfer, done = self.transfers[index]
        self.transfers[index] = transfer, done or self._copy(transfer, ok=True)

    # --- store ------------------------------------------------------------------------------------------------

    def start_store(self) -> None:
        message = self.engine.open_engine()
        self.log.append(("open_engine", ()))
        if message is None:
            return
        opened = self.store.open(message)
        self.store_up = True
        self.call("store_up", self.now, opened, self.store.incarnation)

    def kill_store(self, *, lose_arena: bool = False, answered: int = 0) -> None:
        """The store dies; the first `answered` questions were handled, but their answers are lost."""
        for ask in self.asks[:answered]:
            self.store.answer(ask.message)
        self.asks.clear()
        self.store.restart(lose_arena=lose_arena)
        self.store_up = False
        self.call("store_down", self.now)

    def answer_ask(self, index: int = 0, *, failed: bool = False) -> None:
        ask = self.asks.pop(index)
        name = {Lookup: "found", Reserve: "reserved", Commit: "committed"}[type(ask.message)]
        self.call(name, self.now, ask.ticket, None if failed else self.store.answer(ask.message))

    def lose_ask(self, index: int = 0) -> None:
        """The question is never answered."""
        self.asks.pop(index)

    def stage(self, *, fail: bool = False) -> None:
        staged = self.store.stage(fail=fail)
        if staged is not None:
            self.call("staged", self.now, staged)

    def clear(self, *, answered: bool = True) -> None:
        self.call("clear", self.now, None)
        if self.store_up:
            self.call("cleared", self.now, self.store.clear() if answered else None)
        else:
            self.call("cleared", self.now, None)

    # --- scheduler --------------------------------------------------------------------------------------------

    def restart_scheduler(self, *, lose_result: bool = False) -> None:
        """The scheduler dies (maybe between a result and its journal write) and reads its journal."""
        if lose_result and self.plan is not None and self.worker is not None:
            self.engine.result(self.now, self.worker.run(self.plan))  # effects are never carried out
        self.engine = Engine(self.settings, KEY)
        self.log, self.effects = [], []
        self.plan, self.transfers, self.asks = None, [], []
        for sent in self.sent.values():
            sent.stop_at = None if sent.finish is None else sent.stop_at
        self.call("restore", self.now, tuple(self.journal))
        for id in self.engine.retained():
            replay = self.engine.progress(id, 0)
            assert replay is not None
            assert replay.opening is not None
            assert list(unpack_u32(replay.ids))[: len(self.sent[id].tokens)] == self.sent[id].tokens
        if self.worker is not None:
            self.start_worker()
        if self.store_up:
            self.start_store()

    # --- running on -------------------------------------------------------------------------------------------

    def outstanding(self) -> bool:
        return bool(self.plan or self.transfers or (self.asks and not self.mute) or self.store.staging)

    def turn(self) -> bool:
        """One of everything that is outstanding; False when nothing was."""
        busy = self.outstanding()
        if self.plan is not None:
            self.finish_plan()
        if self.transfers:
            self.finish_transfer()
        if self.asks and not self.mute:
            self.answer_ask()
        if self.store.staging and not self.mute:
            self.stage()
        return busy

    def live(self) -> list[str]:
        return [id for id, sent in self.sent.items() if sent.finish is None]

    def settle(self, limit: int = 20_000) -> None:
        """Leaves everything alone until nothing happens any more: then every request has ended."""
        for _ in range(limit):
            if self.turn():
                continue
            if not self.live() and not self.engine.statistics().saving:
                break
            at = self.engine.next_deadline()
            assert at is not None, f"{self.live()} wait for ever"
            self.advance(max(0.0, at - self.now))
        else:
            raise AssertionError(f"not done after {limit} turns: {self.live()}, {self.engine.statistics()}")
        self.check_idle()

    def check_idle(self) -> None:
        now = self.engine.statistics()
        assert (now.running, now.waiting, now.leaving, now.in_flight, now.loading) == (0, 0, 0, 0, 0)
        self.engine.check_integrity()
        if now.kv is not None:
            assert now.kv.locked == 0
            assert now.kv.free + now.kv.cached == now.kv.total
        if self.store_up and not self.asks:
            assert not self.store.leases
            assert not [slot for slot in self.store.slots.values() if slot.state == "granted"]
        for id in self.sent:
            self.check_answer(id)

    def check_answer(self, id: str) -> None:
        """The tokens are those of the cache-off oracle, and the account is right."""
        sent = self.sent[id]
        assert sent.finish is not None
        prompt = list(unpack_u32(sent.submit.ids))
        assert sent.tokens == oracle(prompt, len(sent.tokens), sent.seed)
        usage, reason = sent.finish.usage, sent.finish.reason
        assert usage.completion_tokens == len(sent.tokens)
        assert usage.prompt_tokens == len(prompt)
        assert 0 <= usage.cached_tokens <= len(prompt) - 1
        assert sum(usage.cached_by_tier.values()) == usage.cached_tokens
        if sent.submit.no_read:
            assert usage.cached_tokens == 0
        assert sent.logprobs == (len(sent.tokens) if sent.submit.sample.logprobs >= 0 else 0)
        stops = [i for i, token in enumerate(sent.tokens) if token in sent.submit.stop_ids]
        if reason == "stop":
            assert stops == [len(sent.tokens) - 1] or (sent.stop_at == len(sent.tokens) and not stops)
        elif reason == "length":
            pool = self.facts.blocks * self.facts.block_tokens + 1
            most = min(sent.submit.max_tokens, self.max_context - len(prompt), pool - len(prompt))
            assert len(sent.tokens) == most
            assert not stops
        else:
            assert not stops
            assert (reason == "cancelled") == sent.cancelled
            if reason == "error":  # accepted while no worker had told what can never fit
                assert not sent.tokens
                assert len(prompt) > min(self.facts.blocks * self.facts.block_tokens, self.max_context - 1)

    # --- inside -----------------------------------------------------------------------------------------------

    def _journal(self, record: AnyRecord) -> None:
        self.journal.append(record)
        if isinstance(record, Accept):
            assert record.key not in {other.key for other in self.journal[:-1] if isinstance(other, Accept)}
        elif isinstance(record, Step):
            assert record.rows

    def _tell_client(self, id: str) -> None:
        sent = self.sent[id]
        progress = self.engine.progress(id, len(sent.tokens))
        assert progress is not None
        news = list(unpack_u32(progress.ids))
        assert progress.start <= len(sent.tokens)
        assert news or progress.finish is not None, "an advance without news"
        if progress.finish is not None:
            assert sent.finish is None or sent.stop_at is not None, "ended twice"
            end = progress.finish.usage.completion_tokens
            sent.tokens = [*sent.tokens[: progress.start], *news][:end]
            if sent.submit.sample.logprobs >= 0:
                sent.logprobs = min(sent.logprobs, progress.start) + len(progress.logprobs or ())
            sent.finish = progress.finish
            return
        assert progress.start == len(sent.tokens)
        assert sent.finish is None
        sent.tokens += news
        sent.logprobs += len(progress.logprobs or ())

    def _order(self, transfer: Transfer) -> None:
        assert self.worker is not None
        assert transfer.copies
        self.transfers.append((transfer, None))
        for copy in transfer.copies:
            assert self._owner(copy.block) != FREE
            if not transfer.save:
                assert self._owner(copy.block) == REQUEST
                self.worker.pool[copy.block] = self.worker.poison()

    def _copy(self, transfer: Transfer, *, ok: bool) -> Transferred:
        assert self.worker is not None
        sums = []
        for copy in transfer.copies:
            slot = self._slot(copy)
            if transfer.save and slot is not None:
                slot.values = list(self.worker.pool[copy.block])
            elif not transfer.save:
                # a slot that was reused, or never existed, gives some bytes, as shared memory does
                self.worker.pool[copy.block] = list(slot.values) if slot else self.worker.poison()
            sums.append(checksum_of(self.worker.pool[copy.block]))
        held = bytes(ok and (transfer.save or sums[i] == copy.checksum) for i, copy in enumerate(transfer.copies))
        return Transferred(epoch=transfer.epoch, seq=transfer.seq, checksums=pack_u64(sums), ok=held, seconds=0.0)

    def _slot(self, copy: Copy) -> Slot | None:
        return self.store.slots.get(copy.offset // 64)

    def _owner(self, block: int) -> int:
        kv = self.engine._home.kv
        assert kv is not None
        return kv._pool.owner(block)

    def _check_plan(self, plan: Plan) -> None:
        """Rows write only blocks that are their request's own, each by one row; the budget holds."""
        size, written, total = self.facts.block_tokens, set[int](), 0
        for row in plan.rows:
            ids, table = array("I", row.ids), unpack_u32(row.blocks)
            total += len(ids)
            for block in table[row.start // size :]:
                assert self._owner(block) == REQUEST
                assert block not in written
                written.add(block)
            assert all(self._owner(block) != FREE for block in table)
        assert 0 < total <= self.settings.step_tokens

    def _poison_free_blocks(self) -> None:
        kv = self.engine._home.kv
        if kv is None or self.worker is None:
            return
        owners = kv._pool._owner
        for block in range(self.facts.blocks):
            if owners[block] != FREE:
                self.worker.clean.discard(block)
            elif block not in self.worker.clean:
                self.worker.clean.add(block)
                self.worker.pool[block] = self.worker.poison()


def prompts(random: Random, count: int, longest: int, *, families: int = 3) -> Iterator[list[int]]:
    """Prompts that share prefixes of several families."""
    stems = [[random.randrange(VOCAB) for _ in range(longest)] for _ in range(families)]
    for _ in range(count):
        length = random.randint(1, longest)
        keep = random.randint(0, length)
        stem = stems[random.randrange(families)]
        yield stem[:keep] + [random.randrange(VOCAB) for _ in range(length - keep)]
