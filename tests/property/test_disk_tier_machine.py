"""The disk tier against a dict, with kills, power losses, damaged indexes and flipped bits at any moment.

Never wrong bytes, whatever happens. Nothing that was saved is missing unless it was deleted, damaged, or on a device
that lost it. Nothing that was cleared comes back.
"""

import random
import shutil
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.store.disk.errors import DiskTierError, IndexDamaged
from services.store.disk.tier import DiskTier
from shared.scope import EVERYTHING, of_root
from tests.disk_kit import LENGTH, NO_PARENT, SLOT, block, fetch, name, open_tier, payload_of
from tests.durable_io import FAST, DurableIO

ROOTS = [b"a" * 32, b"b" * 32]
CAPACITY = 40 * SLOT


class DiskTierMachine(RuleBasedStateMachine):
    """`sure`: must be readable. `maybe`: may be, or not. Whatever is in neither must not be; `gone` never again."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="perdure-test-", dir=FAST))
        self.boot = 0
        self.sure: set[bytes] = set()
        self.maybe: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.root_of: dict[bytes, bytes] = {}
        self.number = 0
        self.open()

    def open(self) -> None:
        self.io = DurableIO()
        with mock.patch("services.store.disk.index_place.boot_id", return_value=f"boot {self.boot}"):
            self.tier: DiskTier = open_tier(
                self.directory, self.io, capacity=CAPACITY, segment_bytes=16 * SLOT + 4096, map_bytes=64 << 10
            )

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.directory)

    @rule(count=st.integers(1, 6), root=st.sampled_from(ROOTS))
    def save(self, count: int, root: bytes) -> None:
        blocks = []
        parent = NO_PARENT
        for _ in range(count):
            self.number += 1
            identity = name(str(self.number))
            blocks.append(block(identity, parent, root))
            self.root_of[identity] = root
            parent = identity
        try:
            entries = self.tier.save(blocks)
        except DiskTierError:
            assert self.tier.room(LENGTH) == 0 or self.tier.statistics().state == "damaged"
            return
        self.sure |= {entry.identity for entry in entries}

    @precondition(lambda self: self.sure)
    @rule(data=st.data())
    def save_again(self, data: st.DataObject) -> None:
        identity = data.draw(st.sampled_from(sorted(self.sure)))
        try:
            self.tier.save([block(identity, NO_PARENT, self.root_of[identity], generation=self.number)])
        except DiskTierError:
            assert self.tier.room(LENGTH) == 0 or self.tier.statistics().state == "damaged"

    @precondition(lambda self: self.sure)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        doomed = data.draw(st.lists(st.sampled_from(sorted(self.sure)), max_size=8, unique=True))
        try:
            self.tier.delete(doomed)
        except IndexDamaged:
            return
        self.sure -= set(doomed)
        if self.tier.statistics().state == "rebuilding":
            self.maybe |= set(doomed)  # a copy that the rebuild has not come to yet is not known, and will be found

    @rule(root=st.sampled_from([None, *ROOTS]))
    def clear(self, root: bytes | None) -> None:
        try:
            self.tier.clear(EVERYTHING if root is None else of_root(root))
        except IndexDamaged:
            return
        self.gone |= {identity for identity, its in self.root_of.items() if root in (None, its)}
        self.sure -= self.gone
        self.maybe -= self.gone

    @precondition(lambda self: self.sure)
    @rule(data=st.data(), recency=st.integers(0, 2**63))
    def touch(self, data: st.DataObject, recency: int) -> None:
        self.tier.touch({data.draw(st.sampled_from(sorted(self.sure))): recency})

    @rule()
    def sync(self) -> None:
        try:
            self.tier.sync()
        except IndexDamaged:
            assert self.tier.statistics().state == "damaged"

    @rule(steps=st.integers(1, 4))
    def recover(self, steps: int) -> None:
        for _ in range(steps):
            try:
                batch = self.tier.recover_step(8)
            except IndexDamaged:
                self.tier.heal()
                return
            if batch is None:
                self.tier.check_integrity()
                assert self.tier.statistics().blocks <= len(self.sure) + len(self.maybe)
                return
            assert set(batch["identity"].tolist()) <= self.sure | self.maybe

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        self.tier.close(clean=clean)
        self.open()

    @rule(seed=st.integers(0, 1000))
    def lose_power(self, seed: int) -> None:
        self.tier.close(clean=False)
        self.io.lose_power(random.Random(seed))
        self.boot += 1
        self.maybe |= set(self.root_of) - self.sure - self.gone
        self.open()

    @rule()
    def lose_index(self) -> None:
        self.tier.close()
        (self.directory / "index" / "data.mdb").unlink()
        self.open()

    @precondition(lambda self: self.sure)
    @rule(data=st.data(), at=st.integers(0, SLOT - 1), bit=st.integers(0, 7))
    def flip(self, data: st.DataObject, at: int, bit: int) -> None:
        identity = data.draw(st.sampled_from(sorted(self.sure)))
        entry = self.tier.lookup(identity)
        if entry is None:
            assert self.tier.statistics().state in ("rebuilding", "damaged")
            return
        path = self.directory / "segments" / f"{entry.slot >> 16:05d}-{LENGTH}.seg"
        offset = 4096 + (entry.slot & 0xFFFF) * SLOT + at
        with path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes((byte ^ 1 << bit,)))
        self.sure.discard(identity)
        self.maybe.add(identity)

    @invariant()
    def tells_the_truth(self) -> None:
        state = self.tier.statistics().state
        for identity in self.root_of:
            got = fetch(self.tier, identity)
            assert got in (None, payload_of(identity)), "wrong bytes"
            if got is not None:
                assert identity in self.sure or identity in self.maybe, "a block came back"
            elif identity in self.maybe:
                if state == "ready":
                    self.maybe.discard(identity)
            elif identity in self.sure:
                assert state in ("rebuilding", "damaged"), f"a saved block is missing in state {state}"

    @invariant()
    def keeps_within_its_capacity(self) -> None:
        files = self.tier._files
        assert files.taken_bytes() <= CAPACITY


TestDiskTier = DiskTierMachine.TestCase
