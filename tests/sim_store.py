"""A store in a dict: host slots, a disk, leases and grants, with the faults that a test puts in."""

from dataclasses import dataclass, field

from shared.messages.base import pack_u32, pack_u64, split_identities, unpack_u32, unpack_u64
from shared.messages.store import (
    COMMIT_DONE,
    COMMIT_STALE,
    RESERVE_FULL,
    RESERVE_GRANTED,
    RESERVE_HAVE,
    RESERVE_NO_PARENT,
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
    Taken,
)
from tests.sim_worker import checksum_of, mix


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
    leases: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By number: index and name of the blocks that are not taken."""
    arrived: dict[int, set[int]] = field(default_factory=dict)
    """By lease: indices of blocks that were staged and are not taken."""
    staging: list[tuple[int, int, bytes]] = field(default_factory=list)
    next_lease: int = 1
    next_slot: int = 1
    window: int = 1000
    """Blocks of a lease that may be staged and not taken."""
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
        first = len(self.staging)
        for index, name in enumerate(run):
            number = self.host.get(name)
            slot = self.slots[number] if number is not None else None
            tiers.append(TIER_HOST if slot else TIER_DISK)
            offsets.append(number * 64 if number is not None else 0)
            sums.append(slot.checksum if slot else 0)
            generations.append(slot.generation if slot else 0)
            if not slot:
                self.staging.insert(first, (lease, index, name))  # those at the end of a run first
        if lease:
            self.leases[lease] = dict(enumerate(run))
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
        self.staging = [waiting for waiting in self.staging if waiting[0] in self.leases]
        for at, (lease, index, name) in enumerate(self.staging):
            arrived = self.arrived.setdefault(lease, set())
            if len(arrived) >= self.window:
                continue
            del self.staging[at]
            if fail or (name not in self.disk and name not in self.host):
                del self.leases[lease][index]
                none = pack_u64([0])
                return Staged(
                    lease=lease,
                    first=index,
                    slots=pack_u32([0]),
                    offsets=none,
                    generations=none,
                    checksums=none,
                    failed=True,
                )
            arrived.add(index)
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
        granted = {slot.identity for slot in self.slots.values() if slot.state == "granted"}
        parents = split_identities(message.parents)
        for name, parent in zip(split_identities(message.identities), parents, strict=True):
            number = 0
            if message.epoch != self.epoch:
                status.append(RESERVE_STALE)
            elif name in self.host or name in self.disk or name in granted:
                status.append(RESERVE_HAVE)
            elif parent not in (message.root, *granted) and parent not in self.host and parent not in self.disk:
                status.append(RESERVE_NO_PARENT)
            elif len(self.slots) >= self.capacity:
                status.append(RESERVE_FULL)
            else:
                number = self._new(Slot([0], 0, name, "granted"))
                status.append(RESERVE_GRANTED)
                granted.add(name)
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

    def tell(self, message: Abandon | Taken | Release) -> None:
        if isinstance(message, Taken):
            for index in unpack_u32(message.blocks):
                self.leases.get(message.lease, {}).pop(index, None)
                self.arrived.get(message.lease, set()).discard(index)
            return
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
        return {name for run in self.leases.values() for name in run.values()}

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
