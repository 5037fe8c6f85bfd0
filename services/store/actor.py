"""The store's shell: messages in, answers out; the catalogue decides, threads move the bytes.

Only the event loop touches the catalogue. A handler never waits for a disk: a lookup is answered from packed arrays
at once, what lies on disk follows as Staged.
"""

import os
from typing import Any

import msgspec
import trio

from services.store.arena.arena import ArenaCut
from services.store.arena_watch import ArenaWatch
from services.store.catalog.catalog import Catalog, Grant, Owner
from services.store.catalog.entries import ON_DISK
from services.store.catalog.leases import Lease, StagedRun
from services.store.catalog.order import NONE
from services.store.commits import FIRST, CommitLog
from services.store.disk.errors import DiskTierError
from services.store.disk_lane import DiskLane
from services.store.opening import Opened, open_disk, open_store
from services.store.requests import (
    answer_found,
    answer_reserved,
    chains,
    checksums_in,
    grants_in,
    pushed,
    scope_of,
)
from services.store.self_check import SelfCheck
from services.store.snapshot import snapshot
from services.store.stager import Stager
from services.store.suspects import wrong_blocks
from shared.actor import Actor, Peer, Reject, on
from shared.messages import Head
from shared.messages.admin import CheckIntegrity, Integrity
from shared.messages.base import split_identities, unpack_u32
from shared.messages.store import (
    COMMIT_DONE,
    COMMIT_STALE,
    RESERVE_FULL,
    RESERVE_GRANTED,
    Abandon,
    Clear,
    Cleared,
    Commit,
    Committed,
    EngineOpened,
    Found,
    Lookup,
    OpenEngine,
    Release,
    Reserve,
    Reserved,
    Taken,
)
from shared.peers import PeerGone, PeerSlow, wait_exit

SCHEDULERS, ADMIN = frozenset({"scheduler"}), frozenset({"admin"})
MAX_BLOCKS = 1 << 16
"""Identities in one message; more is refused."""

ARENA_CUT = 1
"""Exit code: a crash, after which the supervisor starts the next store."""


class Store(Actor):
    """One per home."""

    role_name = "store"
    accepts = SCHEDULERS

    opened: Opened
    lane: DiskLane
    stager: Stager
    watch: ArenaWatch
    books: SelfCheck

    async def start(self) -> None:
        """Recovers both tiers."""
        self._slot_bytes: dict[Owner, int] = {}
        self._owners: dict[Owner, Peer] = {}
        self._unproven: set[str] = set()
        """Engines whose scheduler has lost its connection, but perhaps lives."""
        self.commits = CommitLog(self.config.faults.record_commits)
        self.opened = await trio.to_thread.run_sync(open_store, self.places, self.config, self.faults, self.log)
        if self.opened.catalog is None or self.opened.arena is None or self.opened.recovery is None:
            return
        self.opened.arena.on_cut = self._arena_cut
        self.stager = Stager(self.opened.arena, self.opened.catalog, self._tell, nice=self.config.store.nice)
        self.lane = DiskLane(
            self.opened.arena,
            self.opened.catalog,
            self.opened.recovery,
            reopen=lambda: open_disk(self.places.store, self.config, self.faults),
            attached=self._disk_attached,
            faults=self.faults,
            log=self.log,
            nice=self.config.store.nice,
            freed=self.stager.go_on,
        )
        self.lane.attach(self.opened.disk, self.opened.disk_reason, wanted=self.config.store.disk_bytes > 0)
        self.log.info("store_recovered", **self.opened.adopted, arena=str(self.opened.arena.path))
        self.nursery.start_soon(self.stager.run)
        self.nursery.start_soon(self.lane.run)
        self.watch = ArenaWatch(self.opened.arena, self.opened.catalog, self.lane, stop=self.request_stop, log=self.log)
        self.nursery.start_soon(self.watch.run)
        self.books = SelfCheck(self.opened.catalog, self.lane, self.log)
        self.nursery.start_soon(self.books.run)

    def _disk_attached(self, disk: Any) -> None:
        self.stager.disk = disk

    async def drain(self) -> None:
        """Dirty blocks go to disk, as many as the grace allows; the rest stay in the arena."""
        if self.opened.catalog is None or self.opened.arena is None:
            return
        with trio.move_on_after(0.6 * self.config.supervise.grace_s):
            await self.lane.flush()
        left = self.opened.catalog.behind.length
        if left:
            self.log.warning("drain_left_dirty", blocks=left)
        await self.stager.stop()
        await self.lane.close()
        self.opened.arena.close()

    def snapshot(self) -> dict[str, Any]:
        """See `snapshot.py`."""
        if not self.ready:
            return {}
        if self.opened.catalog is None:
            return {"note": "no KV is stored: " + "; ".join(self.opened.notes or ["both tiers are off"])}
        return snapshot(self.opened, self.lane, self.watch.trouble)

    def peer_down(self, peer: Peer, exit_proven: bool) -> None:
        """Only a proven exit ends leases; grants stand until the next scheduler speaks."""
        if peer.role not in SCHEDULERS:
            return
        owner = _owner(peer)
        if self._owners.get(owner) is peer:
            del self._owners[owner]
        if exit_proven:
            self._owner_gone(owner)
            return
        self._unproven.add(owner[0])
        if peer.pid != self.pid:
            self.nursery.start_soon(self._release_at_exit, owner, peer.pid)

    async def _release_at_exit(self, owner: Owner, pid: int) -> None:
        await wait_exit(pid)
        if owner not in self._owners:
            self._owner_gone(owner)

    def _owner_gone(self, owner: Owner) -> None:
        self._unproven.discard(owner[0])
        self._slot_bytes.pop(owner, None)
        if self.opened.catalog is not None:
            self.opened.catalog.leases.release_owner(owner)
            self.stager.go_on()

    def _arena_cut(self, error: ArenaCut) -> None:
        """Any touch of what was cut off would kill us without a word; what is on disk comes back from there."""
        self.log.error("arena_cut", reason=str(error), hint="this store ends, the next begins a new arena")
        os._exit(ARENA_CUT)

    # --- engines ---------------------------------------------------------------------------------------------

    @on(OpenEngine, roles=SCHEDULERS)
    def _open_engine(self, peer: Peer, message: OpenEngine) -> EngineOpened:
        owner, catalog, arena = _owner(peer), self.opened.catalog, self.opened.arena
        held = grants_in(message.held_slots, message.held_generations)
        if not 0 < message.slot_bytes < 1 << 31:
            raise Reject("bad_request", f"slots of {message.slot_bytes} bytes are not to be had")
        self._slot_bytes[owner], self._owners[owner] = message.slot_bytes, peer
        if catalog is None or arena is None:
            return EngineOpened(arena="", arena_key="", epoch=0, kept=bytes(len(held)))
        kept = catalog.open_engine(owner, held)
        self.stager.go_on()
        self._unproven.discard(peer.engine)
        # A home has one scheduler and one worker at a time, by their locks, and this one speaks after its worker's
        # Idle: whoever had grants under another name, and is not connected or missed, has exited with its worker.
        orphans = catalog.abandon_others({engine for engine, _ in self._owners} | self._unproven)
        if orphans:
            self.log.warning("grants_of_no_engine", slots=orphans)
        if catalog.blocks.slots.size_class(message.slot_bytes) < 0:
            extent = arena.geometry.extent_bytes
            self.log.warning("slots_too_large", engine=peer.engine, slot_bytes=message.slot_bytes, extent_bytes=extent)
        return EngineOpened(arena=str(arena.path), arena_key=arena.key, epoch=catalog.epoch, kept=bytes(kept))

    def _known(self, peer: Peer, blocks: int) -> tuple[Owner, Catalog | None]:
        owner = _owner(peer)
        if owner not in self._slot_bytes:
            raise Reject("bad_request", "open the engine first")
        if blocks > MAX_BLOCKS:
            raise Reject("bad_request", f"{blocks} blocks in one message; at most {MAX_BLOCKS}")
        return owner, self.opened.catalog

    # --- saves -----------------------------------------------------------------------------------------------

    def _told(self, peer: Peer, head: Head, answer: Found | Reserved) -> bool:
        """Whether an answer went out; what it gives would never be given back otherwise."""
        try:
            peer.send(answer, re=head.rid)
        except (PeerGone, PeerSlow) as error:
            self.dropped("unanswered", str(error))
            return False
        return True

    @on(Reserve, roles=SCHEDULERS)
    def _reserve(self, peer: Peer, message: Reserve, head: Head) -> Reserved | None:
        pairs = chains(message.identities, message.parents, message.root)
        owner, catalog = self._known(peer, len(pairs))
        if catalog is None:
            return answer_reserved([Grant(RESERVE_FULL)] * len(pairs), self.incarnation)
        grants = catalog.reserve(
            owner, root=message.root, epoch=message.epoch, length=self._slot_bytes[owner], blocks=pairs
        )
        self.faults.at("store_after_granted")
        if not self._told(peer, head, answer_reserved(grants, self.incarnation)):
            for grant in grants:
                if grant.status == RESERVE_GRANTED:
                    catalog.abandon(owner, grant.slot, grant.generation)
        return None

    @on(Commit, roles=SCHEDULERS)
    def _commit(self, peer: Peer, message: Commit) -> Committed:
        self.faults.at("store_after_commit_arrives")
        grants = grants_in(message.slots, message.generations)
        checksums = checksums_in(message.checksums, len(grants))
        owner, catalog = self._known(peer, len(grants))
        if catalog is None or message.incarnation != self.incarnation:
            return Committed(status=bytes([COMMIT_STALE]) * len(grants))
        status = bytes(
            catalog.commit(owner, slot, generation, checksum)
            for (slot, generation), checksum in zip(grants, checksums, strict=True)
        )
        if self.commits.active:
            published = [slot for (slot, _), done in zip(grants, status, strict=True) if done == COMMIT_DONE]
            self.commits.append(map(self._published, published))
        self.lane.wake()
        self.stager.go_on()
        return Committed(status=status)

    def _published(self, slot: int) -> tuple[bytes, bytes]:
        """Identity and parent of the block in a slot."""
        assert self.opened.catalog is not None
        blocks = self.opened.catalog.blocks
        entry = blocks.slots.entry[slot]
        before = blocks.entries.parent[entry]
        return blocks.entries.identity(entry), FIRST if before == NONE else blocks.entries.identity(before)

    @on(Abandon, roles=SCHEDULERS)
    def _abandon(self, peer: Peer, message: Abandon) -> None:
        grants = grants_in(message.slots, message.generations)
        owner, catalog = self._known(peer, len(grants))
        if catalog is not None:
            for slot, generation in grants:
                catalog.abandon(owner, slot, generation)
            self.stager.go_on()

    # --- loads -----------------------------------------------------------------------------------------------

    @on(Lookup, roles=SCHEDULERS)
    def _lookup(self, peer: Peer, message: Lookup, head: Head) -> Found | None:
        try:
            identities = split_identities(message.identities)
        except ValueError as error:
            raise Reject("bad_request", str(error)) from error
        owner, catalog = self._known(peer, len(identities))
        if catalog is None:
            return answer_found(0, [], 0)
        found = catalog.lookup(owner, identities)
        if found.lease is None:
            return answer_found(0, [], catalog.epoch)
        self.stager.begin(found.orders)
        if not self._told(peer, head, answer_found(found.lease.number, found.places, catalog.epoch)):
            catalog.leases.release(found.lease.number, owner)
            self.stager.go_on()
        return None

    @on(Taken, roles=SCHEDULERS)
    def _taken(self, peer: Peer, message: Taken) -> None:
        """What is on the device makes room for the rest of its lease, or another."""
        owner, catalog = self._known(peer, len(message.blocks) // 4)
        if catalog is None:
            return
        try:
            indices = unpack_u32(message.blocks)
        except ValueError as error:
            raise Reject("bad_request", f"blocks: {error}") from error
        self._touch(catalog, catalog.leases.taken(message.lease, owner, indices))
        self.stager.go_on()

    @on(Release, roles=SCHEDULERS)
    def _release(self, peer: Peer, message: Release) -> None:
        catalog = self.opened.catalog
        if catalog is None:
            return
        try:
            bad = tuple(unpack_u32(message.bad))
        except ValueError as error:
            raise Reject("bad_request", f"bad: {error}") from error
        lease = catalog.leases.open.get(message.lease)
        if lease is None or lease.owner[0] != peer.engine:
            return
        if bad and not self.watch.unreachable():  # else they are whole; it is the file that can't be found
            self.nursery.start_soon(self._judge, peer, lease, bad)
        else:
            self._released(peer, lease)

    async def _judge(self, peer: Peer, lease: Lease, named: tuple[int, ...]) -> None:
        assert self.opened.catalog is not None
        assert self.opened.arena is not None
        catalog = self.opened.catalog
        wrong = await wrong_blocks(self.opened.arena, catalog.blocks, lease, named)
        if catalog.leases.open.get(lease.number) is not lease:
            return  # whoever had it is gone, and has given it back so
        if wrong:
            self.log.warning("blocks_quarantined", engine=peer.engine, blocks=len(wrong))
        if len(wrong) < len(named):
            self.log.warning("blocks_found_right", engine=peer.engine, blocks=len(named) - len(wrong))
        self._released(peer, lease, wrong)

    def _released(self, peer: Peer, lease: Lease, bad: tuple[int, ...] = ()) -> None:
        catalog = self.opened.catalog
        assert catalog is not None
        held = [entry for entry in lease.entries if entry != NONE]
        catalog.leases.release(lease.number, _owner(peer), bad)
        self._touch(catalog, held)
        self.stager.go_on()

    def _touch(self, catalog: Catalog, used: list[int]) -> None:
        """The disk learns the recency of the blocks that it holds of these."""
        entries = catalog.blocks.entries
        if self.lane.disk is not None:
            on_disk = [entry for entry in used if entries.flags[entry] & ON_DISK]
            self.lane.disk.touch({entries.identity(entry): entries.tick[entry] for entry in on_disk})

    def _tell(self, run: StagedRun) -> None:
        """Pushes news of a lease to its owner, if it is still there."""
        peer = self._owners.get(run.lease.owner)
        if peer is None:
            return
        try:
            peer.send(pushed(run.lease.number, run.first, run.places, failed=run.failed))
        except (PeerGone, PeerSlow) as error:
            self.dropped("unanswered", str(error))

    # --- books -----------------------------------------------------------------------------------------------

    @on(CheckIntegrity, roles=ADMIN)
    async def _check_integrity(self, peer: Peer, message: CheckIntegrity) -> Integrity:
        if self.opened.catalog is None:
            return Integrity(skipped="it holds nothing: there is no arena")
        answer = await self.books.asked()
        absent = sum(1 for lease in self.opened.catalog.leases.open.values() if lease.owner not in self._owners)
        return msgspec.structs.replace(answer, absent_leases=absent)

    # --- clear -----------------------------------------------------------------------------------------------

    @on(Clear, roles=SCHEDULERS | ADMIN)
    async def _clear(self, peer: Peer, message: Clear) -> Cleared:
        scope = scope_of(message)
        catalog = self.opened.catalog
        if peer.role not in SCHEDULERS and self._owners:
            raise Reject("overloaded", "a scheduler is connected, whose device tier must be cleared first; ask it")
        if (catalog is None or not self.lane.wanted) and (self.places.store / "segments").exists():
            where = self.places.store
            raise Reject(
                "overloaded",
                f"the disk tier is off, but its files in {where} may hold such blocks; "
                "turn it on again, or stop the stack and run `perdure cache purge`",
            )
        if catalog is None:
            return Cleared(blocks={"host": 0, "disk": 0}, bytes={"host": 0, "disk": 0}, epoch=0)
        try:
            blocks, nbytes = await self.lane.clear(scope)
        except DiskTierError as error:
            raise Reject("overloaded", f"the disk tier could not be cleared: {error.reason}; try again") from error
        self.log.info("cleared", by=peer.name, line=bool(scope.line), blocks=blocks, bytes=nbytes)
        return Cleared(blocks=blocks, bytes=nbytes, epoch=catalog.epoch)


def _owner(peer: Peer) -> Owner:
    return peer.engine, peer.incarnation
